"""Where engines run: on a CPU, or, with `pytest tests/engines/vllm --vllm-device cuda`, on one GPU that several
processes share.

On a GPU the tests that are marked `cell` run, each with several setups, and no others:

    v2-piecewise  vLLM's model runner V2, its default, with torch.compile and piecewise CUDA graphs. Attention runs
                  outside of these, so that the recorder sees every call.
    v1-eager      model runner V1, without torch.compile and graphs.
    v2-eager      V2 without them, of a few cells: it says whether what fails is theirs.
    v2-graphs, v1-graphs  as tests/engines/vllm/test_graphs.py says.

Full CUDA graphs call no Python: tests/engines/vllm/test_graphs.py compares what they leave behind. `--vllm-table FILE`
writes what became of every cell, after every test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MATRIX = ("saw-int4", "oscar", "kvant-2", "vecinfer-2", "kitty-pro")  # the recipes of the matrix on a GPU
SETUPS = ("v2-piecewise", "v1-eager")
EVERY = (*SETUPS, "v2-eager")
ORDER = ("v2-graphs", "v2-piecewise", "v1-eager", "v1-graphs", "v2-eager")  # in which they run
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]  # tokens of a step
GPU_OPTIONS = {"dtype": "bfloat16", "gpu_memory_utilization": 0.03}  # pages have kv_cache_memory_bytes
TIMEOUT = 240.0  # seconds of a test on a GPU

name = "cpu"  # or cuda
setup = ""  # of the test that runs, on a GPU
served: set[str] = set()  # recipes of the engines that the test has started


def on_gpu() -> bool:
    return name == "cuda"


def recipes(*here: str) -> tuple[str, ...]:
    """The recipes of a test: these on a CPU, those of the matrix on a GPU."""
    return MATRIX if on_gpu() else here


def engine_options() -> dict[str, Any]:
    """Options of vLLM's LLM for the device and the setup."""
    if not on_gpu():
        return {"dtype": "float32", "enforce_eager": True}
    if not setup.endswith("-piecewise"):
        return {**GPU_OPTIONS, "enforce_eager": True}
    graphs = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": CAPTURE_SIZES}
    return {**GPU_OPTIONS, "enforce_eager": False, "compilation_config": graphs}


def note(kvant: dict[str, Any]) -> None:
    """Notes the recipes of an engine's additional_config["kvant"]."""
    found = [*kvant.get("layers", {}).values(), *(kvant.get(key) for key in ("recipe", "draft"))]
    served.update(each.partition(":")[0] for each in found if each)


def check(llm: Any) -> None:
    """That an engine on a GPU is what the setup says. Engines in a process of their own do not tell."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    config = llm.llm_engine.vllm_config
    assert config.device_config.device_type == "cuda", config.device_config
    assert config.use_v2_model_runner is setup.startswith("v2"), setup
    if setup.endswith("-graphs"):
        return  # the test says what its engines are
    compiled = int(config.compilation_config.mode) > 0
    assert compiled is setup.endswith("-piecewise"), (setup, config.compilation_config.mode)
    if core is not None and compiled:
        assert config.compilation_config.cudagraph_mode.name == "PIECEWISE", config.compilation_config.cudagraph_mode


def setups(item: Any) -> tuple[str, ...]:
    """The setups with which a test runs on a GPU; none: it does not."""
    marker = item.get_closest_marker("cell")
    return () if marker is None else tuple(marker.kwargs.get("setups", SETUPS))


def in_turn(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Tests in the order of their setups, so that as many processes as `workers`, which begin with a range of the list
    each (--dist worksteal), all begin with the first setup."""
    order = sorted(items, key=lambda item: _rank(item.callspec.params.get("vllm_setup")))  # type: ignore[attr-defined]
    return [each for worker in range(workers) for each in order[worker::workers]]


def _rank(setup: str | None) -> int:
    return ORDER.index(setup or "")


@contextlib.contextmanager
def limited(seconds: float | None, log: Path | None) -> Iterator[None]:
    """Ends a test that takes longer: by an exception, and where none comes through, in C code that waits, by the end of
    the process. The stacks of all threads go to `log`, or to the standard error."""
    if not seconds:
        yield
        return
    with contextlib.ExitStack() as stack:
        file = sys.__stderr__ if log is None else stack.enter_context(log.open("a"))

        def end(*_: Any) -> None:
            faulthandler.dump_traceback(file)
            raise TimeoutError(f"the test took longer than {seconds:g} s")

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + 30, exit=True, file=file)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()


# --- the table of cells ----------------------------------------------------------------------------------------------


def outcome(item: Any, report: pytest.TestReport) -> dict[str, Any] | None:
    """What a phase of a test says about its cell, or None."""
    marker = item.get_closest_marker("cell")
    if marker is None or (report.when != "call" and report.passed):
        return None
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    names = {
        key: value if isinstance(value, str) else getattr(value, "__name__", value) for key, value in params.items()
    }
    found = {"cell": marker.args[0].format(**names), "setup": params.get("vllm_setup", name), "test": item.nodeid}
    found |= {"recipes": sorted(served), "outcome": report.outcome, "seconds": round(report.duration, 1), "why": ""}
    if report.passed and "refused" in marker.kwargs:
        found |= {"outcome": "refused", "why": params[marker.kwargs["refused"]]}
    if report.skipped:
        found["why"] = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.failed:
        text = report.longreprtext
        found["why"] = "\n".join(line for line in text.splitlines() if line.startswith("E "))[:2000] or text[-2000:]
        found["failed"] = sorted(set(re.findall(r"\[recipe ([^\]:]+)", text)))  # none: all of them
    return found


class Table:
    """Writes --vllm-table, whole or not at all, after every test."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = dict(report.user_properties).get("cell")
        if cell is None and report.failed:  # a process that has ended
            cell = {"cell": report.nodeid, "setup": "", "test": report.nodeid, "recipes": [], "outcome": "failed"}
            cell |= {"seconds": 0.0, "why": report.longreprtext[-2000:]}
        if cell is None or self.found.get(report.nodeid, {}).get("outcome") == "failed":
            return
        self.found[report.nodeid] = cell  # type: ignore[assignment]
        for path, text in ((self.file, json.dumps([*self.found.values()], indent=1)), (self._page, self.page())):
            path.with_suffix(".part").write_text(text + "\n")
            os.replace(path.with_suffix(".part"), path)

    @property
    def _page(self) -> Path:
        return self.file.with_name(self.file.name + ".md")

    def page(self) -> str:
        """The table in Markdown: a row for a cell and a setup, a column for a recipe. Several tests of one cell: the
        worst counts."""
        rows: dict[tuple[str, str], dict[str, str]] = {}
        columns = dict.fromkeys(MATRIX)
        for each in self.found.values():
            row = rows.setdefault((each["cell"], each["setup"]), {})
            for recipe in each["recipes"] or ["all"]:
                columns.setdefault(recipe)
                word = each["outcome"]
                if word == "failed" and each.get("failed") and recipe not in each["failed"]:
                    word = "passed"  # its own layers are equal
                row[recipe] = max(word, row.get(recipe, ""), key=["", "passed", "refused", "skipped", "failed"].index)
        lines = [f"| cell | setup | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
        lines += [
            f"| {cell} | {setup} | {' | '.join(row.get(recipe, '') for recipe in columns)} |"
            for (cell, setup), row in rows.items()
        ]
        for each in self.found.values():
            if each["why"]:
                lines += ["", f"{each['outcome']}: {each['cell']} ({each['setup']}), `{each['test']}`", ""]
                lines += [f"    {line}" for line in each["why"].splitlines()]
        return "\n".join(lines)
