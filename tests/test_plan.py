"""What a plan promises is what a cache allocates, to the byte."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvant
from kvant import recipes
from kvant.plan import PRESETS, parse_bytes, sink_rows
from kvant.shape import ModelShape
from tests.engines.test_hf import make_model, prompt
from tests.families import families, make

FREE = [name for name in recipes.names() if not recipes.get(name).calibrated]


@pytest.mark.few(8)
@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_allocates_what_was_planned(name: str, family: str) -> None:
    model = make_model(family)
    planned = kvant.plan(model, name, "3MiB", 150)
    requests = planned.recipe.requests
    assert requests >= 1
    cache = kvant.Cache(model, name, max_tokens=150, max_sequences=requests)
    with torch.inference_mode():
        model(prompt(requests, 150), past_key_values=cache)
        assert cache.nbytes == planned.recipe.allocated == requests * planned.recipe.request_bytes <= planned.memory
        assert planned.recipe.allocated + planned.recipe.request_bytes > planned.memory, "one more would not fit"
        with pytest.raises(kvant.PoolFull):
            model(prompt(requests, 140), past_key_values=cache)
    whole = sum(t.untyped_storage().nbytes() for g in cache.groups for s in g.paged.stores for t in (s.pages, *s.owned))
    assert cache.nbytes == whole
    longest = kvant.Cache(model, name, max_tokens=planned.recipe.tokens, max_sequences=1)
    with torch.inference_mode():
        model(prompt(1, 1), past_key_values=longest)
    assert longest.nbytes <= planned.memory < longest.nbytes + len(longest.layers) * longest.layout.page_bytes


@pytest.mark.few(8)
@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_every_kind_of_recipe_and_a_share_of_the_heads(name: str, parallel: int) -> None:
    shape = ModelShape((None,) * 3, 4, 64, "float32")
    planned = kvant.plan(shape, name, 2_000_000, 100, tensor_parallel=parallel)
    heads = 4 // parallel
    kind = planned.recipe
    pages = max(1, make(name, heads=heads).layout.pages_for(100))
    cache = make(name, pages * kind.requests, layers=3, heads=heads, max_sequences=kind.requests)
    assert cache.nbytes == kind.allocated
    assert planned.kv_heads == heads


def test_against_16_and_8_bits() -> None:
    planned = kvant.plan("Qwen3-8B", "saw-int4", "40GiB", 32768, tensor_parallel=2)
    per_token = 36 * 2 * 4 * 128  # layers, keys and values, heads on a device, head dim
    assert planned.bf16.bytes_per_token == 2 * per_token
    assert planned.fp8.bytes_per_token == per_token
    assert planned.recipe.bytes_per_token == per_token * 4.25 / 8
    assert planned.bf16.requests == 40 * 2**30 // (2 * per_token * 32768) == 17
    assert planned.recipe.requests == 66
    assert planned.to_dict()["recipe"]["tokens"] == planned.recipe.tokens
    more = kvant.plan("llama-3.1-70b", "saw-int4", "40GiB", 1000, tensor_parallel=16)
    assert more.kv_heads == 1, "where there are more devices than heads, each holds one"


def test_sink_rows_of_a_server() -> None:
    """A 32nd of the memory, in exact sinks of 4 tokens; never more than pages."""
    planned = kvant.plan("qwen3-8b", "kvant-2", "24GiB", 32768).recipe
    assert planned.sink_bytes == 36 * 8 * 4 * 128 * (2 + 1)
    assert planned.sink_rows == 24 * 2**30 // 32 // planned.sink_bytes == 1820
    assert kvant.plan("qwen3-8b", "saw-int4", "24GiB").recipe.sink_rows == 0
    assert sink_rows(10**6, 10**5, 10**6) == 10 and sink_rows(10**9, 10**5, 10**7) == 16
    assert sink_rows(10**15, 10**5, 10**5) == 4096
    gemma = ModelShape((1024,) * 5 + (None,), 8, 128, "bfloat16")  # layers with a sliding window have no sink rows
    assert kvant.plan(gemma, "kvant-2", "1GiB").recipe.sink_bytes == 8 * 4 * 128 * (2 + 1)
    assert kvant.plan(ModelShape((1024,) * 6, 8, 128, "bfloat16"), "kvant-2", "1GiB").recipe.sink_rows == 0


def test_presets_are_what_the_models_configs_say() -> None:
    """The same numbers as the classes of transformers have for these families."""
    assert ModelShape.of(transformers.MistralConfig(sliding_window=None)).layers == PRESETS["mistral-7b"].layers
    known = {"qwen3-4b": (36, 8, 128), "qwen3-8b": (36, 8, 128), "qwen3-32b": (64, 8, 128)}
    known |= {"llama-3.1-8b": (32, 8, 128), "llama-3.1-70b": (80, 8, 128), "mistral-7b": (32, 8, 128)}
    for name, numbers in known.items():
        shape = PRESETS[name]
        assert (len(shape.layers), shape.heads, shape.head_dim) == numbers


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2 * 10**9),
        ("7B", 7),
        ("3g", 3 << 30),
        (12, 12),
        ("5kb", 5000),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_a_number_needs_a_unit() -> None:
    """24 of anything is hardly 24 bytes."""
    for text in ("24", " 1.5 ", "0"):
        with pytest.raises(ValueError, match=rf"memory needs a unit, got '{text}': {text.strip()}GiB\?"):
            kvant.plan("qwen3-8b", memory=text)


def test_refuses_what_a_cache_refuses() -> None:
    """By its model type, where the config does not show what is different; gpt-oss and its sinks are served."""
    shape = {
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    config = transformers.MiMoV2FlashConfig(**shape)
    for refusing in (kvant.plan, kvant.Cache):
        with pytest.raises(ValueError, match="cannot serve mimo_v2_flash: its sliding layers have other KV heads"):
            refusing(config, "int4")
    assert kvant.plan(transformers.GptOssConfig(**shape), "int4").recipe.tokens > 0


def test_mistakes() -> None:
    for text in ("lots", "3 parsecs", "-1GiB", ""):
        with pytest.raises(ValueError, match="memory must be a number of bytes such as 80GiB"):
            kvant.plan("qwen3-8b", memory=text)
    with pytest.raises(ValueError, match="unknown preset 'gpt-9'; known: qwen3-4b"):
        kvant.plan("gpt-9")
    with pytest.raises(ValueError, match="tensor_parallel must divide the 8 KV heads or be a multiple of them, got 3"):
        kvant.plan("qwen3-8b", tensor_parallel=3)
    with pytest.raises(ValueError, match="context must be positive, got 0"):
        kvant.plan("qwen3-8b", context=0)
    with pytest.raises(ValueError, match="max_sequences must be positive and come with max_tokens"):
        kvant.Cache(make_model("llama"), "int4", max_sequences=2)
    small = kvant.plan("qwen3-8b", memory="1MiB")
    assert (small.recipe.requests, small.recipe.tokens, small.recipe.allocated) == (0, 0, 0)
