"""kvant check: measures which recipes fit a model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from kvant.cli.common import add_json_option, add_model_options, load_model, print_table, say, shown_kl, stages
from kvant.cli.parsers import tokens

if TYPE_CHECKING:
    from kvant.eval.check import Checked

UNFIT, UNCHECKED = 1, 3  # exit status if a recipe that --recipe names is unfit, or has no verdict


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        examples=(
            "kvant check --model Qwen/Qwen3-8B --recipe kvant-2,kvant-4 --fit",
            "kvant check --model path/to/finetune --choose",
        ),
        help="which recipes fit a model",
        description="Reads a built-in text through each recipe's packed cache and through the full one, and says whether the recipe "
        "fits the model: good, usable or unfit (docs/check.md has the thresholds). Verdicts are stored; kvant serve "
        "and kvant generate use them. Exit status 1 if a recipe that --recipe names is unfit, 3 if one has no verdict.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--recipe",
        metavar="R[,R...]",
        help="recipes, or all (default: those with fast kernels on this machine that need no long fit)",
    )
    parser.add_argument(
        "--artifact",
        action="append",
        default=[],
        metavar="DIR",
        help="directory that kvant calibrate wrote; may be repeated",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="also fit recipes that learn more than means, on the built-in calibration text, and cache the artifacts",
    )
    parser.add_argument(
        "--tokens",
        type=tokens,
        metavar="N",
        help="tokens to read (default 1024, which is 1k); verdicts on fewer are not stored",
    )
    parser.add_argument(
        "--choose", action="store_true", help="only print which recipe is the default for this model, and why"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvant import recipes
    from kvant.artifact import Artifact
    from kvant.eval.check import LEAST, TOKENS, examine
    from kvant.recipe import MixedRecipe

    asked = None if args.recipe is None else [recipes.get(name) for name in recipes.split(args.recipe)]
    if args.choose and (asked or args.artifact or args.fit or args.tokens):
        raise ValueError(
            "--choose takes neither --recipe nor --artifact, --fit or --tokens: it prints the default without them"
        )
    if args.fit and asked is None:
        raise ValueError("--fit needs --recipe: name the recipes to fit")
    if args.tokens is not None and args.tokens < LEAST:
        raise ValueError(f"--tokens must be at least {LEAST}, got {args.tokens}")
    given = [Artifact.load(path) for path in args.artifact]
    mixed = [artifact.recipe for artifact in given if isinstance(artifact.recipe, MixedRecipe)]
    if mixed:  # nothing else names these
        asked = [*(asked or ()), *mixed]
    model, tokenizer = load_model(args)
    if args.choose:
        return choose(model, tokenizer, args)
    with stages() as progress:
        found = examine(
            model,
            tokenizer,
            asked,
            artifacts=given,
            fit=args.fit,
            tokens=TOKENS if args.tokens is None else args.tokens,
            progress=progress,
        )
    if args.json:
        report = {"model": args.model, "verdicts": [each.to_dict() for each in found.verdicts]}
        print(json.dumps({**report, "left_out": found.left_out}, indent=2))
    else:
        print_verdicts(found)
    words = {each.word for each in found.verdicts} if asked is not None else set()
    unchecked = asked is not None and (bool(found.left_out) or "unknown" in words)
    return UNFIT if "unfit" in words else UNCHECKED if unchecked else 0


def choose(model: Any, tokenizer: Any, args: argparse.Namespace) -> int:
    from kvant.eval.choose import choose_recipe

    with stages() as progress:
        found = choose_recipe(model, tokenizer, say, progress=progress)
    if args.json:
        report = {"model": args.model, "recipe": found.recipe.name, "reason": found.reason}
        print(json.dumps({**report, "verdict": found.verdict.to_dict()}, indent=2))
    else:
        print(found.recipe.name)
        say(found.reason)
    return 0


def print_verdicts(found: Checked) -> None:
    """Prints a table, best first, then why recipes are unfit and which were not checked."""
    order = {"good": 0, "usable": 1, "unfit": 2, "unknown": 3}
    ordered = sorted(
        found.verdicts, key=lambda each: (order[each.word], each.kl if each.kl == each.kl else float("inf"))
    )
    columns = [("recipe", "left"), ("bits", "right"), ("KL", "right"), ("± se", "right"), ("top-1", "right")]
    columns += [("verdict", "left")]
    rows = []
    for each in ordered:
        figures = [f"{shown_kl(each.kl):.4f}", f"{each.kl_se:.4f}", f"{each.top1:.1%}", each.word]
        if each.word == "unknown":
            figures = ["-", "-", "-", "unknown: nothing was packed"]
        rows.append([each.recipe, f"{each.bpe:.2f}", *figures])
    if rows:
        first = ordered[0]
        caption = (
            f"{first.tokens} tokens scored against the full cache, {first.dtype}; bits per cached number of a full page"
        )
        if first.noise is not None:
            caption += f"; {shown_kl(first.noise):.4f} of KL is rounding: the unquantized recipe has as much"
        print_table("", columns, rows, caption)
    told: dict[str, list[str]] = {}
    for each in ordered:
        if each.why:
            told.setdefault(each.why, []).append(each.recipe)
    for why, names in told.items():
        print(f"{', '.join(names)}: {why}")
    reasons: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        say(f"not checked: {', '.join(names)}: {reason}")
