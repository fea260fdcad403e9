"""Draws the pictures of the README from results/: quality against bits, and speed of decode attention.

    python scripts/figures.py [--out docs/figures]

Each picture is an SVG file in a light and in a dark form. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
THEMES = {
    "light": {"ink": "#1f2328", "grid": "#d8dee4", "other": "#8c959f", "paper": "#0969da", "ours": "#cf222e"},
    "dark": {"ink": "#e6edf3", "grid": "#30363d", "other": "#7d8590", "paper": "#58a6ff", "ours": "#ff7b72"},
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
LEFT = {
    "squat-pre",
    "vecinfer-2",
    "kvant-2",
    "kvant-3",
    "kvant-4",
    "oscar",
}  # labels on that side; the others on the right
LEAST_KL, MOST_BITS = 1e-3, 8.6
SHAPES = [(32, 32768), (128, 8192), (1, 131072), (8, 8192)]
SPEEDS = ("saw-int4", "kvant-4", "oscar", "kvant-2")


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
    for axis, (file, (title, dim)) in zip(axes, MODELS.items(), strict=True):
        rows = json.loads((ROOT / "results" / f"{file}.json").read_text())["texts"]["prose"]["results"]
        plain = {
            row["recipe"]: row for row in rows if not set(row["recipe"]) & set(":@#%+~") and row["recipe"] != "full"
        }
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
        for name in sorted(LABELLED & plain.keys()):
            at = plain[name]["bits"][str(dim)][1], max(LEAST_KL, plain[name]["kl"])
            side = -1 if name in LEFT else 1
            options = {"ha": "right" if side < 0 else "left", "va": "center", "color": theme[kind(name)]}
            axis.annotate(name, at, (6 * side, 0), textcoords="offset points", fontsize=7.5, **options)
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
    return figure


def speed(theme: dict[str, str]) -> Any:
    """Decode attention, times the fastest bfloat16 kernel; a mark where the bytes alone would allow."""
    rows = json.loads((ROOT / "results" / "h200.json").read_text())["results"]
    by = {(row["cache"], row["batch"], row["context"]): row for row in rows}
    figure, axis = plt.subplots(figsize=(9.6, 3.0))
    colors = [theme["other"], theme["ink"], theme["paper"], theme["ours"]]
    for i, (name, color) in enumerate(zip(SPEEDS, colors, strict=True)):
        found = [by[name, batch, context] for batch, context in SHAPES]
        places = [place + (i - 1.5) * 0.2 for place in range(len(SHAPES))]
        bars = axis.bar(places, [row["times"] for row in found], 0.18, color=color, label=name)
        axis.bar_label(bars, [f"{row['times']:.1f}" for row in found], fontsize=7.5, padding=1, color=theme["ink"])
    axis.axhline(1, color=theme["ink"], lw=0.8, ls=":")
    axis.set_xticks(range(len(SHAPES)), [f"{batch} x {context:,}" for batch, context in SHAPES])
    axis.set(
        ylim=(0, 6.3), ylabel="times bfloat16", xlabel="sequences x tokens, decode attention of one layer, one H200"
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
