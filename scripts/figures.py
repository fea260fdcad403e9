"""Draws the pictures of the README from results/: quality against bits, and speed of decode attention.

    python scripts/figures.py [--out docs/figures]

Each picture is an SVG file in a light and in a dark form. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
THEMES = {
    "light": {"ink": "#1f2328", "grid": "#d8dee4", "other": "#8c959f", "paper": "#0969da", "ours": "#cf222e"}
    | {"pale_paper": "#80b3ef", "pale_ours": "#e89298"},
    "dark": {"ink": "#e6edf3", "grid": "#30363d", "other": "#7d8590", "paper": "#58a6ff", "ours": "#ff7b72"}
    | {"pale_paper": "#2f5d94", "pale_ours": "#98443f"},
}
MODELS = {  # file in results/: title, head_dim
    "qwen2.5-coder-1.5b": ("Qwen2.5-Coder-1.5B", 128),
    "smollm2-135m": ("SmolLM2-135M", 64),
}
OURS = ("kvant-2", "kvant-3", "kvant-4")
PAPERS = ("saw-int4", "oscar", "vecinfer", "squat", "kitty")  # how the recipes of the five papers begin
LABELLED = {
    *OURS,
    *(
        "kvant-4-fast",
        "oscar",
        "kitty-pro",
        "kivi-k2v2-sink",
        "kivi-k4v4",
        "saw-int4",
        "int4",
        "vecinfer-4",
        "vecinfer-2",
    ),
    *("squat-pre", "int8"),
}
LEAST_KL, MOST_BITS = 1e-4, 8.6
LABEL = 7.5  # points of a label's font
# Where a label may stand beside its point: its offset in points, and how it is aligned. The first that covers least is taken.
PLACES = [
    (distance * dx, distance * dy, "left" if dx > 0 else "right" if dx < 0 else "center")
    for distance in (1.0, 2.0, 3.0)
    for dx, dy in ((6, 0), (-6, 0), (5, 6), (-5, 6), (5, -6), (-5, -6), (0, 8), (0, -8))
]
SHAPES = [(32, 32768), (128, 8192), (1, 131072), (8, 8192)]
SPEEDS = {"saw-int4": "pale_paper", "oscar": "paper", "kvant-4": "pale_ours", "kvant-2": "ours"}  # and their colors


def style(theme: dict[str, str]) -> None:
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "kvant",
            "font.family": "sans-serif",
            "font.size": 9,
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme["ink"]
            ),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": theme["grid"],
            "legend.frameon": False,
        }
    )


def kind(name: str) -> str:
    if name.startswith("kvant"):
        return "ours"
    return "paper" if name.startswith(PAPERS) else "other"


def quality(theme: dict[str, str]) -> Any:
    """KL against bits at 32k tokens, a panel for each model."""
    figure, axes = plt.subplots(1, len(MODELS), figsize=(9.6, 4.2), sharey=True)
    names = {"ours": "kvant", "paper": "the five papers", "other": "baselines"}
    points: list[dict[str, tuple[float, float]]] = []
    for axis, (file, (title, dim)) in zip(axes, MODELS.items(), strict=True):
        rows = json.loads((ROOT / "results" / f"{file}.json").read_text())["texts"]["prose"]["results"]
        plain = {
            row["recipe"]: row for row in rows if not set(row["recipe"]) & set(":@#%+~") and row["recipe"] != "full"
        }
        points.append({name: (row["bits"][str(dim)][1], max(LEAST_KL, row["kl"])) for name, row in plain.items()})
        for each, label in names.items():
            found = [row for name, row in plain.items() if kind(name) == each and not name.startswith("tuned")]
            axis.scatter(
                [row["bits"][str(dim)][1] for row in found],
                [max(LEAST_KL, row["kl"]) for row in found],
                s=34 if each == "ours" else 20,
                color=theme[each],
                label=label,
                zorder=3 if each == "ours" else 2,
            )
        front = [plain[name] for name in OURS]
        axis.plot([row["bits"][str(dim)][1] for row in front], [row["kl"] for row in front], color=theme["ours"], lw=1)
        axis.set(
            yscale="log",
            ylim=(LEAST_KL, 15),
            xlim=(0.5, MOST_BITS + 0.4),
            title=title,
            xlabel="bits per cached number, 32k tokens",
        )
        axis.grid(True, which="major", lw=0.6)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("KL of the next token (less is better)")
    axes[0].legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    for axis, each in zip(axes, points, strict=True):
        label_points(axis, each, theme)
    return figure


Box = tuple[float, float, float, float]  # left, bottom, right, top, in points of the figure


def label_points(axis: Any, points: dict[str, tuple[float, float]], theme: dict[str, str]) -> None:
    """Writes the labelled recipes' names beside their points, where they cover neither points nor each other."""
    scale = 72 / axis.figure.dpi
    where = {name: axis.transData.transform(at) * scale for name, at in points.items()}
    (front,) = axis.lines
    ends = axis.transData.transform(front.get_xydata()) * scale
    line = [a + (b - a) * t / 20 for a, b in itertools.pairwise(ends) for t in range(21)]
    covered: list[Box] = [(x - 2.5, y - 2.5, x + 2.5, y + 2.5) for x, y in where.values()]
    covered += [(x, y, x, y) for x, y in line]
    frame = axis.get_window_extent()
    inside = tuple(edge * scale for edge in (frame.x0, frame.y0, frame.x1 + 20, frame.y1))
    crowd = {name: sum(abs(x - at[0]) + abs(y - at[1]) < 40 for x, y in where.values()) for name, at in where.items()}
    for name in sorted(LABELLED & where.keys(), key=lambda name: (-crowd[name], name)):  # the most crowded first
        x, y, align = min(PLACES, key=lambda place: cost(box(name, where[name], place), covered, inside))
        covered.append(box(name, where[name], (x, y, align)))
        axis.annotate(
            name,
            points[name],
            (x, y),
            textcoords="offset points",
            fontsize=LABEL,
            ha=align,
            va="center",
            color=theme[kind(name)],
        )


