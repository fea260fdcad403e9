"""What is taken for results, what is refused, and how files are combined."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvant import recipes
from kvant.report import Request, bench_of, combine, load, report_of
from tests.report import samples


def test_texts_of_two_files_with_other_recipes_are_one(tmp_path: Path) -> None:
    first, second = samples.text_results(), samples.text_results()
    rows = first["texts"][0]["results"]
    first["texts"][0]["results"], second["texts"][0]["results"] = rows[:20], rows[20:]
    found = combine([("a", report_of(first, "a")), ("b", report_of(second, "b"))])
    assert [len(text.results) for text in found.texts] == [len(recipes.names())]
    second["texts"][0]["context"] = 4096
    found = combine([("a", report_of(first, "a")), ("b", report_of(second, "b"))])
    assert [text.name for text in found.texts] == ["wikitext2.test.txt", "wikitext2.test.txt (2)"], "measured otherwise"
    with pytest.raises(ValueError, match="b: .*full.*: another file has the same recipe on the same text"):
        combine([("a", report_of(samples.text_results(), "a")), ("b", report_of(samples.text_results(), "b"))])


def test_results_of_one_text_as_older_files_have_them() -> None:
    data = samples.text_results()
    entry = data.pop("texts")[0]
    report = report_of({**data, **entry}, "old.json")
    assert [(text.name, len(text.results)) for text in report.texts] == [("wikitext2.test.txt", len(recipes.names()))]
    both = report_of({**data, **entry, "texts": [entry]}, "both.json")
    assert both.texts == report.texts, "a file of one text has it twice"


def test_files_of_results_name_texts_and_tasks_by_keys() -> None:
    rows = samples.task_results()["scores"]
    data = {"name": "smollm2-135m", "texts": {"prose": samples.text_results()["texts"][0]}}
    data["tasks"] = {"gsm8k": [row | {"task": "gsm8k:path=x"} for row in rows[:4]], "needle": rows[4:]}
    report = report_of(data, "r.json")
    assert (report.model, [text.name for text in report.texts]) == ("smollm2-135m", ["wikitext2.test.txt"])
    assert [(task.name, len(task.scores)) for task in report.tasks] == [("gsm8k", 4), ("needle", 3)]
    data["tasks"] = {"gsm8k": 5}
    with pytest.raises(ValueError, match=r"r.json: scores\[0\]: expected an object, got int"):
        report_of(data, "r.json")


def test_models_are_not_mixed() -> None:
    text, task = report_of(samples.text_results(), "a"), samples.task_results()
    with pytest.raises(ValueError, match=r"different models .* a has smollm2, b has qwen3-8b; make a page for each"):
        combine([("a", text), ("b", report_of(task | {"model": "qwen3-8b"}, "b"))])
    with pytest.raises(ValueError, match="different shapes"):
        combine([("a", text), ("b", report_of(task | {"shape": samples.SHAPE | {"head_dim": 128}}, "b"))])
    with pytest.raises(ValueError, match="b has no name"):
        combine([("a", text), ("b", report_of({k: v for k, v in task.items() if k != "model"}, "b"))])


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


ROW = ("texts", 1, "results", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("texts"), "r.json: expected a file of kvant eval --json"),
        (put([], "texts"), "there is no result in it"),
        (put("attention", "work"), "give it with --bench"),
        (without(*ROW, "kl"), r"r.json: texts\[1\]: results\[0\]: expected kl, a number, got None"),
        (put("much", *ROW, "kl"), "expected kl, a number, got 'much'"),
        (put(True, *ROW, "bpe"), "expected bpe, a number, got True"),
        (put("", *ROW, "recipe"), "expected recipe, a text, got ''"),
        (put([1, "2"], *ROW, "layers"), "layers: expected a list of numbers"),
        (put([3], *ROW, "profile"), "profile: expected heads"),
        (put([[1, 2], [1]], *ROW, "profile", "heads", "key_error"), "key_error: expected rows of the same length"),
        (put([128], *ROW, "profile", "lengths"), "expected 1 rows, one a length, got 2"),
        (put(7, "texts", 0), r"texts\[0\]: expected an object with results"),
        (put({"heads": 3}, "shape"), "shape: expected layers, heads, head_dim and dtype"),
        (put(3, "model"), "model must be a name"),
    ],
)
def test_what_is_no_result_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = copy.deepcopy(samples.chat_results())
    data["texts"][1]["results"].sort(key=lambda each: "profile" not in each)
    change(data)
    with pytest.raises(ValueError, match=message):
        report_of(data, "r.json")


def test_a_task_begins_with_the_full_cache() -> None:
    data = samples.task_results()
    del data["scores"][0]
    with pytest.raises(ValueError, match="task gsm8k: expected 'full cache' first, got 'full cache again'"):
        report_of(data, "r.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("append", "work"), "expected a file of kvant bench attention --json, got work 'append'"),
        (without("work"), "got a file without `work`"),
        (put([], "results"), "there is no timing in it"),
        (without("results", 0, "shape", "heads"), r"results\[0\]: expected a shape with batch"),
        (without("results", 0, "times"), "expected times, a number"),
    ],
)
def test_what_is_no_bench_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = samples.bench_results()
    change(data)
    with pytest.raises(ValueError, match=message):
        bench_of(data, "bench.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        load(str(tmp_path / "none.json"))
    for content in (b"\xff\xfe", b"{", b""):
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="expected a JSON file that kvant wrote"):
            load(str(path))
    path.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="expected a JSON object that kvant wrote, got list"):
        load(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        load(str(tmp_path))


@pytest.mark.parametrize("given", [{"context": 0}, {"requests": -1}])
def test_a_request_has_tokens(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="--request-context and --requests must be positive"):
        Request(**given)
