"""kvant recipes: lists the recipes, or shows some of them, with bits counted from the page layout."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvant.cli.common import add_json_option, print_table
from kvant.cli.parsers import WIDTH

if TYPE_CHECKING:
    from kvant.recipe import Recipe

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
    "kvant-2": 0.0109,
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
            "kvant recipes kvant-2",
            "kvant recipes --all --head-dim 64",
        ),
        help="list the recipes, or show one",
        description="Lists the recommended recipes, or all, with bits per number counted from the page layout. With names, shows "
        "these: bits, windows, whether they need an artifact, and their fields.",
    )
    parser.add_argument("names", nargs="*", metavar="R", help="recipes to show, such as kvant-2 or kvant-2:recent=64")
    parser.add_argument("--all", action="store_true", help="all recipes, those of papers and baselines too")
    add_json_option(parser, ": of the named recipes, or of all")
    parser.add_argument(
        "--head-dim", type=int, default=128, metavar="D", help="head dim to count bits at (default 128)"
    )
    parser.set_defaults(run=run)


def describe(chosen: Sequence[Recipe], head_dim: int) -> list[dict[str, Any]]:
    """One object per recipe."""
    from kvant.engines.vllm.options import refusal
    from kvant.layout import Layout

    out = []
    for recipe in chosen:
        windows = {
            side: {name: getattr(stream.window, name) for name in ("sink", "recent", "flush", "window_dtype")}
            for side, stream in recipe.streams.items()
        }
        entry: dict[str, Any] = {
            "name": recipe.name,
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
            "streams": {side: stream.to_dict() for side, stream in recipe.streams.items()},
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
    from kvant import recipes

    if args.names and args.all:
        raise ValueError("name recipes to show, or give --all to list all: one of the two")
    names = [each for text in args.names for each in recipes.split(text)]
    found = describe([recipes.get(name) for name in names or recipes.names()], args.head_dim)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    if names:
        print("\n\n".join(shown(entry) for entry in found))
        return 0
    if not args.all:
        return _recommended(found, args.head_dim)
    columns = [("recipe", "left"), ("bits", "right"), ("at 32k", "right"), ("windows", "left"), ("fit", "left")]
    columns += [("what it is", "left")]
    rows = []
    for entry in found:
        bits = [f"{entry[key]:.3f}" if entry[key] is not None else "refused" for key in ("bpe", "bpe_32k")]
        sides = {_first_and_last(window) for window in entry["windows"].values()}
        window = " ".join(f"{sink}/{recent}" for sink, recent in sorted(sides)) if sides != {(0, 0)} else "-"
        rows.append([entry["name"], *bits, window, "yes" if entry["calibration"] else "no", entry["summary"]])
    caption = f"bits per cached number at head_dim {args.head_dim}, from the page's layout; windows: sink/recent tokens beside "
    caption += (
        f"the pages; served in vLLM: {_all_but(found, lambda entry: 'vllm' in entry['engines'])}; shared prefixes: "
    )
    caption += _all_but(found, lambda entry: entry["prefix_safe"])
    print_table("", columns, rows, caption, whole=("recipe",))
    return 0


def shown(entry: dict[str, Any]) -> str:
    """A recipe for reading, one fact a line."""
    name = entry["name"]
    facts = [("paper", entry["paper"]), ("made for", RECOMMENDED.get(name, ""))]
    bits = f"refused at head_dim {entry['head_dim']}: {entry.get('refused')}"
    if entry["bpe"] is not None:
        bits = (
            f"{entry['bpe']:.3f} per cached number of a full page, {entry['bpe_32k']:.3f} at 32k tokens with windows "
        )
        bits += f"(head_dim {entry['head_dim']})"
    facts += [("bits", bits), ("windows", _windows(entry["windows"]))]
    needed = f"needed: commands fit it to a model once, or kvant calibrate --recipe {name} --out DIR"
    facts.append(("artifact", needed if entry["calibration"] else "not needed"))
    facts.append(("engines", ", ".join(entry["engines"])))
    facts.append(("prefixes", f"not shared: {entry['not_prefix_safe']}" if entry["not_prefix_safe"] else "shared"))
    for label, side in (("keys", "key"), ("values", "value")):
        stream = entry["streams"][side]
        parts = [*stream["transforms"], *filter(None, (stream["corrector"],)), stream["codec"], stream["window"]]
        facts += [("" if i else label, _part(part)) for i, part in enumerate(parts)]
        if stream["rope"] != "post":
            facts.append(("", f"rope={stream['rope']} rope_block={stream['rope_block']}"))
    lines = [f"{name}: {entry['summary']}" if entry["summary"] else name]
    for label, text in facts:
        if text:
            lines += textwrap.wrap(f"  {label:10}{text}", WIDTH, subsequent_indent=" " * 12, break_on_hyphens=False)
    return "\n".join(lines)


def _part(data: dict[str, Any]) -> str:
    """A part of a stream: its kind, and its fields with their values as a command line takes them."""
    fields = {field: str(value).lower() if isinstance(value, bool | None) else value for field, value in data.items()}
    return " ".join([fields.pop("kind"), *(f"{field}={value}" for field, value in fields.items())])


def _first_and_last(window: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a window: the first and, at most, the last."""
    return window["sink"], window["recent"] + (window["flush"] if window["flush"] > 1 else 0)


def _windows(windows: dict[str, dict[str, Any]]) -> str:
    sides = {f"{side}s": _first_and_last(window) for side, window in windows.items()}
    told = {name: f"{sink} first and {recent} last" for name, (sink, recent) in sides.items()}
    if set(sides.values()) == {(0, 0)}:
        return "none: all tokens are packed"
    alike = len(set(told.values())) == 1
    tokens = next(iter(told.values())) if alike else ", ".join(f"{name} {text}" for name, text in told.items())
    fp8 = windows["value"]["window_dtype"] == "fp8"
    return f"{tokens} tokens" + (", keys in full precision and values in fp8" if fp8 else " in full precision")


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
