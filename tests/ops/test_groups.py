"""Streams that code groups of tokens, against attention written out: the same whatever way the tokens came."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant import recipes
from kvant.cache import PagedCache
from kvant.codecs import Codec
from kvant.codecs.affine import Affine
from kvant.codecs.boosted import Boosted
from kvant.codecs.channel import Channel
from kvant.codecs.salient import Salient
from kvant.correctors.saliency import Saliency
from kvant.correctors.subspace import Subspace
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.hadamard import Hadamard
from tests.conftest import dense_attention, poison, relative_error
from tests.grouped import GROUPWISE, SMALL, Tokens, attended, fill, make_cache, same_bytes


@pytest.mark.parametrize("name", [*GROUPWISE, *SMALL])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 64), (1, 3, 96), (2, 4, 128)])
def test_decode_reads_what_spans_say(name: str, heads: int, group: int, dim: int) -> None:
    n, scale = 333, dim**-0.5
    tokens = Tokens.random(n, heads, group, dim)
    for length in (1, 40, 170, n) if dim == 64 else (n,):
        cache = make_cache(name, heads, dim)
        seq = cache.new()
        fill(cache, seq, tokens[:length], [length])
        found = cache.decode(0, tokens.q[length - 1 : length], cache.batch([seq]), scale=scale)
        k, v = (attended(cache.layout, side, tokens, length, length) for side in ("key", "value"))
        expected = dense_attention(tokens.q[length - 1 : length], k, v, scale)
        assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("codec", [Boosted(0.25, 16), Channel(4, 16)])
def test_parts_combine(rope: str, codec: Codec) -> None:
    """A rotation under Kitty's boost, or under SQuat's corrector, before RoPE or after it."""
    corrector = Subspace(weight=0.01, block=16) if codec.channelwise else None
    recipe = Recipe(
        "combined",
        Stream(codec, (Hadamard(order=16),), Window(3, flush=32), corrector, rope),  # type: ignore[arg-type]
        Stream(Affine(bits=2), (Hadamard(seed=3),), Window(3, recent=9)),
    )
    tokens, scale = Tokens.random(150, 2, 2, 64), 0.2
    cache = make_cache(recipe)
    seq = cache.new()
    fill(cache, seq, tokens[:149], [100, 49])
    batch = cache.extend([seq], [1])
    last = tokens[149:]
    history = [attended(cache.layout, side, tokens, 149, 100) for side in ("key", "value")]
    found = cache.prefill(0, last.q, last.k, last.v, batch, scale=scale)
    seen = [torch.cat((history[0], last.k)), torch.cat((history[1], last.v))]
    assert relative_error(found, dense_attention(last.q, *seen, scale)) < 1e-4
    cache.append(0, last.k, last.v, batch, last.q)
    found = cache.decode(0, last.q, cache.batch([seq]), scale=scale)
    seen = [attended(cache.layout, side, tokens, 150, 100) for side in ("key", "value")]
    assert relative_error(found, dense_attention(last.q, *seen, scale)) < 1e-4


@pytest.mark.parametrize("name", SMALL)
def test_prefill_reads_history_as_decode_would_and_new_tokens_as_they_are(name: str) -> None:
    prompt, n, dim, scale = 70, 131, 64, 0.2
    tokens = Tokens.random(n, 2, 2, dim)
    cache = make_cache(name, 2, dim)
    seq = cache.new()
    fill(cache, seq, tokens[:prompt], [prompt])
    batch = cache.extend([seq], [n - prompt])
    new = tokens[prompt:n]
    found = cache.prefill(0, new.q, new.k, new.v, batch, scale=scale)
    seen = [
        torch.cat((attended(cache.layout, side, tokens, prompt, prompt), x))
        for side, x in (("key", new.k), ("value", new.v))
    ]
    assert relative_error(found, dense_attention(new.q, *seen, scale)) < 1e-4


def append_in_ways(name: str, ways: list[list[int]], seed: int = 0, bfloat16: bool = False) -> list[PagedCache]:
    """The same tokens, come in different chunks. Where a recipe learns from the request's prompt, that comes first."""
    window = recipes.get(name).key.window
    prompt = [window.sink + window.recent + window.flush + 11] if recipes.get(name).not_prefix_safe else []
    n = sum(prompt) + sum(ways[0])
    tokens = Tokens.random(n, 2, 3, 64, seed)
    if bfloat16:
        tokens = Tokens(*(x.bfloat16() for x in (tokens.k, tokens.v, tokens.q)))
    caches = []
    for chunks in ways:
        cache = make_cache(name, pages=max(1, make_cache(name).layout.pages_for(n)))
        poison(cache.stores[0])
        fill(cache, cache.new(), tokens, prompt + chunks)
        caches.append(cache)
    return caches


