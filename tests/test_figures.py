"""scripts/figures.py draws the README's pictures from what is in results/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvant import recipes
from scripts import figures, method_figures, notebook


@pytest.mark.parametrize("theme", figures.THEMES)
def test_quality_has_every_recipe_and_our_front(theme: str) -> None:
    figures.style(figures.THEMES[theme])
    figure = figures.quality(figures.THEMES[theme])
    for axis, (_, dim) in zip(figure.axes, figures.MODELS.values(), strict=True):
        assert sum(len(points.get_offsets()) for points in axis.collections) >= 40
        (front,) = axis.lines
        bits, kl = front.get_xdata(), front.get_ydata()
        assert sorted(bits) == list(bits) and sorted(kl, reverse=True) == list(kl), dim
        shown = {label.get_text() for label in axis.texts}
        assert shown == figures.LABELLED
        boxes = [label.get_window_extent() for label in axis.texts]
        for i, one in enumerate(boxes):
            assert not any(one.overlaps(other) for other in boxes[:i]), "a label covers another"


def test_the_pictures_are_those_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels and figures of a picture are text in the SVG: those of the repository are the ones that are drawn now."""
    monkeypatch.setattr("sys.argv", ["figures.py", "--out", str(tmp_path)])
    assert figures.main() == 0
    kept = figures.ROOT / "docs" / "figures"
    for made in sorted(tmp_path.glob("*.svg")):
        shown = [re.findall(r">([^<]+)</text>", file.read_text()) for file in (made, kept / made.name)]
        assert len(shown[0]) > 10
        assert shown[0] == shown[1]
    assert len(list(tmp_path.glob("*.svg"))) == len(list(kept.glob("*.svg"))) == 4


def test_the_notebook_shows_what_its_cells_show_now() -> None:
    path = figures.ROOT / "examples" / "pictures.ipynb"
    kept, made = json.loads(path.read_text())["cells"], notebook.executed(notebook.CELLS)
    assert path.stat().st_size < 200_000
    assert [cell["source"] for cell in kept] == [cell["source"] for cell in made]
    for old, new in zip(kept, made, strict=True):
        texts = [[each.get("text") for each in cell.get("outputs", [])] for cell in (old, new)]
        assert texts[0] == texts[1]
    pictures = [each for cell in kept for each in cell.get("outputs", []) if "image/png" in each.get("data", {})]
    assert len(pictures) == 2


@pytest.mark.parametrize("name", method_figures.DRAWN)
def test_the_pictures_of_methods_are_those_of_the_recipes(name: str) -> None:
    drawn = method_figures.draw(recipes.get(name))
    assert drawn == (figures.ROOT / "docs" / "methods" / "figures" / f"{name}.svg").read_text()
    windows = {stream.window for stream in recipes.get(name).streams.values()}
    for window in windows:
        assert f"first {window.sink}" in drawn or not window.sink
        assert f"last {window.recent}" in drawn or not window.recent
