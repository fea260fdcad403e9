"""What a cache does to the model that it serves: its attention implementation comes back, its gradients are cut with a word."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import transformers

import kvant
from kvant.calibrate.capture import attending
from kvant.engines import lending
from tests.engines.test_hf import BASE, make_model, prompt


def implementation(model: Any) -> Any:
    return model.config._attn_implementation


def test_the_attention_implementation_comes_back_with_the_last_cache() -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    first = kvant.Cache(model, "int4")
    second = kvant.Cache(model.config, "int4")
    assert implementation(model) == "kvant"
    with torch.inference_mode():
        model(prompt(1, 20), past_key_values=first)
    del first
    assert implementation(model) == "kvant", "another cache needs it"
    with torch.inference_mode():
        model(prompt(1, 20), past_key_values=second)
    del second
    assert implementation(model) == "eager", "at once: a cache is in no cycle"
    with pytest.raises(ValueError, match="max_tokens must be positive"):
        kvant.Cache(model, "int4", max_tokens=0)
    assert implementation(model) == "eager"
    model.generate(prompt(1, 5), past_key_values=kvant.Cache(model, "int4"), max_new_tokens=2)
    gc.collect()
    assert implementation(model) == "eager"
    assert not [loan for loan in lending._LOANS.values() if loan.config() is model.config]


def test_an_implementation_that_was_set_in_the_meantime_stays() -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    cache = kvant.Cache(model, "int4")
    model.set_attn_implementation("sdpa")
    del cache
    assert implementation(model) == "sdpa"
    cache = kvant.Cache(model, "int4")
    model.set_attn_implementation("eager")
    other = kvant.Cache(model, "int4")
    assert implementation(model) == "kvant"
    del cache, other
    assert implementation(model) == "eager", "the last one that the user set"


def test_calibration_keeps_the_implementation_while_caches_go() -> None:
    model = make_model("llama")
    model.set_attn_implementation("sdpa")
    cache = kvant.Cache(model, "int4")
    with attending(model):
        del cache
        gc.collect()
        assert implementation(model) == "kvant"
    assert implementation(model) == "sdpa"


def test_configs_within_a_config_keep_their_own() -> None:
    """A model that also sees: what looks at images is none of the cache's business."""
    text = {**BASE, "query_pre_attn_scalar": 64, "sliding_window": 24}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    config._attn_implementation = {"": "sdpa", "text_config": "eager", "vision_config": "flash_attention_2"}
    cache = kvant.Cache(config, "int4")
    assert [part._attn_implementation for part in (config, config.text_config, config.vision_config)] == [
        "kvant",
        "kvant",
        "flash_attention_2",
    ]
    inner = kvant.Cache(config.text_config, "int4")
    del cache
    assert [part._attn_implementation for part in (config, config.text_config)] == ["sdpa", "kvant"]
    del inner
    assert [part._attn_implementation for part in (config, config.text_config, config.vision_config)] == [
        "sdpa",
        "eager",
        "flash_attention_2",
    ]


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_are_cut_with_one_word_in_eval_mode() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    with pytest.warns(UserWarning, match="gradients do not flow through packed keys and values: .* torch.no_grad()"):
        found = model(prompt(1, 20), past_key_values=cache).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = model(prompt(1, 1), past_key_values=cache).logits  # it has been said
    assert not any(store.pages.requires_grad for group in cache.groups for store in group.paged.stores)
    assert not any(
        owned.requires_grad for group in cache.groups for store in group.paged.stores for owned in store.owned
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        other = kvant.Cache(model, "int4")
        torch.testing.assert_close(found, model(prompt(1, 20), past_key_values=other).logits)
        torch.testing.assert_close(more, model(prompt(1, 1), past_key_values=other).logits)


def test_gradients_are_refused_in_training_mode_and_the_cache_goes_on() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    model.train()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"gradients do not flow .* training mode; call it under torch.no_grad\(\)"
        ):
            model(prompt(1, 20), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        found = model(prompt(1, 20), past_key_values=cache).logits
        torch.testing.assert_close(found, model(prompt(1, 20), past_key_values=kvant.Cache(model, "int4")).logits)


def test_what_the_attention_function_refuses_leaves_the_cache_as_it_was() -> None:
    model = make_model("llama", attention_dropout=0.5)
    cache = kvant.Cache(model, "int4")
    with torch.no_grad():
        model(prompt(1, 20), past_key_values=cache)
        model.train()
        with pytest.raises(ValueError, match="causal attention without dropout"):
            model(prompt(1, 5), past_key_values=cache)
        model.eval()
        model(prompt(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 25
