"""Hybrid models in transformers: layers with attention are packed, the others keep transformers' states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvant
from kvant.engines.hybrid import HybridCache
from tests.engines.vllm.engines import lfm2_like, prompt, qwen3_next_like

SIZES = {qwen3_next_like: (8, (3, 7), 256), lfm2_like: (6, (2, 5), 64)}  # layers, those with attention, head_dim


@pytest.fixture(scope="module", params=list(SIZES), ids=lambda make: make.__name__)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path: Path = request.param(tmp_path_factory.mktemp("hybrid"))
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), SIZES[request.param]


def padded(rows: int = 2, columns: int = 40) -> dict[str, Any]:
    ids = torch.tensor([prompt(row, columns) for row in range(rows)])
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 30}


@pytest.mark.parametrize("beams", [1, 3])
def test_the_unquantized_recipe_answers_as_transformers_own_cache(hybrid: tuple[Any, Any], beams: int) -> None:
    model, (layers, attention, head_dim) = hybrid
    wanted = model.generate(**padded(), num_beams=beams)
    cache = HybridCache(model, "full")
    assert torch.equal(model.generate(**padded(), num_beams=beams, past_key_values=cache), wanted)
    assert len(cache.layers) == layers and tuple(cache.place) == attention
    assert cache.packed.shape.head_dim == head_dim
    cache.reset()
    assert torch.equal(model.generate(**padded(), num_beams=beams, past_key_values=cache), wanted)


@pytest.mark.parametrize("recipe", ["saw-int4", "kivi-k4v4", "int2:sink=4,recent=16"])
@torch.no_grad()
def test_layers_store_and_read_what_a_plain_cache_does(hybrid: tuple[Any, Any], recipe: str) -> None:
    """The attention layers alone, in a `PagedCache` of their own: the same bytes and the same outputs."""
    model, (_, attention, _) = hybrid
    cache = HybridCache(model, recipe)
    calls: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    cache.packed.on_attend = lambda layer, *tensors: calls.append((layer, *(x.clone() for x in tensors)))
    ids = torch.tensor([prompt(0, 150)])
    for first, last in ((0, 70), (70, 140), *((i, i + 1) for i in range(140, 150))):
        model(ids[:, first:last], past_key_values=cache)
    (group,) = cache.packed.groups
    plain = kvant.PagedCache(group.paged.layouts, len(attention), 4)
    seq = plain.new()
    for at in range(0, len(calls), len(attention)):
        batch = plain.extend([seq], [calls[at][1].shape[2]])
        host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
        for layer, query, key, value, out in calls[at : at + len(attention)]:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            options = {"scale": model.model.layers[attention[layer]].self_attn.scaling}
            if len(q) > 1:
                found = plain.prefill(layer, q, k, v, host, **options)
                plain.append(layer, k, v, batch, q)
            else:
                plain.append(layer, k, v, batch, q)
                found = plain.decode(layer, q, batch, **options)
            torch.testing.assert_close(out[0], found, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(group.paged.stores, plain.stores, strict=True):
        assert torch.equal(mine.pages[group.sequences[0].pages], theirs.pages[seq.pages])


def test_what_cannot_be_taken_back_is_refused(hybrid: tuple[Any, Any]) -> None:
    model, _ = hybrid
    with pytest.raises(
        ValueError, match=r"it has layers of type (linear_attention|conv); .*kvant.HybridCache holds them, too"
    ):
        kvant.Cache(model, "int4")
    with pytest.raises(ValueError, match="share is not served for hybrid models"):
        HybridCache(model, "int4", share=True)
    cache = HybridCache(model, "int4", max_tokens=64)
    with torch.no_grad():
        model(torch.tensor([prompt(0, 60)]), past_key_values=cache)
        with pytest.raises(kvant.PoolFull):
            model(torch.tensor([prompt(1, 60)]), past_key_values=cache)
        with pytest.raises(RuntimeError, match="cannot be taken back: reset"):
            model(torch.tensor([prompt(2, 1)]), past_key_values=cache)
        cache.reset()
        model(torch.tensor([prompt(0, 60)]), past_key_values=cache)
