"""Which model it is that vLLM serves: one with folded value transforms, another one than the artifact's, or one that nobody knows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.artifact import SCHEME, Artifact
from kvant.engines.fingerprint import fingerprint_of_files
from kvant.engines.fold import fold
from tests.engines.vllm.engines import DIM, KV_HEADS, close, engine, needs_vllm, prompt, run, tiny_model
from tests.engines.vllm.test_smollm2 import spoken
from tests.fitted import made_up_tensors

pytestmark = needs_vllm
RECIPE = "oscar:sink=4,recent=16"  # two bits: values that are rotated twice have other codes, and answers show it
PROMPTS = [(0, 90), (1, 150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=2)


def made_up(model: Path, name: str = RECIPE, **source: Any) -> Artifact:
    """An artifact of random tensors that says it was fitted to a model."""
    recipe = recipes.get(name)
    torch.manual_seed(3)
    tensors = {layer: made_up_tensors(recipe, KV_HEADS, DIM) for layer in range(2)}
    named = {"fingerprint": fingerprint_of_files(model), "fingerprint_scheme": SCHEME}
    return Artifact(recipe, KV_HEADS, DIM, 2, tensors, {**named, **source})


def answers(model: Path, options: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities."""
    llm = engine(model, options)
    try:
        found = run(llm, [prompt(*each) for each in PROMPTS], 8, logprobs=0)
    finally:
        close(llm)
    outputs = [request.outputs[0] for request in found]
    return [(list(o.token_ids), [s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in outputs]


def test_a_folded_model_answers_as_it_did(model: Path, tmp_path: Path) -> None:
    """Rotated once, by its weights; as the model before, and as the transformers engine."""
    import transformers

    artifact = made_up(model)
    path = str(artifact.save(tmp_path / "artifact").parent)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    fold(loaded, RECIPE, artifact)
    loaded.save_pretrained(tmp_path / "folded")
    assert fingerprint_of_files(tmp_path / "folded") == fingerprint_of_files(model)
    options = {"recipe": RECIPE, "artifact": path}
    before, after = answers(model, options), answers(tmp_path / "folded", options)
    for place, ((tokens, wanted), (same, found)) in enumerate(zip(before, after, strict=True)):
        assert tokens == same
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=0.02)
        cache = kvant.Cache(loaded, RECIPE, artifact=artifact)
        assert cache.recipe.value.transforms == ()
        expected = spoken(loaded, cache, prompt(*PROMPTS[place]), tokens)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0.02)

    from vllm.distributed import cleanup_dist_env_and_memory

    other = made_up(model, "oscar:v.target=values").save(tmp_path / "other").parent
    with pytest.raises(ValueError, match="have other value transforms folded in"):
        engine(tmp_path / "folded", {"recipe": "oscar:v.target=values", "artifact": str(other)})
    cleanup_dist_env_and_memory()


def test_values_of_a_folded_model_are_not_transformed_twice(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A recipe with other value transforms than the folded ones needs no artifact, so that nothing else would tell. vLLM before
    0.32 writes to the number of the standard output, which capsys has none of."""
    import transformers
    from vllm.distributed import cleanup_dist_env_and_memory

    from kvant.cli import main

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    fold(loaded, "quarot-int2")
    loaded.save_pretrained(tmp_path)
    other = "saw-int4-kv:order=16"
    message = f"have other value transforms folded in than those of recipe {other}"
    with pytest.raises(ValueError, match=message):
        engine(tmp_path, {"recipe": other})
    cleanup_dist_env_and_memory()
    assert main(["serve", str(tmp_path), "--recipe", other]) == 2
    assert message in capfd.readouterr().err
    # values as they come: the pages hold codes of v A, and the output projection undoes A
    before, after = answers(model, {"recipe": "full"}), answers(tmp_path, {"recipe": "full"})
    for (tokens, wanted), (same, found) in zip(before, after, strict=True):
        assert tokens == same
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-3)


def test_an_artifact_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    """Of the same shape: its own fingerprint is looked at, and that of the files that vLLM loads."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for name, source, message in (
        ("other", {"fingerprint": "0" * 64}, "the artifact was fitted to another model of the same shape"),
        ("old", {"fingerprint_scheme": 1}, "fitted by another version of kvant"),
    ):
        path = made_up(model, **source).save(tmp_path / name).parent
        with pytest.raises(ValueError, match=message):
            engine(model, {"recipe": RECIPE, "artifact": str(path)})
        cleanup_dist_env_and_memory()


def test_where_nobody_can_tell_that_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvant.engines.vllm import bind

    monkeypatch.setattr(bind.logger, "propagate", True)
    path = made_up(model, fingerprint="0" * 64).save(tmp_path).parent
    with caplog.at_level(logging.WARNING, "vllm.kvant"):
        close(engine(model, {"recipe": RECIPE, "artifact": str(path)}, load_format="dummy"))
    assert "cannot verify that the artifact was fitted to the model" in caplog.text
