"""The model's own attention sinks: a logit per query head in the softmax's denominator. Every operation that needs no GPU against a
float64 softmax with one more logit; the CUDA kernels are in the tests of those."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant import recipes
from kvant.cache import PagedCache
from kvant.ops import LayerStore, blocked, lookup, reference
from kvant.ops.cpu import decode as cpu_decode
from kvant.ops.cpu import library
from kvant.ops.cpu import prefill as cpu_prefill
from kvant.ops.types import check_sink_logits, one_sequence
from kvant.recipe import Recipe
from kvant.transforms.affine_map import Mean
from tests.calibrate.synthetic import rope_of
from tests.conftest import make_layout, relative_error
from tests.fitted import made_up_tensors
from tests.ops.scores import extra_logit, head_errors, some_sinks, with_sinks

HEADS, GROUP, DIM = 2, 3, 64
SCALE = 0.2
NAMES = [
    "full",
    "saw-int4-kv",
    "int2:sink=5,recent=9",
    "kvant-2",
    "kvant-2:rope=post",
    "kvant-4-fast",
    "kivi-k2v2-sink",
]
OPTIONS = [{}, {"sliding_window": 40}, {"softcap": 5.0}, {"softcap": 5.0, "sliding_window": 70}]
compiled = pytest.mark.skipif(library.missing() is not None, reason=f"nothing compiled: {library.missing()}")


def with_means() -> Recipe:
    """A recipe that removes a mean from keys, so that a sink logit is compared with logits that lack q . mu; and one from values, which
    outputs get back only as far as the tokens' probabilities reach."""
    recipe = recipes.get("int4:sink=3,recent=20")
    key, value = (dataclasses.replace(s, transforms=(Mean(),)) for s in (recipe.key, recipe.value))
    return dataclasses.replace(recipe, key=key, value=value, name="int4-without-means")


def sinks() -> torch.Tensor:
    return some_sinks(HEADS * GROUP)


def filled(recipe: str | Recipe, lengths: list[int], first: int = 0) -> PagedCache:
    layout = make_layout(recipe, HEADS, DIM, dtype="float32", device="cpu")
    rope = rope_of(DIM)
    ropes = [type(rope)(rope.inv_freq, first)] if layout.recipe.wants_rope else None
    tensors = {0: made_up_tensors(layout.recipe, HEADS, DIM)}
    cache = PagedCache(layout, 1, tensors=tensors, ropes=ropes, implementation="reference")
    seqs = [cache.new() for _ in lengths]
    k, v = torch.randn(2, sum(lengths), HEADS, DIM) + 0.3
    cache.append(0, k, v, cache.extend(seqs, lengths), torch.randn(sum(lengths), HEADS * GROUP, DIM))
    return cache


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", [*NAMES, with_means()], ids=str)
def test_reference_decode(recipe: str | Recipe, options: dict[str, float]) -> None:
    cache = filled(recipe, [1, 63, 300])
    batch, q = cache.batch(cache.sequences), torch.randn(3, HEADS * GROUP, DIM).double()
    expected, _ = with_sinks(cache.stores[0], q, batch, sinks(), scale=SCALE, **options)  # type: ignore[arg-type]
    found = reference.decode(cache.stores[0], q, batch, scale=SCALE, sink_logits=sinks(), **options)  # type: ignore[arg-type]
    assert max(head_errors(found, expected)) < 2e-5


