"""The numbers of the charts as HTML tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from kvant.layout import human_bytes
from kvant.report.charts import interval_text, kl_text
from kvant.report.points import Point
from kvant.report.read import METRICS, Grid, Speed, Task, Text
from kvant.report.served import Memory

NONE = "–"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are numbers. Cells are escaped here, and only here."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = "\n".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll"><table><caption>{html.escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def quality(text: Text, points: Sequence[Point], memory: Mapping[str, Memory] | None, context: int) -> str:
    """All recipes of a text, those without a finite KL or without bits at the context included."""
    best = {point.name for point in points if point.front}
    rows = []
    for r in sorted(text.results, key=lambda r: (r.kl != r.kl, r.kl)):
        served = [] if memory is None else [_number(memory[r.recipe].bits if r.recipe in memory else None, "{:.3f}")]
        rows.append(
            [
                r.recipe,
                *served,
                f"{r.bits:.3f}",
                kl_text(r.kl),
                _number(r.kl_se, "{:.5f}"),
                _number(r.top1, "{:.1%}"),
                _number(r.ppl, "{:.3f}"),
                _number(r.attention, "{:.5f}"),
                "yes" if r.recipe in best else "",
            ]
        )
    served_bits = [] if memory is None else [f"bits at {context:,}"]
    columns = [
        "recipe",
        *served_bits,
        "bits as evaluated",
        "KL",
        "± se",
        "top-1",
        "perplexity",
        "attention error",
        "front",
    ]
    return table(f"Quality on {text.name}", columns, rows)


def speed(found: Speed) -> str:
    rows = [
        [t.name, t.implementation, f"{1e6 * t.seconds:.0f}", f"{t.times:.2f}"]
        for t in sorted(found.timings, key=lambda t: t.seconds)
    ]
    return table(f"Decode attention of one layer, {found.label}", ["cache", "by", "µs", "times full"], rows)


def count(questions: int) -> str:
    return f"{questions:,} question{'' if questions == 1 else 's'}"


def task(found: Task) -> str:
    rows = []
    for s in found.scores:
        against = [""] * 4
        if s is not found.full:
            interval = NONE if s.half is None else interval_text(s.difference, s.half)
            against = [f"{100 * s.difference:+.1f}", interval, str(s.wins), str(s.losses)]
        rows.append([s.recipe, f"{s.bits:.2f}", f"{100 * s.score:.1f}", *against, f"{s.tokens:,}", str(s.batch)])
    columns = ["cache", "bits", "score, %", "against full", "95 % interval", "wins", "losses", "tokens", "batch"]
    return table(f"{found.name}: {count(found.full.questions)}", columns, rows)


def memory(rows: Iterable[Memory], title: str) -> str:
    rows = sorted(rows, key=lambda m: m.total)
    cells = [
        [m.name, f"{m.bits:.3f}", human_bytes(m.total), human_bytes(m.pages), human_bytes(m.windows), f"{m.total:,}"]
        for m in rows
    ]
    return table(title, ["cache", "bits", "memory", "pages", "windows", "bytes"], cells)


def layers(text: Text) -> str:
    """Folded: there is a column for every layer."""
    results = [r for r in text.results if r.layers]
    count = max(len(r.layers) for r in results)
    rows = [[r.recipe, *(_number(e, "{:.5f}") for e in r.layers)] for r in results]
    title = f"Error of attention outputs by layer, {text.name}"
    return _details(title, [table(title, ["recipe", *map(str, range(count))], rows)])


def profiles(text: Text) -> str:
    """Every recipe's profile, folded: there are as many numbers as layers times heads times metrics."""
    parts = []
    for r in text.results:
        if r.profile is None:
            continue
        found = []
        for metric, grid in r.profile.heads.items():
            title = f"{METRICS.get(metric, metric)}, by layer and KV head"
            found.append(_grid(title, [f"head {h}" for h in range(len(grid[0]))], grid))
        for metric, grid in r.profile.by_length.items():
            title = f"{METRICS.get(metric, metric)}, by layer and length"
            by_layer: Grid = [list(column) for column in zip(*grid, strict=True)]
            found.append(_grid(title, r.profile.lengths, by_layer))
        parts.append(_details(f"Error by layer and head of {r.recipe}, {text.name}", found))
    return "\n".join(parts)


def _grid(title: str, columns: Sequence[str], grid: Grid) -> str:
    rows = [[str(i), *(_number(e, "{:.4g}") for e in row)] for i, row in enumerate(grid)]
    return table(title, ["layer", *columns], rows)


def _details(title: str, tables: Sequence[str]) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n" + "\n".join(tables) + "</details>"
