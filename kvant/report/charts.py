"""The figures, described to plotly.

Colours here are those of a light page. The page's style sheet replaces the colours of text, axes and background on a dark page and
in print, so that a figure is drawn once. Colours of data are readable on both, and apart for colour-blind readers.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvant.layout import human_bytes
from kvant.report.points import ZERO_KL, Point
from kvant.report.read import AGAIN, FULL, Task, Text
from kvant.report.served import Memory

BLUE, ORANGE, GREY = "#2f86c8", "#d55e00", "#7d8796"
INK, LINE, BAND = "#20262e", "#dfe3e8", "rgba(125, 135, 150, 0.22)"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
BITS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 24, 32)
DECADES = 5  # that a heat map's colours span at most
LONGEST = 34  # characters of a name beside an axis


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure with a heading and the sentences that explain it."""

    name: str  # of the HTML element
    title: str
    caption: str
    figure: Mapping[str, Any]
    height: int


def figure(traces: Sequence[Any], height: int, **layout: Any) -> dict[str, Any]:
    """A figure as plotly's JSON. plotly checks every name and value."""
    import plotly.graph_objects as go

    axis = {"gridcolor": LINE, "linecolor": LINE, "zeroline": False, "ticks": "", "automargin": True}
    layout = {
        "template": "none",
        "height": height,
        "autosize": True,
        "margin": {"l": 64, "r": 16, "t": 16, "b": 52},
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"family": FONT, "size": 13}},
        "hovermode": "closest",
        "showlegend": False,
        "dragmode": False,
        **layout,
    }
    for name in ("xaxis", "yaxis"):
        layout[name] = {**axis, **layout.get(name, {})}
        if "title" in layout[name]:
            layout[name]["title"] = {"font": {"size": 13}, **layout[name]["title"]}
    return go.Figure(data=list(traces), layout=layout).to_plotly_json()  # type: ignore[no-any-return]


def shown(name: str) -> str:
    """A recipe's name as HTML that fits beside an axis."""
    return html.escape(name if len(name) <= LONGEST else name[: LONGEST - 1] + "…")


def kl_text(kl: float | None) -> str:
    if kl is None or not math.isfinite(kl):
        return "not finite"
    return f"below {ZERO_KL:.5f}" if kl < ZERO_KL else f"{kl:.5f}" if kl < 0.1 else f"{kl:.3f}"


def _hover(point: Point, x: str, memory: Memory | None) -> str:
    r = point.result
    if point.reference:
        return f"<b>{r.recipe}</b><br>KL 0 by definition<br>{x}"
    lines = [f"<b>{html.escape(r.recipe)}</b>{' · on the front' if point.front else ''}"]
    lines.append(f"KL {kl_text(r.kl)}" + (f" ± {r.kl_se:.5f}" if r.kl_se is not None else ""))
    lines.append(x)
    if r.top1 is not None:
        lines.append(f"top-1 agreement {r.top1:.1%}")
    if r.ppl is not None:
        lines.append(f"perplexity {r.ppl:.3f}")
    if memory is not None:
        lines.append(f"memory {human_bytes(memory.total)}")
    return "<br>".join(lines)


def _kl_axis(points: Sequence[Point]) -> tuple[float, dict[str, Any], list[dict[str, Any]]]:
    """Where a KL of zero is drawn, the axis, and the line that sets it apart. A log axis has no zero, so that recipes whose KL is
    shown as 0 lie in a strip below the axis; the page says so."""
    positive = [point.kl for point in points if point.kl > 0] or [0.01, 0.1]
    low, high = math.floor(math.log10(min(positive))), math.log10(max(positive))
    zeros = any(point.kl == 0 for point in points)
    bottom = math.log10(min(positive)) - 0.25
    ticks = [10.0**k * m for k in range(low, math.ceil(high) + 1) for m in (1, 3)]
    ticks = [tick for tick in ticks if bottom <= math.log10(tick) <= high + 0.3]
    texts = [f"{tick:.5f}".rstrip("0").rstrip(".") if tick >= 1e-5 else f"{tick:.0e}" for tick in ticks]
    zero = 10.0 ** (bottom - 0.22)
    shapes = []
    span = [bottom, high + 0.2]
    if zeros:
        span[0] = bottom - 0.44
        edge = 10.0**bottom
        shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": edge,
                "y1": edge,
                "line": {"dash": "dot", "width": 1, "color": GREY},
            }
        )
        ticks, texts = [zero, *ticks], ["0", *texts]
    axis = {
        "type": "log",
        "range": span,
        "tickvals": ticks,
        "ticktext": texts,
        "title": {"text": "next-token KL from the full cache", "standoff": 12},
    }
    return zero, axis, shapes