@compiled
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", [*NAMES, with_means()], ids=str)
@pytest.mark.parametrize("kind", range(len(library.kinds())), ids=library.kinds())
def test_cpu_decode(
    recipe: str | Recipe, options: dict[str, float], kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of one split and of several: the sink counts once."""
    monkeypatch.setattr(library, "isa", lambda: kind)
    cache = filled(recipe, [1, 63, 1300], first=30)
    batch, q = cache.batch(cache.sequences), torch.randn(3, HEADS * GROUP, DIM)
    expected, sums = with_sinks(cache.stores[0], q, batch, sinks(), scale=SCALE, **options)  # type: ignore[arg-type]
    found, lse = cpu_decode.decode_with_lse(
        cache.stores[0],
        q,
        batch,
        scale=SCALE,
        sink_logits=sinks(),
        **options,  # type: ignore[arg-type]
    )
    assert max(head_errors(found, expected)) < 2e-3
    torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=5e-3)


@compiled
def test_cpu_decode_of_nothing() -> None:
    """A sequence without tokens: the sink has it all."""
    cache = filled("int4", [5, 7])
    batch = cache.batch(cache.sequences)._replace(seq_lens=torch.tensor([0, 7]))
    q = torch.randn(2, HEADS * GROUP, DIM)
    found, lse = cpu_decode.decode_with_lse(cache.stores[0], q, batch, scale=SCALE, sink_logits=sinks())
    assert not found[0].any() and torch.equal(lse[0], sinks())


@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}])
def test_lookup_decode(options: dict[str, float]) -> None:
    cache = filled("vecinfer-2:sink=3,recent=20", [1, 63, 300])
    batch, q = cache.batch(cache.sequences), torch.randn(3, HEADS * GROUP, DIM)
    expected, _ = with_sinks(cache.stores[0], q, batch, sinks(), scale=SCALE, **options)  # type: ignore[arg-type]
    found = lookup.decode(cache.stores[0], q, batch, scale=SCALE, sink_logits=sinks(), **options)
    assert max(head_errors(found, expected)) < 1e-4


def written_out(
    store: LayerStore,
    cache: PagedCache,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: list[int],
    **options: float,
) -> torch.Tensor:
    """What prefill gives, from the history as decode reads it and the new tokens as they come."""
    batch, window, out, at = cache.batch(cache.sequences), options.get("sliding_window"), [], 0
    for b, new in enumerate(counts):
        n = int(batch.seq_lens[b])
        row = one_sequence(batch, b)
        keys, values = (reference.restored(store, name, row)[0, :n] for name in ("key", "value"))  # type: ignore[arg-type]
        here = slice(at, at + new)
        position = torch.arange(n + new)
        keep = position <= position[n:, None]
        if window is not None:
            keep &= position > position[n:, None] - window
        both = torch.cat((keys.double(), k[here].double())), torch.cat((values.double(), v[here].double()))
        out.append(extra_logit(q[here], *both, sinks(), SCALE, options.get("softcap"), keep)[0])
        at += new
    return torch.cat(out)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", [*NAMES, with_means()], ids=str)
def test_prefill(recipe: str | Recipe, options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, blocks by torch and blocks by compiled code; one sequence without a history. Blocks are smaller than a history."""
    monkeypatch.setattr(blocked, "BLOCK_TOKENS", 128)
    counts = [37, 5, 64]
    cache = filled(recipe, [300, 1])
    cache.new()
    q = torch.randn(sum(counts), HEADS * GROUP, DIM)
    k, v = torch.randn(2, sum(counts), HEADS, DIM)
    expected = written_out(cache.stores[0], cache, q, k, v, counts, **options)
    batch = cache.extend(cache.sequences, counts)
    settings = {"scale": SCALE, "sink_logits": sinks(), **options}
    exact = reference.prefill(cache.stores[0], q.double(), k.double(), v.double(), batch, **settings)  # type: ignore[arg-type]
    assert max(head_errors(exact, expected)) < 2e-5
    others = [blocked.prefill] if not any(s.groupwise for s in cache.layout.recipe.streams.values()) else []
    others += [cpu_prefill.prefill] if library.missing() is None else []
    for run in others:
        found = run(cache.stores[0], q, k, v, batch, **settings)
        assert max(head_errors(found, expected)) < 1e-4


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", ["int4:sink=3,recent=20", "kvant-2", "kivi-k2v2", with_means()], ids=str)
def test_replay_is_decode_token_by_token(recipe: str | Recipe, options: dict[str, float]) -> None:
    settings = {"scale": SCALE, "sink_logits": sinks(), **options}
    torch.manual_seed(1)
    caches = []
    for _ in range(2):
        torch.manual_seed(2)
        caches.append(filled(recipe, [100]))
    q, (k, v) = torch.randn(9, HEADS * GROUP, DIM), torch.randn(2, 9, HEADS, DIM)
    together, apart = caches
    found = together.replay(0, q, k, v, together.extend(together.sequences, [9]), **settings)
    for t in range(9):
        batch = apart.extend(apart.sequences, [1])
        apart.append(0, k[t : t + 1], v[t : t + 1], batch, q[t : t + 1])
        expected = reference.decode(apart.stores[0], q[t : t + 1].double(), batch, **settings)  # type: ignore[arg-type]
        assert max(head_errors(found[t : t + 1], expected)) < 1e-4


def test_without_a_sink_nothing_changes() -> None:
    cache = filled("int4", [70])
    batch, q = cache.batch(cache.sequences), torch.randn(1, HEADS * GROUP, DIM)
    none = torch.full((HEADS * GROUP,), float("-inf"))
    for run in (reference.decode, *([cpu_decode.decode] if library.missing() is None else [])):
        plain = run(cache.stores[0], q, batch, scale=SCALE)
        assert torch.equal(plain, run(cache.stores[0], q, batch, scale=SCALE, sink_logits=none))
        assert relative_error(run(cache.stores[0], q, batch, scale=SCALE, sink_logits=sinks()), plain) > 0.1


def test_sink_logits_of_another_shape_are_refused() -> None:
    q = torch.randn(1, 6, 64)
    with pytest.raises(ValueError, match=r"sink_logits must be \[6 query heads\]"):
        check_sink_logits(torch.zeros(5), q)
    assert check_sink_logits(torch.zeros(6).bfloat16(), q).dtype == torch.float32  # type: ignore[union-attr]
