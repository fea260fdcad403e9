"""Puts charts and tables into one HTML file that needs nothing else."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from kvant.layout import human_bytes
from kvant.report import charts, tables
from kvant.report.charts import BLUE, GREY, ORANGE, Chart
from kvant.report.points import ZERO_KL, Point, by_bits, by_speed
from kvant.report.read import METRICS, Report, Speed, Text
from kvant.report.served import Memory, Request, memory_of, served_dtype
from kvant.version import VERSION

# The browser itself refuses whatever is not in the file.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def require_plotly() -> None:
    """Refuses before the work starts, where the extra is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise ModuleNotFoundError("--html needs plotly: pip install 'kvant[report]'")


@dataclasses.dataclass
class Section:
    name: str
    title: str
    text: str  # HTML
    body: list[str] = dataclasses.field(default_factory=list)


class Page:
    """Collects sections, figures and tables."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.figures: dict[str, Any] = {}
        self.tables: list[str] = []
        self.profiles: dict[str, Any] | None = None

    def section(self, name: str, title: str, text: str = "") -> Section:
        self.sections.append(Section(name, title, text))
        return self.sections[-1]

    def chart(self, section: Section, chart: Chart, keys: Sequence[tuple[str, str, str]] = ()) -> None:
        """keys: (colour, shape, meaning) of the marks."""
        self.figures[chart.name] = chart.figure
        items = "".join(
            f'<li class="{shape}" style="--key: {colour}">{html.escape(meaning)}</li>'
            for colour, shape, meaning in keys
        )
        title = html.escape(chart.title)
        section.body.append(
            f'<figure><h3>{title}</h3><div class="chart" data-figure="{chart.name}" role="img" aria-label="{title}" '
            f'style="min-height: {chart.height}px"></div>'
            + (f'<ul class="keys">{items}</ul>' if items else "")
            + f'<figcaption class="caption">{html.escape(chart.caption)}</figcaption></figure>'
        )


def render(report: Report, request: Request | None = None) -> str:
    """The page. Without a model's shape bits are those of the evaluation, and memory is not shown."""
    require_plotly()
    request = request or Request()
    memory: dict[str, Memory] | None = None
    missing: dict[str, str] = {}
    if report.shape is not None:
        memory, missing = memory_of(report.recipes, report.shape, request)
    page = Page()
    _quality(page, report, request, memory, missing)
    _speed(page, report)
    _tasks(page, report)
    _memory(page, report, request, memory)
    _layers(page, report)
    _profiles(page, report)
    return _html(page, report, request)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def about(text: Text) -> str:
    """How a text was measured, in words."""
    a, parts = text.about, []
    chat = a.get("kind") == "chat"
    if "tokens" in a:
        parts.append(f"{a['tokens']:,} tokens {'of answers ' if chat else ''}scored")
    if chat and "chats" in a:
        parts.append(f"{a['chats']:,} chats of {a.get('mean_length', 0):,.0f} tokens on average")
    elif "context" in a:
        parts.append(f"contexts of {a['context']:,} tokens")
    parts += [str(a[key]) for key in ("dtype", "device") if a.get(key)]
    if a.get("offset"):
        parts.append(f"positions + {a['offset']:,}")
    return ", ".join(parts)


SCALE = (
    "Errors more than five powers of ten below the largest have the darkest colour; a cell without a colour has none."
)
FRONT_KEYS = (
    (BLUE, "", "on the Pareto front: no recipe is better on both axes"),
    (GREY, "hollow", "other recipes"),
)
REFERENCE_KEY = (GREY, "square", "the unquantized cache, which was not measured: its KL is 0 by definition")


def _quality(
    page: Page, report: Report, request: Request, memory: dict[str, Memory] | None, missing: dict[str, str]
) -> None:
    if not report.texts:
        return
    section = page.section(
        "quality",
        "Quality against bits",
        "KL compares the next-token distribution of each recipe with that of the full cache on the same tokens. Lower and further "
        "left is better. Bars are 95 % intervals over the scored tokens.",
    )
    for i, text in enumerate(report.texts):
        points = by_bits(text, memory)
        if memory is None:
            where = "bits per cached number, as evaluated"
            caption = "The model's shape is not known here, so that bits are those of the evaluation. "
        else:
            where = f"bits per cached number at {request.context:,} tokens"
            caption = f"Bits count everything that a request of {request.context:,} tokens stores, windows included. "
        caption += f"KL: {about(text)}." if about(text) else ""
        caption += _left_out(text, missing) + _zeros(points)
        figure = charts.scatter(points, where, "{:.3f} bits", memory=memory)
        page.chart(section, Chart(f"quality-{i}", f"KL against bits, {text.name}", caption, figure, 500), _keys(points))
        page.tables.append(tables.quality(text, points, memory, request.context))


