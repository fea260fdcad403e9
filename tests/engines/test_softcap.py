"""Models that cap their attention logits (Gemma 2), through the transformers engine and evaluation: tiny and random, with sliding and
full layers. Their own attention, in eager mode, is what a cache is compared with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import DynamicCache

import kvant
from kvant import recipes
from kvant.engines.attention import eager_attention
from kvant.eval import Segments, evaluate, teacher
from tests.conftest import dense_attention, relative_error
from tests.engines.test_hf import BASE, make_model, prompt

SOFTCAP = 3.0  # low enough to bend the logits of a random model


def with_softcap() -> Any:
    torch.manual_seed(1)
    options = {"sliding_window": 24, "query_pre_attn_scalar": 64, "attn_logit_softcapping": SOFTCAP}
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**BASE, **options})).eval()
    model.set_attn_implementation("eager")
    return model


def test_other_caches_keep_the_soft_cap_while_a_cache_lives() -> None:
    model, ids = with_softcap(), prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask).logits
        cache = kvant.Cache(model, "full")
        assert model.config._attn_implementation == "kvant"
        for past in (None, DynamicCache(config=model.config), cache):
            found = model(ids, attention_mask=mask, past_key_values=past).logits
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
        model.config.attn_logit_softcapping = None
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        without = model(ids, attention_mask=mask).logits
    assert relative_error(without[:, -6:], expected[:, -6:].double()) > 0.01, "the soft cap matters in this model"


def test_attention_with_a_soft_cap_is_written_out() -> None:
    q, (k, v) = torch.randn(1, 6, 9, 64), torch.randn(2, 1, 2, 9, 64)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    found = eager_attention(q, k, v, None, 0.5, None, SOFTCAP)[0]
    torch.testing.assert_close(found.double(), dense_attention(*rows, 0.5, SOFTCAP, None), rtol=1e-5, atol=1e-5)


def test_recipes_are_scored_on_a_model_with_a_soft_cap() -> None:
    model = with_softcap()
    assert teacher.softcaps_of(model) == [SOFTCAP] * 3
    assert teacher.softcaps_of(make_model("llama")) == [None] * 3
    segments = Segments.over(prompt(1, 200)[0].tolist(), context=90, tokens=60, prompt=30)
    full, coarse = evaluate(model, [recipes.get("full"), recipes.get("int4")], segments, profile=True)
    assert abs(full.kl) < 1e-6 and full.attn_rel_mse < 1e-9
    assert full.profile is not None and max(full.profile.layers["attention_kl"]) < 1e-9
    assert coarse.kl > 1e-4 and coarse.profile is not None
    assert 0.0 < coarse.attn_rel_mse < 0.05
