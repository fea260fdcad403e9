"""Shared by commands: options of a model, tables, progress, files that are written atomically."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvant.files import check_replaceable, replacing
from kvant.progress import default_progress

if TYPE_CHECKING:
    from kvant.chats import Chats

DEFAULT_RECIPE = "kvant-2"  # kvant.recipes.DEFAULT, repeated here so that help texts need no import of torch
DEVICES = ("auto", "cpu", "cuda")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="M",
        help="Hugging Face directory or id, a .gguf file, or smollm2 (default)",
    )
    add_device_options(parser, "float32 (a CPU's default), bfloat16, float16 (a GPU's: the checkpoint's)")


def add_device_options(parser: argparse.ArgumentParser, dtype_help: str) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), metavar="T", help=dtype_help)
    parser.add_argument(
        "--device", default="auto", metavar="D", help="cpu, cuda or auto (default): cuda where there is a GPU"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")


def add_json_option(parser: argparse.ArgumentParser, note: str = "", inherited: bool = False) -> None:
    """--json of a command whose answer is what it prints: the answer is printed as JSON, and nothing else on stdout. `inherited`: of
    a subcommand whose command has the option too; it may stand before or after the subcommand."""
    default = argparse.SUPPRESS if inherited else False
    parser.add_argument("--json", action="store_true", default=default, help=f"print JSON in place of text{note}")


def add_json_file_option(parser: argparse.ArgumentParser, what: str = "the results") -> None:
    """--json FILE of a command that measures for long and prints tables meanwhile: the tables are printed all the same."""
    parser.add_argument("--json", metavar="FILE", help=f"also write {what} to FILE, as JSON")


def pick_device(asked: str) -> str:
    """cpu or cuda, for a value of --device."""
    import torch

    if asked not in DEVICES:
        raise ValueError(f"--device must be cpu, cuda or auto, got {asked!r}")
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ValueError("--device cuda: torch sees no CUDA device here")
    return ("cuda" if there else "cpu") if asked == "auto" else asked


def check_threads(threads: int) -> None:
    """Refuses a number of CPU threads that no machine like this could start."""
    most = 16 * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise ValueError(f"--threads must be from 1 to {most}, 16 for each core, got {threads}")


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """Loads the model and tokenizer that the options name, and prints their device and dtype on stderr."""
    if args.threads is not None:
        check_threads(args.threads)
    import torch

    from kvant import models

    device = pick_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, tokenizer = models.load(args.model, args.dtype, device, say)
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if device == "cuda" else f"{threads} CPU thread{'s' if threads > 1 else ''}"
    say(f"{args.model} on {where}, {str(model.dtype).removeprefix('torch.')}")
    return model, tokenizer


def say(text: str) -> None:
    """Prints a message for the user on stderr; results go to stdout."""
    print(f"kvant: {text}", file=sys.stderr, flush=True)


class Advance(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


stages = default_progress  # progress of work with several stages


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Progress of work with one stage."""
    with stages() as advance:
        yield lambda done, total: advance(title, done, total)


def read_text(path: str, option: str = "--text") -> str:
    """A UTF-8 file that an option names."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{option} {path!r}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path!r}: expected a UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{option} {path!r}: cannot be read: {error.strerror or error}") from error


def read_source(path: str, option: str = "--text") -> str | Chats:
    """A text that an option names, or chats where the file's name ends in .jsonl."""
    text = read_text(path, option)
    if Path(path).suffix.lower() != ".jsonl":
        return text
    from kvant.chats import Chats

    return Chats.parse(text, f"{option} {path}")


def print_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    whole: Collection[str] = (),
) -> None:
    """Prints a table that fits the terminal, if it can without breaking a number or a word; columns are (heading, "left" or "right"),
    `whole` those that are never wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", caption=caption or None, caption_justify="left", box=SIMPLE_HEAD
    )
    console = Console(width=None if sys.stdout.isatty() else 100)
    cells = [[row[place] for row in rows] for place in range(len(columns))]
    # numbers and the first column are never broken: half a number is another number
    firm = [place == 0 or justify == "right" or name in whole for place, (name, justify) in enumerate(columns)]
    natural = 1 + sum(3 + max(map(len, (*own, name))) for own, (name, _) in zip(cells, columns, strict=True))
    least = 1
    for own, fixed, (name, justify) in zip(cells, firm, columns, strict=True):
        heading = "\n".join(name.split()) if natural > console.width and fixed and name not in whole else name
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=fixed)  # type: ignore[arg-type]
        words = own if fixed else [word for cell in own for word in cell.split()]
        least += 3 + max(map(len, (*words, *heading.split("\n" if fixed else None), "")))
    for row in rows:
        table.add_row(*row)
    if console.width < least:
        console = Console(width=least)
    console.print(table)


def shown_kl(kl: float) -> float:
    """A KL for display: a KL is not negative, so values slightly below zero are rounding and become 0."""
    return 0.0 if -1e-4 < kl < 0.0 else kl


def against_16_bit(times_smaller: float) -> str:
    """A size in words: "3.56 times smaller than 16-bit", or larger, or the same."""
    if abs(times_smaller - 1.0) < 0.005:
        return "as large as 16-bit"
    if times_smaller < 1.0:
        return f"{1.0 / times_smaller:.2f} times larger than 16-bit"
    return f"{times_smaller:.2f} times smaller than 16-bit"


def packed_tokens(recipe: Any, tokens: int) -> int:
    """Number of a sequence's tokens whose key or value is read from packed pages; the others are in full precision."""
    from kvant.recipe import spans

    return sum(span.stop - span.start for span in spans(recipe, tokens) if "packed" in (span.key, span.value))


def nothing_packed(recipe: Any, tokens: int) -> str:
    """Why a short sequence shows nothing about a recipe: all of its tokens are in full precision."""
    windows = [stream.window for stream in recipe.streams.values()]
    sink, recent = windows[0].sink, max(window.ring for window in windows)
    return (
        f"nothing has been packed yet: all {tokens} tokens are in the window of {sink} first and {recent} last tokens in full "
        "precision"
    )


def check_writable(path: str | None, option: str) -> None:
    """Refuses an output file that cannot be written, before the work starts."""
    if path is None:
        return
    parent = Path(path).resolve().parent
    if not parent.is_dir():
        raise ValueError(f"{option} {path!r}: there is no directory {str(parent)!r}")
    check_replaceable(Path(path), option)


def write_json(path: str, data: Any) -> None:
    """Writes a JSON file atomically."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n")


def processor() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def tell_reference(model: Any, cache: Any) -> None:
    """Says in a line where a cache on a CPU is read by the slow reference, and why. On a GPU `ops.choose` warns."""
    from kvant.ops import explain

    for layout in cache.layouts.distinct if model.device.type == "cpu" else ():
        name, refusals = explain("decode", layout, model.device)
        if name == "reference":
            reason = next((f"{k}: {v}" for k, v in refusals.items() if "CUDA" not in v), "")
            recipe = layout.recipe.name
            say(f"{recipe} decodes by the slow reference ({reason}); kvant doctor --recipe {recipe} says more")
