"""What commands share: options of a model, tables, progress, files written whole or not at all."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvant.files import replacing


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", metavar="M", help="Hugging Face directory or id, or smollm2 (default)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, bfloat16 elsewhere"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and tokenizer that a command's options name."""
    import torch

    from kvant import models

    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be positive, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {args.device!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    return models.load(args.model, args.dtype, args.device, say)


def say(text: str) -> None:
    """Tells a person what is going on; never mixed into results."""
    print(f"kvant: {text}", file=sys.stderr, flush=True)


class Advance(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr for every stage of some work; silent where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield advance


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A progress bar for work of one stage."""
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


def print_table(
    title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], caption: str = ""
) -> None:
    """A table that fits a terminal; columns are (heading, "left" or "right")."""
    table = Table(
        title=title or None, title_justify="left", caption=caption or None, caption_justify="left", box=SIMPLE_HEAD
    )
    for heading, justify in columns:
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)


def check_writable(path: str | None, option: str) -> None:
    """Refuses an output file that could not be written, before the work starts."""
    if path is None:
        return
    parent = Path(path).resolve().parent
    if not parent.is_dir():
        raise ValueError(f"{option} {path!r}: there is no directory {str(parent)!r}")
    if Path(path).is_dir():
        raise ValueError(f"{option} {path!r}: expected a file, got a directory")


def write_json(path: str, data: Any) -> None:
    """Writes a report whole or not at all."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n")


def processor() -> str:
    """What the CPU calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def tell_reference(model: Any, cache: Any) -> None:
    """Says so where a cache on a CPU is read by the plain reference, and why; on a GPU the choice itself warns."""
    from kvant.ops import explain

    if model.device.type == "cpu":
        name, refusals = explain("decode", cache.layout, model.device)
        if name == "reference":
            reasons = "; ".join(f"{k}: {v}" for k, v in refusals.items() if "CUDA" not in v)
            say(f"{cache.recipe.name} decodes by the plain reference, which is slow ({reasons})")