def box(name: str, at: Any, place: tuple[float, float, str]) -> Box:
    """What a label takes; its letters are taken to be 0.61 as wide as high."""
    width, x, y = 0.61 * LABEL * len(name), at[0] + place[0], at[1] + place[1]
    left = {"left": x, "right": x - width, "center": x - width / 2}[place[2]]
    return left, y - LABEL / 2, left + width, y + LABEL / 2


def cost(label: Box, covered: list[Box], inside: Box) -> int:
    """How many points and labels it covers; outside the frame it may not stand."""
    out = label[0] < inside[0] or label[1] < inside[1] or label[2] > inside[2] or label[3] > inside[3]
    overlaps = sum(a[0] < label[2] and label[0] < a[2] and a[1] < label[3] and label[1] < a[3] for a in covered)
    return 100 * out + overlaps


def speed(theme: dict[str, str]) -> Any:
    """Decode attention, times the fastest bfloat16 kernel; a mark where the bytes alone would allow."""
    rows = json.loads((ROOT / "results" / "h200.json").read_text())["results"]
    by = {(row["cache"], row["batch"], row["context"]): row for row in rows}
    figure, axis = plt.subplots(figsize=(9.6, 3.0))
    for i, (name, color) in enumerate(SPEEDS.items()):
        found = [by[name, batch, context] for batch, context in SHAPES]
        places = [place + (i - 1.5) * 0.2 for place in range(len(SHAPES))]
        bars = axis.bar(places, [row["times"] for row in found], 0.18, color=theme[color], label=name)
        axis.bar_label(bars, [f"{row['times']:.1f}" for row in found], fontsize=7.5, padding=1, color=theme["ink"])
    axis.axhline(1, color=theme["ink"], lw=0.8, ls=":")
    axis.set_xticks(range(len(SHAPES)), [f"{batch} x {context:,}" for batch, context in SHAPES])
    axis.set(
        ylim=(0, 1.17 * max(bar.get_height() for bar in axis.patches)),  # room for labels and the legend
        ylabel="speed, bfloat16 = 1",
        xlabel="sequences x tokens; decode attention of one layer on one H200, beside the fastest bfloat16 kernel",
    )
    axis.legend(ncols=len(SPEEDS), loc="upper right", fontsize=8)
    figure.tight_layout()
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, theme in THEMES.items():
        style(theme)
        for label, draw in (("quality", quality), ("speed", speed)):
            figure = draw(theme)
            figure.savefig(args.out / f"{label}-{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