def _keys(points: Sequence[Point]) -> Sequence[tuple[str, str, str]]:
    return [*FRONT_KEYS, REFERENCE_KEY] if any(point.reference for point in points) else FRONT_KEYS


def _zeros(points: Sequence[Point]) -> str:
    if all(point.kl for point in points):
        return ""
    return f" A KL below {ZERO_KL:.5f} is drawn at 0, under the dotted line: a logarithmic scale has no place for it."


def _left_out(text: Text, missing: dict[str, str]) -> str:
    """Why some recipes are in the table alone."""
    out = ""
    uncounted = [r.recipe for r in text.results if r.recipe in missing]
    if uncounted:
        out += f" Only in the table, because their bits cannot be counted here: {_listed(uncounted)}."
    broken = [r.recipe for r in text.results if not math.isfinite(r.kl)]
    if broken:
        out += f" Only in the table, because their KL is not finite: {_listed(broken)}."
    return out


def _fits(speed: Speed, report: Report) -> bool:
    shape = report.shape
    return shape is not None and (speed.shape["kv_heads"], speed.shape["head_dim"]) == (shape.heads, shape.head_dim)


def _speed(page: Page, report: Report) -> None:
    if not report.speeds:
        return
    of_model = [speed for speed in report.speeds if _fits(speed, report)]
    section = page.section(
        "speed",
        "Quality against speed",
        "Decode attention of one layer, as fast as the fastest attention over a full cache in the same run: 2 is twice as fast. "
        "Lower and further right is better.",
    )
    for j, speed in enumerate(of_model or report.speeds):
        caption = f"{speed.label} (query heads/KV heads × head dim, batch × context); {speed.device}."
        if not of_model:
            caption += " This is not the shape of the model that was evaluated."
        for i, text in enumerate(report.texts):
            points = by_speed(text, speed)
            if not points:
                continue
            figure = charts.scatter(
                points, "times as fast as the full cache", "{:.2f} times full", larger_is_better=True
            )
            shown = caption + _zeros(points)
            title = f"KL against speed, {text.name}, {speed.label}"
            page.chart(section, Chart(f"speed-{j}-{i}", title, shown, figure, 500), _keys(points))
        page.tables.append(tables.speed(speed))
    if not section.body:
        section.body.append('<p class="caption">No recipe was both timed and evaluated on a text: see the tables.</p>')


def _tasks(page: Page, report: Report) -> None:
    if not report.tasks:
        return
    section = page.section(
        "tasks",
        "Task scores",
        "Every cache answered the same questions. Bars are 95 % intervals of the difference from the full cache, paired by "
        "question. The dashed line is the full cache. It ran twice, with two batch sizes: the shaded band is the 95 % interval of "
        "the difference between these runs, which is noise of the arithmetic.",
    )
    keys = (
        (GREY, "square", "full cache"),
        (BLUE, "", "the interval contains the full cache"),
        (ORANGE, "", "the interval does not contain it"),
    )
    for i, task in enumerate(report.tasks):
        figure, height = charts.task_scores(task)
        sampling = task.about.get("sampling") or {}
        how = "greedy" if not sampling.get("temperature") else f"temperature {sampling['temperature']}"
        where = [str(task.about[key]) for key in ("dtype", "device") if key in task.about]
        caption = ", ".join([tables.count(task.full.questions), how, *where]) + "."
        page.chart(section, Chart(f"task-{i}", task.name, caption, figure, height), keys)
        page.tables.append(tables.task(task))


def _memory(page: Page, report: Report, request: Request, memory: dict[str, Memory] | None) -> None:
    if memory is None or report.shape is None:
        return
    shape, rows = report.shape, list(memory.values())
    title = f"Memory of {request}"
    text = (
        f"What the cache allocates for {request}: {len(shape.layers)} layers, {shape.heads} KV heads, head dim {shape.head_dim}, "
        f"served in {served_dtype(shape)}, on one device. Weights are not counted."
    )
    section = page.section("memory", "Memory", text)
    figure, height = charts.memory_bars(rows)
    keys = (
        (BLUE, "square", "pages"),
        (ORANGE, "square", "windows, beside the pages"),
        (GREY, "square", "unquantized, for comparison"),
    )
    whole = memory["16-bit"].total
    caption = f"A 16-bit cache of the same requests takes {human_bytes(whole)}."
    page.chart(section, Chart("memory", title, caption, figure, height), keys)
    page.tables.append(tables.memory(rows, title))


