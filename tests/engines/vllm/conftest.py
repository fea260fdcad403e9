"""Options of the tests inside vLLM: --model-runner-v2 (runner_v2.py); --vllm-device, --vllm-table, --vllm-timeout
(device.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.engines.vllm import versions
from tests.engines.vllm import device, runner_v2


def pytest_configure(config: pytest.Config) -> None:
    device.name = config.getoption("--vllm-device")
    table = config.getoption("--vllm-table")
    if table and not hasattr(config, "workerinput"):
        if not (file := Path(table)).absolute().parent.is_dir():
            raise pytest.UsageError(f"--vllm-table: there is no directory {file.absolute().parent}")
        config.pluginmanager.register(device.Table(file))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if device.on_gpu() and (setups := device.setups(metafunc.definition)):
        metafunc.parametrize("vllm_setup", setups, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not device.on_gpu():
        return
    chosen = [item for item in items if device.setups(item)]
    config.hook.pytest_deselected(items=[item for item in items if not device.setups(item)])
    items[:] = device.in_turn(chosen, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    device.served.clear()
    seconds = item.config.getoption("--vllm-timeout") or (device.TIMEOUT if device.on_gpu() else None)
    table = item.config.getoption("--vllm-table")
    with device.limited(seconds, Path(table + ".hangs") if table else None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if (cell := device.outcome(item, report)) is not None:
        report.user_properties.append(("cell", cell))
    return report


@pytest.fixture(scope="session", autouse=True)
def _model_runner(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--model-runner-v2"):
        distribution, *_ = packages_distributions()["vllm"]  # `use` comes before vLLM is imported
        if versions.older(version(distribution), "0.32"):
            pytest.skip("vLLM's model runner V2 was tested from 0.32 on: 0.31 refuses to start it on a CPU")
        runner_v2.use()


@pytest.fixture(autouse=True)
def vllm_setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: with what the test's engines run."""
    if not device.on_gpu():
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device.setup = request.param
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if device.setup.startswith("v2") else "0")
