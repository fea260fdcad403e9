"""With --model-runner-v2, engines have vLLM's model runner V2."""

from __future__ import annotations

from importlib.metadata import packages_distributions, version

import pytest

from kvant.engines.vllm import versions
from tests.engines.vllm import runner_v2


@pytest.fixture(scope="session", autouse=True)
def _model_runner(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--model-runner-v2"):
        distribution, *_ = packages_distributions()["vllm"]  # `use` comes before vLLM is imported
        if versions.older(version(distribution), "0.32"):
            pytest.skip("vLLM's model runner V2 was tested from 0.32 on: 0.31 refuses to start it on a CPU")
        runner_v2.use()
