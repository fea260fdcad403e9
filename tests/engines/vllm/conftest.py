"""With --model-runner-v2, engines have vLLM's model runner V2."""

from __future__ import annotations

import pytest

from tests.engines.vllm import runner_v2


@pytest.fixture(scope="session", autouse=True)
def _model_runner(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--model-runner-v2"):
        runner_v2.use()