def _layers(page: Page, report: Report) -> None:
    texts = [text for text in report.texts if any(r.layers for r in text.results)]
    if not texts:
        return
    section = page.section(
        "layers",
        "Error by layer",
        "Squared error of attention outputs over their energy, layer by layer, on a logarithmic scale. A layer that stands out in "
        "all recipes is fragile. " + SCALE,
    )
    for i, text in enumerate(texts):
        figure, height = charts.layer_errors(text)
        caption = f"{about(text)}." if about(text) else ""
        page.chart(section, Chart(f"layers-{i}", text.name, caption, figure, height))
        page.tables.append(tables.layers(text))


def _profiles(page: Page, report: Report) -> None:
    texts = [text for text in report.texts if any(r.profile for r in text.results)]
    if not texts:
        return
    section = page.section(
        "heads",
        "Error by layer and head",
        "One recipe at a time. Colours are on the same logarithmic scale for all recipes of a text. " + SCALE,
    )
    page.figures["profile"] = charts.grid_layout()
    data: dict[str, Any] = {"metrics": METRICS, "texts": [], "scales": []}
    for text in texts:
        found = [(r.recipe, r.profile) for r in text.results if r.profile is not None]
        found.sort(key=lambda each: each[0] == "full")  # the last: it has nothing to show
        data["texts"].append(
            {"text": text.name, "recipes": [{"recipe": name, **dataclasses.asdict(profile)} for name, profile in found]}
        )
        scales: dict[str, dict[str, Any]] = {}
        for by in ("heads", "by_length"):
            values: dict[str, list[float]] = {}
            for _, profile in found:
                for metric, grid in getattr(profile, by).items():
                    values.setdefault(metric, []).extend(e for row in grid for e in row if e is not None and e > 0)
            scales[by] = {metric: charts.colour_bar(some, "") for metric, some in values.items()}
        data["scales"].append(scales)
        page.tables.append(tables.profiles(text))
    page.profiles = data
    choices = "".join(
        f'<label>{name} <select id="choose-{key}"></select></label>'
        for key, name in (("text", "text"), ("recipe", "recipe"), ("metric", "error"), ("by", "by layer and"))
    )
    section.body.append(
        f'<figure><h3 id="profile-title"></h3><div class="choices">{choices}</div>'
        '<div class="chart" id="profile" role="img" aria-label="error by layer and head"></div></figure>'
    )


def _json(data: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _html(page: Page, report: Report, request: Request) -> str:
    from plotly.offline import get_plotlyjs

    def file(name: str) -> str:
        return resources.files("kvant.report").joinpath(name).read_text(encoding="utf-8")

    model = html.escape(report.model or "unnamed model")
    said = [f"{len(report.recipes)} recipes"]
    if report.texts:
        said.append(f"text: {_listed(text.name for text in report.texts)}")
    if report.tasks:
        said.append(f"tasks: {_listed(task.name for task in report.tasks)}")
    if report.shape is not None:
        said.append(f"served: {request}")
    sections = "\n".join(
        f'<section id="{s.name}"><h2>{html.escape(s.title)}</h2>\n<p>{html.escape(s.text)}</p>\n'
        + "\n".join(s.body)
        + "</section>"
        for s in page.sections
    )
    links = [(s.name, s.title) for s in page.sections] + [("tables", "Tables")]
    nav = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title in links)
    data = [("figures", page.figures)] + ([("profiles", page.profiles)] if page.profiles else [])
    scripts = "\n".join(f'<script type="application/json" id="{name}">{_json(each)}</script>' for name, each in data)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>KV cache recipes on {model}</title>
<style>
{file("page.css")}</style>
</head>
<body>
<header>
<h1>KV cache recipes on {model}</h1>
<p class="about">{html.escape("; ".join(said))}</p>
<nav>{nav}</nav>
<noscript><p>The charts need JavaScript; the tables below have the same numbers.</p></noscript>
</header>
<main>
{sections}
<section id="tables"><h2>Tables</h2>
{chr(10).join(page.tables)}
</section>
</main>
<footer>Made by kvant {html.escape(VERSION)}. This file needs no network.</footer>
{scripts}
<script>{get_plotlyjs()}</script>
<script>
{file("page.js")}</script>
</body>
</html>
"""