@settings(max_examples=40)
@given(
    st.sampled_from(SMALL), st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(0, 2**31), st.booleans()
)
def test_every_way_to_append_leaves_the_same_bytes(name: str, chunks: list[int], seed: int, bfloat16: bool) -> None:
    n = sum(chunks)
    whole, chunked, single = append_in_ways(name, [[n], chunks, [1] * n], seed, bfloat16)
    assert same_bytes(whole, chunked)
    assert same_bytes(whole, single)


@pytest.mark.parametrize("name", GROUPWISE)
def test_every_recipe_leaves_the_same_bytes_whatever_way_its_tokens_come(name: str) -> None:
    whole, chunked, single = append_in_ways(name, [[180], [100, 27, 53], [1] * 180])
    assert same_bytes(whole, chunked)
    assert same_bytes(whole, single)


@pytest.mark.parametrize("name", SMALL)
def test_a_ragged_batch_is_each_sequence_alone(name: str) -> None:
    lengths, grown = [70, 3, 129, 17, 33], [64, 30, 1, 0, 15]
    sequences = [Tokens.random(n + m, 2, 2, 64, seed) for seed, (n, m) in enumerate(zip(lengths, grown, strict=True))]
    cache = make_cache(name)
    seqs = [cache.new() for _ in lengths]
    starts = [0] * len(lengths)
    for counts in (lengths, grown):
        batch = cache.extend(seqs, counts)
        parts = [s[a : a + c] for s, a, c in zip(sequences, starts, counts, strict=True)]
        cache.append(
            0, *(torch.cat([getattr(p, x) for p in parts]) for x in "kv"), batch, torch.cat([p.q for p in parts])
        )
        starts = [a + c for a, c in zip(starts, counts, strict=True)]
    query = torch.stack([s.q[-1] for s in sequences])
    together = cache.decode(0, query, cache.batch(seqs), scale=0.1)
    for row, (n, m, own) in enumerate(zip(lengths, grown, sequences, strict=True)):
        alone = make_cache(name)
        seq = alone.new()
        fill(alone, seq, own, [n, m] if m else [n])
        found = alone.stores[0].pages[torch.tensor(seq.pages, dtype=torch.int64)]
        assert torch.equal(found, cache.stores[0].pages[torch.tensor(seqs[row].pages, dtype=torch.int64)])
        for one, two in zip(alone.stores[0].owned, cache.stores[0].owned, strict=True):
            torch.testing.assert_close(
                one[seq.overlay_row], two[seqs[row].overlay_row], rtol=1e-5, atol=1e-6, equal_nan=True
            )
        torch.testing.assert_close(
            together[row], alone.decode(0, query[row : row + 1], alone.batch([seq]), scale=0.1)[0]
        )


# --- keys before RoPE -------------------------------------------------------------------------------------------------


def test_keys_before_rope_are_the_same_keys_when_nothing_is_coded() -> None:
    """All tokens in the windows: unrotating and forth is all that happens to them."""
    name = "squat-pre:v.recent=64,k.flush=64"
    tokens = Tokens.random(50, 2, 2, 64)
    cache = make_cache(name)
    seq = cache.new()
    fill(cache, seq, tokens, [20, 30])
    found = cache.decode(0, tokens.q[-1:], cache.batch([seq]), scale=0.1)
    expected = dense_attention(tokens.q[-1:], tokens.k, tokens.v.bfloat16(), 0.1)
    assert relative_error(found, expected) < 2e-2, "bfloat16 windows"


def test_pages_before_rope_do_not_depend_on_where_the_tokens_are() -> None:
    """The same tokens later in a sequence have the same codes: that is what storing them before RoPE is for."""
    name = "squat-pre:weight=0,k.group=16,k.flush=16"
    rope = make_cache(name).stores[0].key.rope
    assert rope is not None
    plain = Tokens.random(16, 2, 1, 64)
    codes = []
    for shift in (0, 16, 160):
        cache = make_cache(name)
        seq = cache.new()
        rest = Tokens.random(shift, 2, 1, 64, 7)
        rotated = Tokens(rope.rotate(plain.k, shift + torch.arange(16)), plain.v, plain.q)
        tokens = Tokens(*(torch.cat((getattr(rest, x), getattr(rotated, x))) for x in "kvq"))
        fill(cache, seq, tokens, [shift + 16])
        parts = cache.layout.unpack("key", cache.stores[0].pages[torch.tensor(seq.pages)])
        codes.append(parts["codes"][shift : shift + 16])
    for other in codes[1:]:
        assert (other == codes[0]).float().mean() > 0.99, "but for rounding"


