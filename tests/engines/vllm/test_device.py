"""The device of the tests inside vLLM: which tests run on a GPU and in which order, their time limit, the table."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm import device


def report(name: str, outcome: str, cell: dict[str, Any] | None) -> Any:
    given = [] if cell is None else [("cell", {"test": name, "seconds": 1.0, "why": "", **cell, "outcome": outcome})]
    return SimpleNamespace(nodeid=name, user_properties=given, failed=outcome == "failed", longreprtext="it ended")


def test_the_table_has_the_worst_of_each_recipe(tmp_path: Path) -> None:
    table = device.Table(tmp_path / "table.json")
    hit = {"cell": "prefix hit", "setup": "v1-eager"}
    table.pytest_runtest_logreport(report("a", "passed", {**hit, "recipes": ["oscar", "saw-int4"]}))
    table.pytest_runtest_logreport(
        report("b", "failed", {**hit, "recipes": ["oscar", "kitty-pro"], "failed": ["kitty-pro"], "why": "E  differs"})
    )
    table.pytest_runtest_logreport(report("c", "refused", {"cell": "offload", "setup": "", "recipes": [], "why": "no"}))
    table.pytest_runtest_logreport(report("d", "passed", None))  # of no cell
    table.pytest_runtest_logreport(report("crashed", "failed", None))
    found = json.loads((tmp_path / "table.json").read_text())
    assert [each["test"] for each in found] == ["a", "b", "c", "crashed"]
    page = (tmp_path / "table.json.md").read_text()
    assert "| cell | setup | saw-int4 | oscar | kvant-2 | vecinfer-2 | kitty-pro | all |" in page
    assert "| prefix hit | v1-eager | passed | passed |  |  | failed |  |" in page
    assert "| offload |  |  |  |  |  |  | refused |" in page and "    E  differs" in page and "    it ended" in page


def test_a_failure_stays_when_the_teardown_passes(tmp_path: Path) -> None:
    table = device.Table(tmp_path / "table.json")
    for outcome in ("failed", "passed"):
        table.pytest_runtest_logreport(report("a", outcome, {"cell": "n = 4", "setup": "", "recipes": ["oscar"]}))
    assert table.found["a"]["outcome"] == "failed"


def test_a_test_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0\.2 s"), device.limited(0.2, tmp_path / "hangs"):
        time.sleep(20)
    assert time.monotonic() - begin < 10 and "test_device.py" in (tmp_path / "hangs").read_text()
    with device.limited(0.2, None):
        pass
    time.sleep(0.4)  # nothing rings any more


@dataclasses.dataclass
class Item:
    name: str
    vllm_setup: str

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"vllm_setup": self.vllm_setup})


def test_every_process_begins_with_the_first_setup() -> None:
    items: list[Any] = [Item(f"{i}", setup) for setup in ("v1-eager", "v2-piecewise", "v2-graphs") for i in range(4)]
    found = device.in_turn(items, 4)
    assert sorted(map(id, found)) == sorted(map(id, items))
    for first in range(0, 12, 3):  # the range of a process
        assert [item.vllm_setup for item in found[first : first + 3]] == ["v2-graphs", "v2-piecewise", "v1-eager"]


def test_options_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "name", "cpu")
    assert device.engine_options() == {"dtype": "float32", "enforce_eager": True}
    assert device.recipes("int4") == ("int4",)
    monkeypatch.setattr(device, "name", "cuda")
    assert device.recipes("int4") == device.MATRIX
    monkeypatch.setattr(device, "setup", "v1-eager")
    assert device.engine_options()["enforce_eager"] and device.engine_options()["dtype"] == "bfloat16"
    monkeypatch.setattr(device, "setup", "v2-piecewise")
    options = device.engine_options()
    assert not options["enforce_eager"] and options["compilation_config"]["cudagraph_mode"] == "PIECEWISE"


def test_recipes_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "served", set())
    device.note({"layers": {"0": "oscar:sink=4", "1-": "kvant-2"}, "draft": "full", "artifact": []})
    device.note({"recipe": "saw-int4"})
    assert device.served == {"oscar", "kvant-2", "full", "saw-int4"}
