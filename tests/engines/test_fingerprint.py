"""What names a model: every weight of it, in every type, in memory and on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvant
from kvant.artifact import Artifact
from kvant.engines.fingerprint import fingerprint, fingerprint_of_files
from kvant.engines.fold import fold
from tests.engines.test_fold import calibrated
from tests.engines.test_hf import FAMILIES, make_model

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def lively(family: str = "llama", **changes: Any) -> Any:
    """A model whose norms and biases are not all alike: numbers that bfloat16 has, as in checkpoints of 16 bits."""
    model = make_model(family, **changes)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.copy_((1 + 0.3 * torch.randn(weight.shape, generator=random)).bfloat16())
    return model


def test_every_weight_counts() -> None:
    """Noise in any one tensor, a norm or a bias too, makes another model of it."""
    model = lively("qwen2", hidden_size=96)
    found = fingerprint(model)
    for name, weight in model.named_parameters():
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1 + 0.05 * torch.randn_like(weight) if weight.ndim == 1 else torch.randn_like(weight))
        assert fingerprint(model) != found, name
        with torch.no_grad():
            weight.copy_(before)
    assert fingerprint(model) == found


def test_small_changes_far_into_a_large_tensor_count() -> None:
    """Runs are spread over the whole of a tensor, its end included."""
    model = make_model("llama", vocab_size=1000)
    found = fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight[-1, -1] *= -1
    assert fingerprint(model) != found


@pytest.mark.parametrize("family", FAMILIES)
def test_types_do_not_matter(family: str) -> None:
    model = lively(family)
    found = fingerprint(model)
    assert len(found) == 64
    for dtype in TYPES:
        assert fingerprint(model.to(dtype)) == found, dtype  # 16 bits of mantissa are lost on the way, no sign is


def test_numbers_that_vanish_in_float16_keep_their_sign() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-12)
        model.model.norm.weight.mul_(1e-9)
    found = fingerprint(model)
    assert fingerprint(model.to(torch.float16)) == found


def test_tied_weights_are_counted_once_and_names_may_come_in_any_order() -> None:
    tied = make_model("llama", tie_word_embeddings=True)
    found = fingerprint(tied)
    tied._modules = dict(reversed(tied._modules.items()))
    assert fingerprint(tied) == found
    assert fingerprint(make_model("llama")) != found


def test_a_cache_of_another_model_shares_nothing() -> None:
    """Nearly all weights replaced: another digest, so that neither snapshots nor kept pages are taken up."""
    model = make_model("llama")
    before = kvant.Cache(model, "saw-int4").digest
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.normal_()
    assert kvant.Cache(model, "saw-int4").digest != before


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_files_have_the_name_of_the_model(family: str, tied: bool, tmp_path: Path) -> None:
    model = lively(family, tie_word_embeddings=tied)
    for dtype in TYPES[:2]:
        model.to(dtype).save_pretrained(tmp_path, max_shard_size="60KB" if family == "llama" else "5GB")
        found = fingerprint_of_files(tmp_path)
        assert found == fingerprint(model)
        for load in TYPES:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=load)
            assert fingerprint(loaded) == found, (dtype, load)
    assert (tmp_path / "model.safetensors.index.json").exists() == (family == "llama")


def test_a_tied_head_may_be_in_the_files_too(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(
        3
    )  # older checkpoints have these; nobody loads them
    save_file(tensors, file)
    assert fingerprint_of_files(tmp_path) == fingerprint(model)
    tensors["lm_head.weight"].neg_()
    save_file(tensors, file)
    assert fingerprint_of_files(tmp_path) is None


@pytest.mark.parametrize("change", ["name", "shape", "quantized", "cut", "none", "header", "remote"])
def test_files_that_do_not_tell(change: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    assert fingerprint_of_files(tmp_path) is not None
    if change in ("name", "shape"):
        tensors = load_file(file)
        weight = tensors.pop("model.norm.weight")
        tensors["norm.weight" if change == "name" else "model.norm.weight"] = (
            weight if change == "name" else weight[:-1]
        )
        save_file(tensors, file)
    elif change == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "none":
        file.unlink()
    elif change == "header":
        file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])
    else:
        more = {"quantized": {"quantization_config": {"quant_method": "gptq"}}, "remote": {"model_type": "nobodys"}}
        config.write_text(json.dumps(json.loads(config.read_text()) | more[change]))
    assert fingerprint_of_files(tmp_path) is None


# --- folded models ------------------------------------------------------------------------------------------------------


def test_a_folded_model_is_the_model_that_it_was_until_its_weights_change(tmp_path: Path) -> None:
    model = lively("qwen3")
    found = fingerprint(model)
    artifact = calibrated(model)
    fold(model, artifact.recipe, artifact)
    assert fingerprint(model) == found
    for dtype in TYPES:
        model.to(dtype).save_pretrained(tmp_path / str(dtype))
        assert fingerprint_of_files(tmp_path / str(dtype)) == found
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype))
        assert again.dtype == dtype
        assert kvant.Cache(again, artifact=artifact).recipe.value.transforms == ()
        with torch.no_grad():
            again.model.layers[1].self_attn.v_proj.weight.normal_()
        assert fingerprint(again) != found
        with pytest.raises(ValueError, match="another model of the same shape"):
            kvant.Cache(again, artifact=artifact)


def test_values_and_outputs_count_where_nothing_is_folded() -> None:
    for part in ("v_proj", "o_proj"):
        model = make_model("llama")
        found = fingerprint(model)
        with torch.no_grad():
            getattr(model.model.layers[2].self_attn, part).weight.normal_()
        assert fingerprint(model) != found, part


def test_an_artifact_of_another_model_is_not_folded_in() -> None:
    model = make_model("llama")
    artifact = calibrated(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    with pytest.raises(ValueError, match="another model of the same shape"):
        fold(model, artifact.recipe, artifact)


def test_an_artifact_of_an_older_version_says_so() -> None:
    model = make_model("llama")
    artifact = calibrated(model)
    source = {key: value for key, value in artifact.source.items() if key != "fingerprint_scheme"}
    old = Artifact(artifact.recipe, artifact.heads, artifact.head_dim, artifact.layers, artifact.tensors, source)
    with pytest.raises(ValueError, match="fitted by another version of kvant.*calibrate again"):
        kvant.Cache(model, artifact=old)
