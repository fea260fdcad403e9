"""The page as a reader of HTML meets it: whole, self-contained, with every number in a table."""

from __future__ import annotations

import dataclasses
import json
import math
from html.parser import HTMLParser
from typing import Any

import pytest

from kvant import recipes
from kvant.layout import Layout
from kvant.plan import plan
from kvant.recipes import get
from kvant.report import Report, Request, bench_of, combine, render, report_of
from tests.report import samples

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """Addresses, tables by their caption, and what scripts of JSON hold."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.addresses: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.data: dict[str, Any] = {}
        self.figures: list[str] = []
        self.words = ""
        self.stack: list[str] = []
        self.rows: list[list[str]] = []
        self.caption = ""
        self.script = ""
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.addresses += [
            value or "" for name, value in attributes if name in ("src", "href", "action", "data", "srcset")
        ]
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self.rows, self.caption = [], ""
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "script":
            self.script = given.get("id") or "" if given.get("type") == "application/json" else ""
        elif tag == "div" and "data-figure" in given:
            self.figures.append(given["data-figure"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag
        if tag == "table":
            assert self.caption not in self.tables or "by layer" in self.caption, self.caption
            self.tables[self.caption] = self.rows
        elif tag == "script":
            self.script = ""

    def handle_data(self, data: str) -> None:
        inside = self.stack[-1] if self.stack else ""
        if inside == "caption":
            self.caption += data
        elif inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif inside == "script":
            if self.script:
                self.data[self.script] = json.loads(data)
        elif inside != "style":
            self.words += data


def whole_report() -> Report:
    report = combine(
        [
            ("a.json", report_of(samples.chat_results(), "a.json")),
            ("b.json", report_of(samples.task_results(), "b.json")),
        ]
    )
    return dataclasses.replace(report, speeds=bench_of(samples.bench_results(), "bench"))


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render(whole_report(), Request(32768, 4)))


def test_it_is_one_file(page: Page) -> None:
    assert page.addresses, "links within the page"
    assert all(address.startswith(("#", "data:")) for address in page.addresses), page.addresses
    text = render(whole_report())
    assert "default-src 'none'" in text, "the browser refuses any request"
    assert set(page.figures) | {"profile"} == set(page.data["figures"])


def test_every_recipe_is_a_point_and_a_row(page: Page) -> None:
    report = report_of(samples.text_results(), "sample")
    names = [r.recipe for r in report.texts[0].results]
    assert len(names) == len(recipes.names())
    traces = page.data["figures"]["quality-0"]["data"]
    points = {
        n: (x, y)
        for t in traces
        if t.get("customdata")
        for n, x, y in zip(t["customdata"], t["x"], t["y"], strict=True)
    }
    assert sorted(points) == sorted(names)
    head, *rows = page.tables["Quality on wikitext2.test.txt"]
    assert sorted(row[0] for row in rows) == sorted(names)
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    for r in report.texts[0].results:
        row, (x, y) = by_name[r.recipe], points[r.recipe]
        layout = Layout.of(get(r.recipe), 3, 64, dtype="bfloat16")
        assert x == layout.bits_per_element(32768)
        assert row["bits at 32,768"] == f"{x:.3f}"
        assert row["bits as evaluated"] == f"{r.bits:.3f}"
        if r.recipe == "full":
            assert row["KL"] == "below 0.00001"
            assert 0 < y < min(each for name, (_, each) in points.items() if name != "full"), "below all others"
        else:
            assert y == r.kl
            assert float(row["KL"]) == pytest.approx(r.kl, rel=3e-2)


def test_a_recipe_that_broke_the_model_is_named(page: Page) -> None:
    traces = page.data["figures"]["quality-1"]["data"]
    names = {name for trace in traces for name in trace.get("customdata") or ()}
    assert names == {"kvant-2", "int4", "16-bit cache"}
    assert "because their KL is not finite: int2" in page.words
    rows = {row[0]: row for row in page.tables["Quality on chats.jsonl"]}
    assert "not finite" in rows["int2"]


def test_tasks_have_intervals_and_noise(page: Page) -> None:
    figure = page.data["figures"]["task-0"]
    found = {}
    for trace in figure["data"]:
        for name, x, half in zip(trace["customdata"], trace["x"], trace["error_x"]["array"], strict=True):
            found[name] = (x, half)
    assert found["kvant-2"] == (pytest.approx(67), pytest.approx(2))
    assert found["full cache"] == (pytest.approx(70), 0)
    band = next(shape for shape in figure["layout"]["shapes"] if shape["type"] == "rect")
    assert (band["x0"], band["x1"]) == (pytest.approx(69.5), pytest.approx(72.5)), "0.71 +- 0.015, and 0.70"
    head, *rows = page.tables["gsm8k: 100 questions"]
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_name["kvant-2"]["against full"] == "-3.0"
    assert by_name["kvant-2"]["95 % interval"] == "-5.0 to -1.0"
    assert by_name["full cache"]["against full"] == ""
    assert page.tables["needle:length=4096: 1 question"][-1][4] == "–", "one question has no interval"


def test_memory_is_that_of_kvant_plan(page: Page) -> None:
    rows = {row[0]: row for row in page.tables["Memory of 4 requests of 32,768 tokens"]}
    for name in ("kvant-2", "oscar", "int4", "kivi-k2v2"):
        planned = plan("smollm2-135m", name, context=32768)
        assert rows[name][-1] == f"{4 * planned.recipe.request_bytes:,}"
    assert rows["16-bit"][-1] == f"{4 * plan('smollm2-135m', context=32768).bf16.request_bytes:,}"


def test_speed_is_that_of_the_models_shape(page: Page) -> None:
    figures = [name for name in page.figures if name.startswith("speed")]
    assert figures == ["speed-0-0", "speed-0-1"], "a text each, the other shape is left out"
    assert "9/3 × 64" in page.words and "32/8 × 128" not in page.words
    rows = page.tables["Decode attention of one layer, 9/3 × 64, 1 × 4,096 tokens"]
    assert rows[1] == ["kvant-2, folded", "cpu", "222", "4.50"]


def test_profiles_are_there(page: Page) -> None:
    data = page.data["profiles"]
    assert [text["text"] for text in data["texts"]] == ["chats.jsonl"]
    assert [each["recipe"] for each in data["texts"][0]["recipes"]] == ["int4", "kvant-2"]
    scale = data["scales"][0]["heads"]["attention_kl"]
    grids = [each["heads"]["attention_kl"] for each in data["texts"][0]["recipes"]]
    values = [e for grid in grids for row in grid for e in row]
    assert scale["zmax"] == pytest.approx(math.log10(max(values)))
    rows = page.tables["KL of attention weights, by layer and KV head"]
    assert (len(rows), len(rows[0])) == (31, 4)
    assert page.tables["KL of attention weights, by layer and length"][0] == ["layer", "up to 512", "up to 1,024"]


def test_without_a_shape_bits_are_those_of_the_evaluation() -> None:
    data = samples.text_results()
    del data["shape"]
    page = Page(render(report_of(data, "sample")))
    assert "memory" not in page.data["figures"]
    assert "bits as evaluated" in page.tables["Quality on wikitext2.test.txt"][0]
    assert not any("bits at" in cell for cell in page.tables["Quality on wikitext2.test.txt"][0])
    assert "The model's shape is not known here" in page.words


def test_a_recipe_that_is_not_known_is_only_in_the_table() -> None:
    data = samples.text_results()
    data["texts"][0]["results"].append({"recipe": "int4+20000", "bpe": 4.5, "kl": 0.1})
    page = Page(render(report_of(data, "sample")))
    names = {name for trace in page.data["figures"]["quality-0"]["data"] for name in trace.get("customdata") or ()}
    assert "int4+20000" not in names
    assert "cannot be counted here: int4+20000" in page.words
    assert any(row[0] == "int4+20000" for row in page.tables["Quality on wikitext2.test.txt"])


def test_names_cannot_break_the_page() -> None:
    evil = "</script><script>alert(1)</script><b>&amp;"
    data = samples.task_results()
    data["model"] = evil
    for row in data["scores"]:
        row["task"] = row["task"].replace("gsm8k", evil)
        row["recipe"] = row["recipe"].replace("kvant-2", evil)
    text = render(report_of(data, "sample"))
    assert "<script>alert" not in text
    page = Page(text)
    assert evil in page.words
    assert any(row[0] == evil for row in page.tables[f"{evil}: 100 questions"])


def test_two_names_that_are_cut_alike_stay_two_rows() -> None:
    data = samples.task_results()
    long = "kvant-2:recent=16,sink=4,k.unbiased=false,search="
    data["scores"] += [samples.score("gsm8k", f"{long}{n}", 0.5, -0.2) for n in (1, 2)]
    figure = Page(render(report_of(data, "sample"))).data["figures"]["task-0"]
    rows = [y for trace in figure["data"] for y in trace["y"]]
    assert sorted(rows) == list(range(6))
    assert len(figure["layout"]["yaxis"]["ticktext"]) == 6
