"""kvant tune: chooses a recipe for every layer of a model under a budget of bits, and writes one artifact."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.artifact_options import check_template, warn_of_few_tokens
from kvant.cli.calibrate import out_directory
from kvant.cli.common import (
    add_json_file_option,
    add_model_options,
    check_writable,
    load_model,
    print_table,
    read_source,
    say,
    shown_kl,
    stages,
    write_json,
)
from kvant.cli.parsers import tokens
from kvant.spec import parse_tokens

if TYPE_CHECKING:
    from kvant.tune.run import Tuned


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        examples=(
            "kvant tune --model Qwen/Qwen3-8B --bits 2.5 --out tuned",
            "kvant tune --bits 3 --context 8192 --text chats.jsonl --out tuned",
        ),
        help="choose a recipe for every layer under a budget of bits",
        description="Measures how much the model's output depends on every layer's keys and values, chooses band patterns and "
        "widths for each layer and one window under a budget of bits, fits them, measures the result on held-out text and writes "
        "one artifact, which --artifact of other commands takes. Ctrl-C keeps what was measured: the same command goes on.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--bits",
        type=float,
        required=True,
        metavar="B",
        help="budget: bits per cached number, scales and windows counted",
    )
    parser.add_argument(
        "--context",
        type=tokens,
        default=32768,
        metavar="N",
        help="tokens of a sequence for which the budget is counted, such as 8192 or 32k (k = 1024; default 32k)",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a UTF-8 text, or chats (.jsonl), to fit and to choose on (default: built in)"
    )
    parser.add_argument("--tokens", type=tokens, metavar="T", help="tokens to fit to, as in kvant calibrate")
    parser.add_argument(
        "--candidates",
        metavar="R[,R...]",
        help="recipes whose keys and values layers may combine (default: patterns and widths of kvant-2)",
    )
    parser.add_argument(
        "--recent",
        metavar="N[,N...]",
        help="windows to try, in recent tokens; one is taken for all layers (default 64,128,192,256)",
    )
    parser.add_argument(
        "--recipes", type=int, default=6, metavar="N", help="different recipes that layers have, at most (default 6)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all random draws (default 0)")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the artifact: a new one, or an artifact's"
    )
    add_json_file_option(parser, "what was chosen, predicted and measured")
    parser.set_defaults(run=run)


def numbers(text: str) -> list[int]:
    try:
        found = [parse_tokens(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--recent: expected numbers of tokens such as 64,128, got {text!r}") from None
    if any(each < 0 for each in found):
        raise ValueError(f"--recent: expected numbers from 0, got {text!r}")
    return found


def check_out(path: str) -> None:
    """Refuses a directory that has anything but an artifact in it."""
    from kvant.artifact import FILE

    if not Path(path).is_dir():
        return
    others = sorted(
        entry.name for entry in Path(path).iterdir() if entry.name != FILE and not entry.name.startswith(".")
    )
    if others:
        raise ValueError(f"--out {path!r}: expected a new directory or an artifact's, it has {', '.join(others[:3])}")


def run(args: argparse.Namespace) -> int:
    from kvant import models, recipes
    from kvant.shape import ModelShape
    from kvant.tune import candidates
    from kvant.tune.run import check, tune, windows_of

    names = list(candidates.CANDIDATES) if args.candidates is None else recipes.split(args.candidates)
    recent = candidates.RECENT if args.recent is None else numbers(args.recent)
    chosen = candidates.parse(names)
    text = None if args.text is None else read_source(args.text)
    if args.recipes < 1:
        raise ValueError(f"--recipes must be positive, got {args.recipes}")
    check_writable(args.json, "--json")
    shape = ModelShape.of(models.config_of(args.model, say))
    least, most = check(shape, args.bits, args.context, chosen, windows_of(recent))
    check_template(args.model, text)
    check_out(args.out)
    if args.json is not None and Path(args.json).resolve() == Path(args.out).resolve():
        raise ValueError(f"--json {args.json!r}: expected a file other than --out, which is a directory")
    with out_directory(args.out):
        say(f"candidates take {least:.3f} to {most:.3f} bits at {args.context:,} tokens")
        model, tokenizer = load_model(args)
        begin = time.perf_counter()
        with stages() as progress:
            found = tune(
                model,
                tokenizer,
                args.bits,
                text,
                context=args.context,
                chosen=chosen,
                recent=recent,
                most=args.recipes,
                tokens=args.tokens,
                seed=args.seed,
                progress=progress,
            )
        path = found.artifact.save(args.out)
    warn_of_few_tokens([found.artifact])
    for name, reason in found.refused.items():
        say(f"not a candidate as a whole: {name}, {reason}")
    print_tuned(found)
    if args.json:
        write_json(args.json, {"model": args.model, "artifact": str(path), **report(found)})
    say(f"done in {time.perf_counter() - begin:.0f} s")
    print(path)
    return 0


def report(found: Tuned) -> dict[str, Any]:
    """What --json writes."""
    return {
        "recipe": found.artifact.recipe.name,
        "digest": found.artifact.digest,
        "bits": found.bits,
        "context": found.context,
        "window": {"sink": found.window.sink, "recent": found.window.recent},
        "layers": [dataclasses.asdict(layer) for layer in found.layers],
        "predicted_kl": found.predicted,
        "predicted_kl_uniform": found.predicted_base,
        "bits_uniform": found.base_bits,
        "measured": [dataclasses.asdict(result) for result in found.results],
        "source": found.artifact.source,
    }


def print_tuned(found: Tuned) -> None:
    """Two tables: what every layer has, and what is predicted and measured."""
    columns = [
        ("layer", "right"),
        ("recipe", "left"),
        ("bits", "right"),
        ("KL of keys", "right"),
        ("of values", "right"),
    ]
    rows = [
        [str(i), each.recipe, f"{each.bits:.3f}", f"{each.key_kl:.6f}", f"{each.value_kl:.6f}"]
        for i, each in enumerate(found.layers)
    ]
    caption = f"bits at {found.context:,} tokens; KL: predicted, of the next token, where this stream alone is coded"
    print_table("", columns, rows, caption)
    predicted = [found.predicted, found.predicted_base]
    bits = [found.bits, found.base_bits]
    rows = [
        [
            each.recipe,
            f"{own:.3f}",
            "-" if guess is None else f"{guess:.5f}",
            f"{shown_kl(each.kl):.5f}",
            f"{each.kl_se:.5f}",
            f"{each.top1:.1%}",
        ]
        for each, own, guess in zip(found.results, bits, predicted, strict=True)
    ]
    columns = [
        ("recipe", "left"),
        ("bits", "right"),
        ("predicted KL", "right"),
        ("measured KL", "right"),
        ("± se", "right"),
    ]
    columns += [("top-1", "right")]
    caption = f"bits at {found.context:,} tokens, windows counted; measured on the same held-out tokens, against the full cache"
    print_table("", columns, rows, caption)
