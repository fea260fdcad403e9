"""Writes examples/pictures.ipynb: its cells, and what they show, run here without Jupyter so that outputs stay small and the same.

    python scripts/notebook.py [--out examples/pictures.ipynb]

Needs matplotlib. `tests/test_figures.py` runs the cells again and compares the text that they print.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CELLS = [
    """\
# Quality and speed of packed KV caches

The pictures of the README, drawn from `results/*.json` by the functions of `scripts/figures.py`. Start Jupyter in `examples/`, in an
environment with matplotlib. `python scripts/notebook.py` writes this notebook.""",
    """\
import io
import json
import sys

sys.path.insert(0, "..")
from IPython.display import Image

from scripts import figures


def show(figure):
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=72)
    return Image(data=out.getvalue())


theme = figures.THEMES["light"]
figures.style(theme)""",
    """\
## Quality against bits

One point per recipe. Right is more memory, down is nearer to the full cache: KL is that of the next token's distribution,
teacher-forced over held-out prose, read from packed pages. Our own recipes are red, those of the five papers blue.""",
    "show(figures.quality(theme))",
    """\
The same as numbers, for the recipes that `kvant recipes` recommends. Top-1 is the share of tokens whose likeliest successor is the
full cache's.""",
    """\
for file, (title, dim) in figures.MODELS.items():
    rows = json.loads((figures.ROOT / "results" / f"{file}.json").read_text())["texts"]["prose"]["results"]
    by = {row["recipe"]: row for row in rows}
    print(title)
    for name in ("kvant-2", "kvant-3", "kvant-4", "kvant-4-fast", "kivi-k4v4", "int8"):
        row = by[name]
        print(f"  {name:13} {row['bits'][str(dim)][1]:5.2f} bits   KL {row['kl']:.4f}   top-1 {row['top1']:.1%}")""",
    """\
## Speed of decode attention

One layer of Qwen3-8B's shape on one H200: how many times as fast as the fastest bfloat16 attention of the same run.""",
    "show(figures.speed(theme))",
]


class Picture:
    """What IPython.display.Image is for a cell: bytes of a PNG file."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def executed(cells: list[str]) -> list[dict[str, Any]]:
    """The cells as a notebook has them, with outputs: printed text, and a picture where the last line is one."""
    display = types.ModuleType("IPython.display")
    display.Image = Picture  # type: ignore[attr-defined]
    before, place = sys.modules.get("IPython.display"), os.getcwd()
    sys.modules["IPython.display"] = display
    path = list(sys.path)
    os.chdir(ROOT / "examples")
    out, count, names = [], 0, {"__name__": "__main__"}
    try:
        for number, text in enumerate(cells):
            source = text.splitlines(keepends=True)
            code = not text.startswith("#") and number not in MARKDOWN
            if not code:
                out.append({"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": source})
                continue
            count += 1
            printed, shown = io.StringIO(), None
            with contextlib.redirect_stdout(printed):
                if text.startswith("show("):
                    shown = eval(text, names)
                else:
                    exec(text, names)
            outputs: list[dict[str, Any]] = []
            if printed.getvalue():
                lines = printed.getvalue().splitlines(keepends=True)
                outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
            if shown is not None:
                data = {"image/png": base64.b64encode(shown.data).decode() + "\n", "text/plain": ["a picture"]}
                outputs.append(
                    {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
                )
            cell = {"cell_type": "code", "execution_count": count, "id": f"cell-{number}", "metadata": {}}
            out.append(cell | {"outputs": outputs, "source": source})
    finally:
        os.chdir(place)
        sys.path[:] = path
        del sys.modules["IPython.display"]
        if before is not None:
            sys.modules["IPython.display"] = before
    return out


MARKDOWN = {number for number, text in enumerate(CELLS) if text.startswith(("#", "The same"))}


def main() -> int:
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "pictures.ipynb")
    args = parser.parse_args()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    data = {"cells": executed(CELLS), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