def test_a_layer_without_its_rope_is_refused() -> None:
    cache = make_cache("squat-pre")
    with pytest.raises(ValueError, match="the layer's rope is needed"):
        PagedCache(cache.layout, layers=1)


# --- correctors -------------------------------------------------------------------------------------------------------


def test_without_weight_squats_pages_are_kivis() -> None:
    tokens = Tokens.random(200, 2, 3, 64)
    caches = []
    for name in ("squat:weight=0", "kivi-k2v2:k.flush=32,v.recent=32"):
        cache = make_cache(name)
        fill(cache, cache.new(), tokens, [90, 110])
        caches.append(cache)
    assert torch.equal(caches[0].stores[0].pages, caches[1].stores[0].pages)


def test_the_subspace_is_fitted_on_the_prompt_and_then_left_alone() -> None:
    tokens = Tokens.random(200, 2, 3, 64)
    cache = make_cache("squat")
    seq = cache.new()
    fill(cache, seq, tokens[:90], [90])
    state = cache.stores[0].states["key"]
    before = state[seq.overlay_row].clone()
    expected = Subspace().fit(tokens.q[:90].unflatten(1, (2, -1)))
    assert torch.equal(before, expected)
    fill(cache, seq, tokens[90:], [10, 100])
    assert torch.equal(cache.stores[0].states["key"][seq.overlay_row], before)


def test_until_the_first_group_is_coded_the_subspace_takes_in_every_query() -> None:
    tokens = Tokens.random(40, 1, 1, 64)
    cache = make_cache("squat:rank=40", heads=1)
    seq = cache.new()
    fill(cache, seq, tokens, [1] * 40)
    state = cache.stores[0].states["key"][seq.overlay_row, 0].double()
    seen = tokens.q[:32, 0].double()  # the group is coded when its 32nd token arrives
    torch.testing.assert_close(state.mT @ state, seen.mT @ seen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_each_sequence_has_its_own_subspace_unless_it_is_shared(shared: bool) -> None:
    first, second = Tokens.random(64, 2, 2, 64, 1), Tokens.random(64, 2, 2, 64, 2)
    cache = make_cache(f"squat:shared={shared}")
    seqs = [cache.new(), cache.new()]
    batch = cache.extend(seqs, [64, 64])
    cache.append(
        0, *(torch.cat((getattr(first, x), getattr(second, x))) for x in "kv"), batch, torch.cat((first.q, second.q))
    )
    states = cache.stores[0].states["key"]
    fits = [Subspace().fit(s.q.unflatten(1, (2, -1))) for s in (first, second)]
    for seq, expected in zip(seqs, [fits[0], fits[0 if shared else 1]], strict=True):
        torch.testing.assert_close(states[seq.overlay_row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["squat", "zipcache"])
def test_queries_are_asked_for(name: str) -> None:
    cache = make_cache(name)
    tokens = Tokens.random(5, 2, 1, 64)
    batch = cache.extend([cache.new()], [5])
    with pytest.raises(ValueError, match=f"recipe {name} learns from queries: append needs"):
        cache.append(0, tokens.k, tokens.v, batch)


def test_only_what_learns_from_the_request_is_not_prefix_safe() -> None:
    unsafe = {name for name in GROUPWISE if recipes.get(name).not_prefix_safe}
    assert unsafe == {"squat", "squat-pre"}
    assert "fitted on the request's own prompt" in str(recipes.get("squat").not_prefix_safe)


def test_mistakes_in_streams_are_named() -> None:
    keys = Stream(Channel(), window=Window(flush=32))
    salient = Stream(Salient(), window=Window(flush=128), corrector=Saliency())
    with pytest.raises(ValueError, match="only keys are rotated by RoPE"):
        Recipe("x", keys, Stream(Channel(), window=Window(flush=32), rope="pre"))
    with pytest.raises(ValueError, match="both streams must have the same windows"):
        Recipe("x", keys, salient)
    with pytest.raises(ValueError, match="saliency is attention after RoPE"):
        Recipe("x", Stream(Salient(), window=Window(flush=128), corrector=Saliency(), rope="pre"), salient)
    with pytest.raises(ValueError, match="flush must be a multiple of the codec's group of 32 tokens, got 48"):
        recipes.get("kivi-k2v2:k.flush=48")
    with pytest.raises(ValueError, match="page_tokens must be a multiple of the recipe's group of 128 tokens, got 64"):
        make_cache("kitty", page_tokens=64)
