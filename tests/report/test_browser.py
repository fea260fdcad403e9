"""The page in a real browser: it draws every chart, asks for nothing, says nothing on the console, and can be printed."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvant import recipes
from kvant.report import Request, render
from tests.report import browser
from tests.report.test_page import whole_report

ROOT = Path(__file__).parents[2]
CHROMIUM = browser.find()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: none on the path, none of Playwright's, and KVANT_CHROMIUM is not set"
)
DRAWN = "document.documentElement.dataset.drawn"
COLOUR = "getComputedStyle(document.querySelector('{}')).{}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(whole_report(), Request(32768, 4)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Browser]:
    assert CHROMIUM is not None
    with browser.chromium(CHROMIUM) as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(tab: browser.Browser, page: Path) -> Iterator[None]:
    """Whatever a test does, the page reports no error and asks for no other file."""
    tab.errors.clear()
    tab.requests.clear()
    yield
    assert tab.errors == []
    assert set(tab.requests) <= {page.as_uri()}


def brightness(colour: str) -> float:
    """Of rgb(r, g, b), 0 to 1."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 765


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_are_drawn(tab: browser.Browser, page: Path, dark: bool) -> None:
    tab.open(page, dark=dark)
    charts = tab.evaluate("document.querySelectorAll('.chart').length")
    assert charts == 10
    assert int(tab.evaluate(DRAWN)) == charts
    assert tab.evaluate("document.querySelectorAll('.chart .main-svg').length") >= charts
    points = "document.querySelectorAll('[data-figure=quality-0] .trace.scatter:not(:last-child) .point').length"
    assert tab.evaluate(points) == len(recipes.names()), "a point for every recipe"
    assert tab.evaluate("document.querySelectorAll('[data-figure=task-0] .point').length") == 4
    assert tab.evaluate("document.querySelectorAll('[data-figure=memory] .point path').length") >= 43
    assert tab.evaluate("document.querySelectorAll('#profile image').length") == 1, "a heat map is an image"
    ink = brightness(tab.evaluate(COLOUR.format("[data-figure=quality-0] .xtick text", "fill")))
    paper = brightness(tab.evaluate(COLOUR.format("figure", "backgroundColor")))
    assert abs(ink - paper) > 0.6, "text of charts can be read"
    assert (paper < 0.3) == dark


def labels(tab: browser.Browser) -> list[dict[str, float]]:
    """The boxes of the labels of points that are shown."""
    return tab.evaluate(  # type: ignore[no-any-return]
        """[...document.querySelectorAll('[data-figure=quality-0] .textpoint text')].filter((e) => e.textContent.trim())
        .map((e) => { const b = e.getBoundingClientRect(); return {l: b.left, r: b.right, t: b.top, b: b.bottom, n: e.textContent} })"""
    )


@pytest.mark.parametrize("width", [1400, 700, 390])
def test_labels_do_not_overlap(tab: browser.Browser, page: Path, width: int) -> None:
    tab.open(page, width)
    found = labels(tab)
    assert len(found) >= 4, found
    for i, a in enumerate(found):
        assert a["r"] <= width
        for b in found[:i]:
            assert a["r"] <= b["l"] or b["r"] <= a["l"] or a["b"] <= b["t"] + 3 or b["b"] <= a["t"] + 3, (a, b)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"


def test_numbers_are_told_on_hover(tab: browser.Browser, page: Path) -> None:
    tab.open(page)
    tab.evaluate("document.querySelector('[data-figure=quality-0]').scrollIntoView({block: 'center'})")
    found = tab.evaluate(
        """(() => { const chart = document.querySelector('[data-figure=quality-0]');
        const trace = chart.data.find((each) => each.name === 'on the front');
        const at = trace.customdata.indexOf('kvant-2'), box = chart.querySelector('.nsewdrag').getBoundingClientRect();
        return [box.left + chart._fullLayout.xaxis.d2p(trace.x[at]), box.top + chart._fullLayout.yaxis.d2p(trace.y[at])] })()"""
    )
    tab.move(*found)
    wait = """new Promise((done) => { const look = (left) => { const told = document.querySelector('.hovertext');
        if (told || !left) done(told ? told.textContent : ''); else setTimeout(() => look(left - 1), 50) }; look(60) })"""
    told = tab.evaluate(wait)
    assert "kvant-2" in told
    rows = json.loads((ROOT / "results" / "smollm2-135m.json").read_text())["texts"]["prose"]["results"]
    [kl] = [row["kl"] for row in rows if row["recipe"] == "kvant-2"]
    assert f"KL {kl:.5f}" in told
    assert "bits" in told and "MiB" in told


def test_the_heat_map_shows_what_is_chosen(tab: browser.Browser, page: Path) -> None:
    tab.open(page)

    def choose(name: str, value: str) -> None:
        tab.evaluate(
            f"(() => {{ const s = document.getElementById('choose-{name}'); s.value = [...s.options].find((o) => o.text === "
            f"'{value}').value; s.dispatchEvent(new Event('change')) }})()"
        )

    shape = (
        "(() => { const z = document.getElementById('profile').data[0].z; return [z.length, z[0].length, z[2][1]] })()"
    )
    title = "document.getElementById('profile-title').textContent"
    rows, columns, before = tab.evaluate(shape)
    assert (rows, columns) == (30, 3)
    assert tab.evaluate(title).startswith("int4: KL of attention weights, by layer and KV head")
    choose("recipe", "kvant-2")
    assert tab.evaluate(title).startswith("kvant-2: KL of attention weights")
    after = tab.evaluate(shape)[2]
    assert after < before, "kvant-2 has the smaller error"
    choose("metric", "squared error of keys over their energy")
    assert 10 ** (after - tab.evaluate(shape)[2]) == pytest.approx(2)
    choose("metric", "KL of attention weights")
    choose("by", "length of context")
    assert tab.evaluate(shape)[:2] == [30, 2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_prints(tab: browser.Browser, page: Path, dark: bool) -> None:
    tab.open(page, 1800, dark=dark)
    tab.evaluate(
        """window.addEventListener('beforeprint', () => { window.printed = [...document.querySelectorAll('.chart .main-svg')]
        .map((e) => e.getBoundingClientRect().width) })"""
    )
    data = tab.pdf()
    assert data.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", data)) >= 4
    drawn = b"".join(_streams(data))
    assert drawn.count(b" re") + drawn.count(b" l") > 200, "charts are on paper"
    widths = tab.evaluate("window.printed")
    assert len(widths) >= 10 and max(widths) <= 670, "no chart is wider than the sheet"
    assert tab.evaluate("document.querySelector('.chart .main-svg').getBoundingClientRect().width") > 900, "and back"
    tab.medium("print")
    assert brightness(tab.evaluate(COLOUR.format("[data-figure=quality-0] .xtick text", "fill"))) < 0.2, "ink on paper"
    assert brightness(tab.evaluate(COLOUR.format("body", "backgroundColor"))) == 1


def _streams(data: bytes) -> Iterator[bytes]:
    """What the pages of a PDF draw."""
    for found in re.finditer(rb"stream\r?\n(.*?)endstream", data, re.DOTALL):
        try:
            yield zlib.decompress(found[1])
        except zlib.error:
            continue
