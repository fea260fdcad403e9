"""torch.compile as vLLM does it: attention is opaque to it, and answers are those of the eager run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.vllm.engines import LAYERS, close, engine, made_up_artifacts, needs_vllm, prompt, run, tiny_model


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_give_the_same_answers(tmp_path: Path) -> None:
    model, kvant = tiny_model(tmp_path / "model"), {"layers": LAYERS, "artifact": made_up_artifacts(tmp_path)}
    prompts, answers = [prompt(0, 150), prompt(1, 70)], []
    for eager in (True, False):
        llm = engine(model, kvant, enforce_eager=eager)
        assert (int(llm.llm_engine.vllm_config.compilation_config.mode) > 0) is not eager
        llm.collective_rpc("record")
        answers.append([list(request.outputs[0].token_ids) for request in run(llm, prompts, 20)])
        found = llm.collective_rpc("compare")[0]
        assert found["decodes"] and found["pages"], found
        close(llm)
    assert answers[0] == answers[1]
