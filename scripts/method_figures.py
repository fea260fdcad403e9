"""Draws what a recipe does to keys and values, for the pages of docs/methods/. The pictures come from the recipes themselves.

    python scripts/method_figures.py [--out docs/methods/figures]

Each is a small SVG file that follows the reader's light or dark scheme.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvant import recipes  # noqa: E402
from kvant.recipe import Recipe, Stream  # noqa: E402

DRAWN = ("saw-int4", "oscar", "vecinfer-2", "squat", "kitty-pro", "kvant-2")
WIDTH, BOX, GAP, TOP = 760, 46, 20, 16
STYLE = """\
<style>
text { font: 12px sans-serif; fill: #1f2328 } .small { font-size: 10.5px; fill: #59636e } .box { fill: #ddf4ff; stroke: #0969da }
.store { fill: #dafbe1; stroke: #1a7f37 } .full { fill: #fff8c5; stroke: #9a6700 } .line { stroke: #59636e; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 } .box { fill: #121d2f; stroke: #4493f8 }
.store { fill: #12261e; stroke: #3fb950 } .full { fill: #272115; stroke: #d29922 } .line { stroke: #9198a1 } }
</style>
"""


def steps(stream: Stream, name: str) -> list[tuple[str, str, str]]:
    """What happens to a vector: (class, first line, second line) of every box."""
    out = []
    if stream.rope == "block":
        out.append(("box", "unrotate", f"to blocks of {stream.rope_block}"))
    for part in stream.transforms:
        out.append(("box", *_words(part)))
    if stream.corrector is not None:
        out.append(("box", *_words(stream.corrector)))
    out.append(("box", *_words(stream.codec)))
    held = "indices" if type(stream.codec).__name__ == "ProductVQ" else "codes and scales"
    out.append(("store", f"page of {name}s", held))
    return out


def _words(part: Any) -> tuple[str, str]:
    """A part in two short lines."""
    kind = type(part).__name__
    clip = "clip, " if getattr(part, "clip", 1.0) != 1.0 else ""
    target = {"queries": "of the queries", "attended": "of attention's outputs"}.get(getattr(part, "target", ""), "")
    bits = str(getattr(part, "bits", ""))
    found = {
        "Hadamard": ("Hadamard", "rotation"),
        "Rotation": ("eigenvectors, H, P", target),
        "Smooth": ("divide channels", "by sqrt(max)"),
        "Balance": ("mean off, basis", "queries x keys"),
        "Spectral": ("partly whitened", "by attention"),
        "Subspace": ("move the error off", "the queries' subspace"),
        "Affine": (
            f"{clip}{bits} bits",
            "a scale a token" if not getattr(part, "group", 0) else f"groups of {part.group}",
        ),
        "ProductVQ": (
            f"nearest of {2 ** int(bits) if bits.isdigit() else 0:,}",
            f"per {getattr(part, 'dim', 0)} channels",
        ),
        "Channel": (f"{bits} bits a channel", f"over {getattr(part, 'group', 0)} tokens"),
        "Boosted": ("2 bits a channel", f"{getattr(part, 'boost', 0):.0%} have 4"),
        "Banded": (f"{bits} bits", "in bands of channels" if "/" in bits else "a scale a token"),
    }
    if kind not in found:
        raise ValueError(f"no words for {kind}: add them to scripts/method_figures.py")
    return found[kind]


def _box(x: float, y: float, wide: float, kind: str, lines: tuple[str, str]) -> str:
    text = "".join(
        f'<text x="{x + wide / 2:.0f}" y="{y + at}" text-anchor="middle"{small}>{escape(line)}</text>'
        for line, at, small in ((lines[0], 19, ""), (lines[1], 35, ' class="small"'))
    )
    return f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{BOX}" rx="6"/>{text}'


def draw(recipe: Recipe) -> str:
    """The picture of a recipe: what happens to keys and to values, and which tokens stay in full precision."""
    out, y = [], TOP
    for name, stream in recipe.streams.items():
        boxes = steps(stream, name)
        left = 60
        wide = min(150.0, (WIDTH - left - 8 - GAP * (len(boxes) - 1)) / len(boxes))
        out.append(f'<text x="8" y="{y + 28}">{name}</text>')
        x = float(left)
        for i, (kind, *lines) in enumerate(boxes):
            out.append(_box(x, y, wide, kind, (lines[0], lines[1])))
            if i + 1 < len(boxes):
                middle = y + BOX / 2
                out.append(f'<path class="line" d="M{x + wide:.0f} {middle}h{GAP - 4}m-5 -4l5 4l-5 4"/>')
            x += wide + GAP
        y += BOX + 16
    for name, stream in recipe.streams.items():
        y += 6
        window, left = stream.window, 60
        sink, recent = (70 if window.sink else 0), (110 if window.ring else 0)
        packed = WIDTH - left - 8 - sink - recent
        waiting = "" if window.flush == 1 else f", and up to {window.flush} that wait for their group"
        told = f"last {window.recent}" if window.recent else "unfinished group"
        out.append(f'<text x="8" y="{y + 15}" class="small">{name}s</text>')
        x = left
        for kind, wide, label in (
            ("full", sink, f"first {window.sink}"),
            ("store", packed, "packed tokens"),
            ("full", recent, told),
        ):
            if wide:
                out.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" height="22"/>')
                out.append(
                    f'<text class="small" x="{x + wide / 2:.0f}" y="{y + 15}" text-anchor="middle">{label}</text>'
                )
            x += wide
        y += 28
        if window.recent and waiting:
            out.append(
                f'<text class="small" x="{left}" y="{y + 8}">{escape("the last " + str(window.recent) + waiting)}</text>'
            )
            y += 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" role="img" aria-label="{recipe.name}">'
    )
    return head + "\n" + STYLE + "\n".join(out) + "\n</svg>\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "methods" / "figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        (args.out / f"{name}.svg").write_text(draw(recipes.get(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
