"""kvant recipes: lists the recipes, with bits counted from the page layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from kvant.cli.common import print_table

RECOMMENDED = {  # what each is for
    "kvant-2": "least memory; default of commands once fitted",
    "kvant-3": "between the two",
    "kvant-4": "the best quality at four bits",
    "kvant-4-fast": "four bits at the highest speed",
    "kivi-k4v4": "no fit; the default of kvant.Cache",
    "int8": "no fit; nearly exact where keys have small means",
}
MODEL = "Qwen2.5-Coder-1.5B"
KL = {  # of the model on held-out prose, as in results/
    "kvant-2": 0.0107,
    "kvant-3": 0.0029,
    "kvant-4": 0.0018,
    "kvant-4-fast": 0.0150,
    "kivi-k4v4": 0.0027,
    "int8": 0.0140,
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "recipes",
        examples=(
            "kvant recipes",
            "kvant recipes --all --head-dim 64",
        ),
        help="list the recipes",
        description="Lists the recommended recipes, or all, with bits per number counted from the page layout.",
    )
    parser.add_argument("--all", action="store_true", help="all recipes, those of papers and baselines too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--head-dim", type=int, default=128, metavar="D", help="head dim to count bits at (default 128)"
    )
    parser.set_defaults(run=run)


def describe(head_dim: int) -> list[dict[str, Any]]:
    """One object per recipe."""
    from kvant import recipes
    from kvant.engines.vllm.options import refusal
    from kvant.layout import Layout

    out = []
    for name in recipes.names():
        recipe = recipes.get(name)
        windows = {
            side: {"sink": stream.window.sink, "recent": stream.window.recent, "flush": stream.window.flush}
            for side, stream in recipe.streams.items()
        }
        entry: dict[str, Any] = {
            "name": name,
            "paper": recipe.paper,
            "summary": recipe.summary,
            "head_dim": head_dim,
            "bpe": None,
            "bpe_32k": None,
            "order": None,
            "windows": windows,
            "calibration": recipe.calibrated,
            "engines": ["transformers", *(["vllm"] if refusal(recipe) is None else [])],
            "prefix_safe": recipe.not_prefix_safe is None,
            "not_prefix_safe": recipe.not_prefix_safe,
            "fields": recipe.overridable,
        }
        try:
            layout = Layout.of(recipe, heads=1, head_dim=head_dim)
        except ValueError as error:
            entry["refused"] = str(error)
        else:
            entry.update(bpe=layout.bits_per_element(), bpe_32k=layout.bits_per_element(32768), order=layout.order)
        out.append(entry)
    return out


def run(args: argparse.Namespace) -> int:
    if args.head_dim < 1:
        raise ValueError(f"--head-dim must be positive, got {args.head_dim}")
    found = describe(args.head_dim)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    if not args.all:
        return _recommended(found, args.head_dim)
    columns = [("recipe", "left"), ("bits", "right"), ("at 32k", "right"), ("windows", "left"), ("fit", "left")]
    columns += [("what it is", "left")]
    rows = []
    for entry in found:
        bits = [f"{entry[key]:.3f}" if entry[key] is not None else "refused" for key in ("bpe", "bpe_32k")]
        sides = {(w["sink"], w["recent"] + (w["flush"] if w["flush"] > 1 else 0)) for w in entry["windows"].values()}
        window = " ".join(f"{sink}/{recent}" for sink, recent in sorted(sides)) if sides != {(0, 0)} else "-"
        rows.append([entry["name"], *bits, window, "yes" if entry["calibration"] else "no", entry["summary"]])
    caption = f"bits per cached number at head_dim {args.head_dim}, from the page's layout; windows: sink/recent tokens in full "
    caption += (
        f"precision; served in vLLM: {_all_but(found, lambda entry: 'vllm' in entry['engines'])}; shared prefixes: "
    )
    caption += _all_but(found, lambda entry: entry["prefix_safe"])
    print_table("", columns, rows, caption, whole=("recipe",))
    return 0


def _all_but(found: list[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> str:
    others = [entry["name"] for entry in found if not holds(entry)]
    return f"all but {', '.join(others)}" if others else "all"


def _recommended(found: list[dict[str, Any]], head_dim: int) -> int:
    columns = [
        ("recipe", "left"),
        ("bits", "right"),
        ("KL", "right"),
        ("fit", "left"),
        ("in vLLM", "left"),
        ("for", "left"),
    ]
    rows = []
    for entry in (entry for entry in found if entry["name"] in RECOMMENDED):
        bits = "refused" if entry["bpe_32k"] is None else f"{entry['bpe_32k']:.2f}"
        fit, served = ("yes" if yes else "no" for yes in (entry["calibration"], "vllm" in entry["engines"]))
        name = entry["name"]
        rows.append([name, bits, f"{KL[name]:.4f}", fit, served, RECOMMENDED[name]])
    rows.sort(key=lambda row: list(RECOMMENDED).index(row[0]))
    caption = (
        f"bits per cached number at head_dim {head_dim}, 32k tokens, windows counted; KL against the full cache of {MODEL}, "
        f"prose; kvant check says which fits your model; --all lists all {len(found)}"
    )
    print_table("", columns, rows, caption)
    return 0