def scatter(
    points: Sequence[Point],
    x_title: str,
    x_text: str,
    larger_is_better: bool = False,
    memory: Mapping[str, Memory] | None = None,
    height: int = 500,
) -> dict[str, Any]:
    """KL against bits or speed, with the Pareto front. `x_text` formats the number on hover."""
    zero, y_axis, shapes = _kl_axis(points)

    def trace(chosen: list[Point], marker: dict[str, Any], name: str) -> dict[str, Any]:
        ys = [point.kl or zero for point in chosen]
        half = [0.0 if not point.kl else 1.96 * (point.result.kl_se or 0.0) for point in chosen]
        bars = {
            "type": "data",
            "symmetric": False,
            "array": half,
            "arrayminus": [min(h, 0.9 * y) for h, y in zip(half, ys, strict=True)],  # a log axis has no zero
            "color": marker["line"]["color"],
            "thickness": 1,
            "width": 0,
        }
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [point.x for point in chosen],
            "y": ys,
            "error_y": bars,
            "marker": marker,
            "customdata": [point.name for point in chosen],
            "hovertext": [_hover(point, x_text.format(point.x), (memory or {}).get(point.name)) for point in chosen],
            "hoverinfo": "text",
        }

    best = sorted((point for point in points if point.front), key=lambda point: (point.x, -point.kl))
    given = [point for point in best if point.reference]
    rest = [point for point in points if not point.front and not point.reference]
    labelled = [*best, *(point for point in rest if point.labelled)]
    steps = {
        "type": "scatter",
        "mode": "lines",
        "name": "Pareto front",
        "x": [point.x for point in best],
        "y": [point.kl or zero for point in best],
        "line": {"color": BLUE, "width": 1.5, "shape": "vh" if larger_is_better else "hv"},
        "hoverinfo": "skip",
    }
    labels = {  # the page's script gives each label a place where it covers nothing, or none
        "type": "scatter",
        "mode": "markers+text",
        "marker": {"size": 11, "opacity": 0},  # keeps a label off its point
        "name": "labels",
        "x": [point.x for point in labelled],
        "y": [point.kl or zero for point in labelled],
        "text": [shown(point.name) for point in labelled],
        "textposition": "top right",
        "textfont": {"size": 12, "color": INK},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }
    hollow = {"size": 8, "line": {"width": 1.2, "color": GREY}}
    traces = [
        steps,
        trace([p for p in rest if not p.labelled], {**hollow, "color": "rgba(125, 135, 150, 0.3)"}, "recipes"),
        trace([p for p in rest if p.labelled], {**hollow, "color": GREY}, "labelled recipes"),
        trace(
            [point for point in best if not point.reference],
            {"size": 10, "color": BLUE, "line": {"width": 1, "color": BLUE}},
            "on the front",
        ),
        trace(
            given, {"size": 11, "symbol": "diamond", "color": GREY, "line": {"width": 1, "color": GREY}}, "reference"
        ),
        labels,
    ]
    xs = [point.x for point in points] or [1.0, 16.0]
    low, high = math.log10(min(xs)), math.log10(max(xs))
    room = max(0.04, 0.06 * (high - low))
    x_axis: dict[str, Any] = {
        "type": "log",
        "range": [low - room, high + room],
        "title": {"text": x_title, "standoff": 8},
    }
    if larger_is_better:
        values = [m * 10.0**k for k in range(-3, 4) for m in (1, 1.5, 2, 3, 4, 5, 6, 8)]
    else:
        values = list(BITS)
    ticks = [v for v in values if low - room <= math.log10(v) <= high + room]
    x_axis |= {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return figure(
        traces,
        height,
        xaxis=x_axis,
        yaxis=y_axis,
        shapes=shapes,
        margin={"l": 64, "r": 24, "t": 34, "b": 48},
        meta={"beyond": "right" if larger_is_better else "left"},  # of the front: where no point can be
    )


def task_scores(task: Task) -> tuple[dict[str, Any], int]:
    """Scores with the paired 95 % interval of their difference from the full cache, and its height."""
    full, recipes = task.full, [s for s in task.scores if s.recipe not in (FULL, AGAIN)]
    rows = sorted(recipes, key=lambda s: (s.score, -s.bits))
    rows += [task.again] if task.again else []
    rows.append(full)
    height = 90 + 26 * len(rows)
    low, high = task.noise
    hover = []
    for s in rows:
        lines = [f"<b>{html.escape(s.recipe)}</b>", f"score {s.score:.1%} of {s.questions:,} questions"]
        if s is not full:
            interval = "" if s.half is None else f" ({interval_text(s.difference, s.half)})"
            lines += [
                f"against full {100 * s.difference:+.1f} points{interval}",
                f"won {s.wins}, lost {s.losses}",
            ]
        lines += [f"{s.bits:.2f} bits", f"{s.tokens:,} tokens written"]
        hover.append("<br>".join(lines))
    clear = [s is not full and s.half is not None and abs(s.difference) > s.half for s in rows]
    colours = [GREY if s.recipe in (FULL, AGAIN) else ORANGE if c else BLUE for s, c in zip(rows, clear, strict=True)]
    halves = [100 * (s.half or 0.0) if s is not full else 0.0 for s in rows]
    bars = [  # one trace a colour: plotly draws all error bars of a trace in one
        {
            "type": "scatter",
            "mode": "markers",
            "x": [100 * rows[i].score for i in some],
            "y": some,
            "error_x": {
                "type": "data",
                "array": [halves[i] for i in some],
                "color": colour,
                "thickness": 2,
                "width": 4,
            },
            "marker": {
                "size": 10,
                "color": colour,
                "symbol": ["diamond" if rows[i].recipe in (FULL, AGAIN) else "circle" for i in some],
            },
            "customdata": [rows[i].recipe for i in some],
            "hovertext": [hover[i] for i in some],
            "hoverinfo": "text",
        }
        for colour in (GREY, BLUE, ORANGE)
        if (some := [i for i, found in enumerate(colours) if found == colour])
    ]
    whole = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shapes = [
        {"type": "rect", "x0": 100 * low, "x1": 100 * high, "fillcolor": BAND, "line": {"width": 0}, **whole},
        {
            "type": "line",
            "x0": 100 * full.score,
            "x1": 100 * full.score,
            "line": {"color": GREY, "width": 1.5, "dash": "dash"},
            **whole,
        },
    ]
    x_axis = {"title": {"text": "score, %", "standoff": 8}, "nticks": 8}
    margin = {"l": 64, "r": 16, "t": 8, "b": 48}
    return figure(
        bars, height, xaxis=x_axis, yaxis=_names([s.recipe for s in rows]), shapes=shapes, margin=margin
    ), height


def _names(names: Sequence[str]) -> dict[str, Any]:
    """An axis of rows 0, 1, ... with names, of which two may look the same once they are cut."""
    rows = range(len(names))
    return {
        "tickvals": list(rows),
        "ticktext": [shown(name) for name in names],
        "range": [-0.6, len(rows) - 0.4],
        "showgrid": False,
        "ticklabelstandoff": 8,
    }


def interval_text(difference: float, half: float) -> str:
    return f"{100 * (difference - half):+.1f} to {100 * (difference + half):+.1f}"


def memory_bars(rows: Sequence[Memory]) -> tuple[dict[str, Any], int]:
    """Bytes of pages and of windows, and the figure's height."""
    rows = sorted(rows, key=lambda m: -m.total)[::-1]  # the largest is drawn at the top
    height = 96 + 24 * len(rows)
    power = min(4, int(math.log(max(m.total for m in rows), 1024)))
    unit, size = ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024.0**power
    largest = rows[-1].total
    hover = [
        f"<b>{html.escape(m.name)}</b><br>{human_bytes(m.total)}, {m.bits:.3f} bits<br>pages {human_bytes(m.pages)}<br>"
        f"windows {human_bytes(m.windows)}"
        for m in rows
    ]
    common = {"type": "bar", "orientation": "h", "y": list(range(len(rows))), "hovertext": hover, "hoverinfo": "text"}
    pages = {
        **common,
        "name": "pages",
        "x": [m.pages / size for m in rows],
        "marker": {"color": [GREY if m.name in ("16-bit", "8-bit") else BLUE for m in rows]},
        "customdata": [m.name for m in rows],
    }
    windows = {
        **common,
        "name": "windows",
        "x": [m.windows / size for m in rows],
        "marker": {"color": ORANGE},
        "text": [human_bytes(m.total) for m in rows],
        "textposition": "outside",
        "textfont": {"size": 12, "color": INK},
        "cliponaxis": False,
    }
    x_axis = {"title": {"text": unit, "standoff": 8}, "range": [0, 1.12 * largest / size], "nticks": 8}
    y_axis = _names([m.name for m in rows])
    margin = {"l": 64, "r": 24, "t": 8, "b": 48}
    made = figure([pages, windows], height, xaxis=x_axis, yaxis=y_axis, barmode="stack", bargap=0.3, margin=margin)
    return made, height


def colour_bar(values: Iterable[float], title: str) -> dict[str, Any]:
    """Colours of a heat map over the logarithm of an error. They span the largest error to DECADES below it: a lossless recipe has
    errors of rounding, which would take most of the scale. Ticks are powers of ten, or 1, 2 and 5 times one where errors span
    little."""
    logs = [math.log10(v) for v in values if v > 0] or [0.0]
    low, high = max(min(logs), max(logs) - DECADES), max(logs)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    steps = (1,) if high - low > 2 else (1, 2, 5)
    ticks = [math.log10(m) + k for k in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return {
        "colorscale": "Viridis",
        "zmin": low,
        "zmax": high,
        "colorbar": {
            "tickvals": ticks,
            "ticktext": [f"{10**tick:.1g}" for tick in ticks],
            "title": {"text": title, "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
    }


def _log(value: float | None) -> float | None:
    return math.log10(value) if value is not None and value > 0 else None


def layer_errors(text: Text) -> tuple[dict[str, Any], int]:
    """Error of attention outputs, recipes by layers, and the figure's height."""
    results = sorted((r for r in text.results if r.layers), key=lambda r: -(r.attention or 0.0))
    height = 96 + 20 * len(results)
    layers = max(len(r.layers) for r in results)
    hover = [
        [
            f"<b>{html.escape(r.recipe)}</b><br>layer {i}: {'none' if e is None else f'{e:.5f}'}"
            for i, e in enumerate(r.layers)
        ]
        for r in results
    ]
    trace = {
        "type": "heatmap",
        "x": list(range(layers)),
        "y": list(range(len(results))),
        "z": [[_log(e) for e in r.layers] for r in results],
        "hovertext": hover,
        "hoverinfo": "text",
        "xgap": 1,
        "ygap": 1,
        **colour_bar([e for r in results for e in r.layers if e is not None], ""),
    }
    x_axis = {"title": {"text": "layer", "standoff": 8}, "showgrid": False, "dtick": 1 if layers <= 12 else 4}
    return figure([trace], height, xaxis=x_axis, yaxis=_names([r.recipe for r in results])), height


def grid_layout(height: int = 560) -> dict[str, Any]:
    """The figure of a profile before the page's script fills it with the chosen recipe and metric."""
    axis = {"showgrid": False}
    trace = {"type": "heatmap", "z": [], "xgap": 1, "ygap": 1, "colorscale": "Viridis", "hoverinfo": "text"}
    return figure([trace], height, xaxis=axis, yaxis={**axis, "autorange": "reversed"})
