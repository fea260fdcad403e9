"""kvant recipes: lists the recipes, with bits counted from the page layout."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvant.cli.common import print_table


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "recipes",
        help="list the recipes",
        description="Lists the recipes, with bits per number counted from the page layout.",
    )
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
    columns = [("recipe", "left"), ("bits", "right"), ("at 32k", "right"), ("windows", "left"), ("calibrated", "left")]
    columns += [("shared prefixes", "left"), ("what it is", "left")]
    rows = []
    for entry in found:
        bits = [f"{entry[key]:.3f}" if entry[key] is not None else "refused" for key in ("bpe", "bpe_32k")]
        sides = {(w["sink"], w["recent"] + (w["flush"] if w["flush"] > 1 else 0)) for w in entry["windows"].values()}
        window = " ".join(f"{sink}/{recent}" for sink, recent in sorted(sides)) if sides != {(0, 0)} else "-"
        calibrated, shared = ("yes" if entry[key] else "no" for key in ("calibration", "prefix_safe"))
        rows.append([entry["name"], *bits, window, calibrated, shared, entry["summary"]])
    caption = f"bits per cached number at head_dim {args.head_dim}, from the page's layout; "
    caption += "windows: sink/recent tokens in full precision"
    print_table("", columns, rows, caption)
    return 0
