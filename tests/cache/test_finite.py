"""Numbers that no page may hold are refused before anything is written, and the sequence goes on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvant
from kvant.cache import NotFinite
from kvant.ops.reference import read
from tests.conftest import make_layout
from tests.engines.test_hf import make_model, prompt
from tests.grouped import SMALL, Tokens, fill, make_cache

BAD = [float("nan"), float("inf"), float("-inf"), 3e38]


@settings(max_examples=60)
@given(
    st.sampled_from(["int4", "saw-int4:sink=2,recent=5", "full", *SMALL]),
    st.sampled_from(BAD),
    st.sampled_from("kv"),
    st.integers(0, 1),
    st.integers(0, 29),
    st.integers(0, 2**31),
)
def test_a_bad_number_is_named_and_leaves_no_trace(
    name: str, number: float, side: str, layer: int, token: int, seed: int
) -> None:
    """Two sequences; the second one's new tokens hold a bad number in one layer."""
    cache, twin = make_cache(name, layers=2), make_cache(name, layers=2)
    tokens = Tokens.random(90, 2, 2, 64, seed)
    for each in (cache, twin):
        fill(each, each.new(), tokens[:20], [20])
        fill(each, each.new(), tokens[:40], [40])
    bad = Tokens(tokens.k.clone(), tokens.v.clone(), tokens.q)
    getattr(bad, side)[40 + token, 1, 7] = number
    sequences = list(cache.sequences)
    batch = cache.extend(sequences, [10, 30])
    parts = torch.cat((torch.arange(20, 30), torch.arange(40, 70)))
    for i in range(layer):
        cache.append(i, tokens.k[parts], tokens.v[parts], batch, tokens.q[parts])
    pages = cache.stores[layer].pages.clone()
    with pytest.raises(NotFinite, match=f"layer {layer}: the .* of token {40 + token} of sequence 1 holds") as error:
        cache.append(layer, bad.k[parts], bad.v[parts], batch, bad.q[parts])
    assert (error.value.layer, error.value.token, error.value.sequence) == (layer, 40 + token, 1)
    assert error.value.stream == {"k": "key", "v": "value"}[side]
    assert torch.equal(cache.stores[layer].pages, pages)
    for seq, length in zip(sequences, (20, 40), strict=True):
        cache.rollback(seq, length, range(layer))
    fill(cache, sequences[0], tokens[20:50], [30])
    fill(twin, twin.sequences[0], tokens[20:50], [30])
    for seq, other in zip(sequences, twin.sequences, strict=True):
        batch, expected = cache.batch([seq]), twin.batch([other])
        for store, same in zip(cache.stores, twin.stores, strict=True):
            for stream in store.overlays:
                found = read(store, stream, batch, batch.seq_lens)[0, : seq.length]
                assert bool(found.isfinite().all())
                if not layer:  # nothing was written at all
                    assert torch.equal(found, read(same, stream, expected, expected.seq_lens)[0, : seq.length])


@pytest.mark.parametrize("name", [n for n in kvant.recipe_names() if not kvant.recipe(n).calibrated])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_largest_numbers_that_are_let_in_come_back_finite(name: str, dtype: str) -> None:
    cache = make_cache(name, dtype=dtype)
    sign = torch.randn(300, 2, 64).sign()
    sign[:30] = 1  # of which a rotation makes one number
    tokens = Tokens(cache.largest * sign, cache.largest * sign.flip(0), torch.randn(300, 2, 64))
    fill(cache, cache.new(), tokens, [300])
    batch = cache.batch(cache.sequences)
    for stream in ("key", "value"):
        assert bool(read(cache.stores[0], stream, batch, batch.seq_lens).isfinite().all())


def test_the_check_can_be_switched_off() -> None:
    cache = kvant.PagedCache(make_layout("full", dtype="float32"), 1, check=False)
    batch = cache.extend([cache.new()], [3])
    cache.append(0, torch.full((3, 2, 64), float("nan")), torch.zeros(3, 2, 64), batch)
    assert bool(read(cache.stores[0], "key", cache.batch(cache.sequences), batch.seq_lens).isnan().any())


@pytest.mark.parametrize("recipe", ["int4:sink=2,recent=9", "kivi-k2v2:k.group=16,k.flush=16,v.recent=5"])
@pytest.mark.parametrize("columns", [1, 30])
def test_a_model_that_breaks_down_leaves_its_cache_as_it_was(recipe: str, columns: int) -> None:
    model = make_model("llama")
    ids = prompt(2, 110)
    cache, untouched = kvant.Cache(model, recipe), kvant.Cache(model, recipe)
    weight = model.model.layers[1].self_attn.v_proj.weight
    with torch.inference_mode():
        for each in (cache, untouched):
            model(ids[:, :70], past_key_values=each)
        good = weight.clone()
        weight[70, :] = float("inf")
        with pytest.raises(NotFinite, match="layer 1: the value of token 70 of sequence 0"):
            model(ids[:, 70 : 70 + columns], past_key_values=cache)
        weight.copy_(good)
        model(ids[:, 70 : 70 + columns], past_key_values=untouched)
        untouched.crop(-columns)  # the recent window is as short afterwards
        assert cache.get_seq_length() == 70
        assert [e.length for g in cache.groups for e in g.sequences] == [70, 70]
        for start, stop in ((70, 80), (80, 81)):
            found = model(ids[:, start:stop], past_key_values=cache).logits
            expected = model(ids[:, start:stop], past_key_values=untouched).logits
            assert bool(found.isfinite().all())
            if columns == 1 or "int4" in recipe:  # a group that was coded in one layer is not the same as in none
                torch.testing.assert_close(found, expected)
        assert kvant.Cache(model, recipe, check_finite=False).check_finite is False
