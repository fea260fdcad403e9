"""Artifacts that are made once and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvant
from kvant import models, recipes
from kvant.artifact import Artifact
from kvant.calibrate import kept
from tests.engines.test_hf import make_model


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "cache_dir", lambda: tmp_path)


def test_an_artifact_is_made_once_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    made: list[str] = []

    def counted(model: object, tokenizer: object, recipe: kvant.Recipe, text: object, **options: object) -> Artifact:
        made.append(recipe.name)
        ids = torch.randint(0, 100, (300,), generator=torch.Generator().manual_seed(1))
        return original(model, None, recipe, ids, max_position=512)

    original = kept.calibrate
    monkeypatch.setattr(kept, "calibrate", counted)
    first = kvant.artifact_for(model, None)
    assert first is not None
    assert first.recipe.name == recipes.DEFAULT == "kvant-2"
    again = kvant.artifact_for(model, None, "kvant-2:recent=5,k.search=1")  # what does not decide the fit
    assert again is not None
    assert again.digest == first.digest
    assert made == ["kvant-2"]
    kvant.artifact_for(model, None, "kvant-2:power=0.5")
    assert made == ["kvant-2", "kvant-2:power=0.5"]
    assert kvant.artifact_for(model, None, "saw-int4") is None
    kvant.artifact_for(model, None, text="another text")  # is not the text of the one that was kept
    assert made[2:] == ["kvant-2"]

    cache = kvant.Cache(model, artifact=first)
    assert cache.recipe.name == "kvant-2"
    assert kvant.Cache(model).recipe.name == recipes.PLAIN == "saw-int4"
    ids = torch.randint(0, 100, (1, 20))
    assert torch.isfinite(model(ids, past_key_values=cache).logits).all()
    with pytest.raises(ValueError, match=r"kvant\.artifact_for"):
        kvant.Cache(model, "kvant-2")
