"""kvant calibrate: fits a recipe to a model and writes the artifact."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvant.cli.artifact_options import check_template, warn_of_few_tokens
from kvant.cli.common import add_json_option, add_model_options, load_model, read_source, say, stages
from kvant.cli.parsers import tokens
from kvant.files import directory_for


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        examples=(
            "kvant calibrate --model Qwen/Qwen3-8B --recipe kvant-2 --out fitted",
            "kvant calibrate --recipe oscar --text chats.jsonl --out fitted",
        ),
        help="fit a recipe to a model",
        description="Measures a model on a text, fits the recipe's calibrated tensors and writes them to DIR/artifact.safetensors. "
        "Ctrl-C keeps what was measured and fitted: the same command goes on from there.",
    )
    add_model_options(parser)
    parser.add_argument("--recipe", required=True, metavar="R", help="a recipe that needs calibration")
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 text, or chats (.jsonl); default: the built-in text")
    parser.add_argument(
        "--tokens",
        type=tokens,
        metavar="N",
        help="tokens to read, such as 8192 or 8k (default: 8192, on a GPU 65536, or all of a shorter text; kvant-4-fast reads "
        "1024 of the built-in text)",
    )
    parser.add_argument(
        "--max-position",
        type=tokens,
        metavar="P",
        help="positions that will be served (default: all that the model allows)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all random draws (default 0)")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the artifact; an existing one is replaced atomically"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvant import recipes

    recipe = recipes.get(args.recipe)
    if not recipe.calibrated:
        raise ValueError(f"recipe {recipe.name} has nothing to calibrate")
    text = None if args.text is None else read_source(args.text)
    with out_directory(args.out):
        check_template(args.model, text)
        model, tokenizer = load_model(args)
        from kvant.calibrate.run import calibrate

        begin = time.perf_counter()
        with stages() as progress:
            artifact = calibrate(
                model,
                tokenizer,
                recipe,
                text,
                tokens=args.tokens,
                max_position=args.max_position,
                seed=args.seed,
                progress=progress,
            )
        path = artifact.save(args.out)
    warn_of_few_tokens([artifact])
    report = {
        "model": args.model,
        "recipe": recipe.name,
        "artifact": str(path),
        "bytes": path.stat().st_size,
        "digest": artifact.digest,
        "seconds": round(time.perf_counter() - begin, 1),
        **artifact.source,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        say(
            f"read {report['tokens']} tokens, fitted for positions up to {report['max_position']}, in {report['seconds']:.0f} s"
        )
        print(path)
    return 0


@contextlib.contextmanager
def out_directory(path: str) -> Iterator[None]:
    """Makes the directory of --out and refuses one that cannot be made, before the work starts. Work that fails or is interrupted
    leaves no new, empty directory behind."""
    if Path(path).exists() and not Path(path).is_dir():
        raise ValueError(f"--out {path!r}: expected a directory, got a file")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory_for(Path(path)))
        except OSError as error:
            raise ValueError(f"--out {path!r}: cannot make this directory: {error}") from error
        yield
