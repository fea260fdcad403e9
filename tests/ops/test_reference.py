"""The reference against attention written out: same stored bytes on both sides, poisoned memory, odd shapes."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvant import recipes
from kvant.cache import PagedCache
from kvant.ops import choose, implementations, reference
from kvant.ops.types import as_held
from kvant.recipe import spans
from tests.calibrate.synthetic import rope_of
from tests.conftest import dense_attention, make_layout, relative_error

TOKENWISE = [
    name
    for name in recipes.names()
    if not recipes.get(name).calibrated and not any(s.groupwise for s in recipes.get(name).streams.values())
]
WINDOWED = ["int2:sink=5,recent=0", "int2:sink=0,recent=7", "saw-int4-kv:sink=3,recent=70,k.recent=9"]
WINDOWED += ["int2:sink=3,recent=70,v.window_dtype=fp8"]


def stored(cache: PagedCache, x: torch.Tensor, side: str, n: int, whole: bool = True) -> torch.Tensor:
    """What attention should see of the tokens x, computed without pages: coded where spans say packed."""
    stream = cache.stores[0].stream(side)  # type: ignore[arg-type]
    y = stream.forward(x.float())
    coded = stream.codec.decode(stream.codec.encode(y))
    out = torch.empty_like(y)
    for span in spans(cache.layout.recipe, n):
        part = slice(span.start, min(span.stop, len(x)))
        full = as_held(y[part], cache.layout.window_dtype(side)).float()  # type: ignore[arg-type]
        out[part] = coded[part] if getattr(span, side) == "packed" else full
    return stream.inverse(out[:, :, None, :])[:, :, 0]


@pytest.mark.parametrize("name", [*TOKENWISE, *WINDOWED])
@pytest.mark.parametrize(("heads", "group", "head_dim"), [(2, 1, 64), (1, 3, 96), (2, 4, 128), (1, 8, 80)])
def test_decode_reads_what_spans_say(name: str, heads: int, group: int, head_dim: int) -> None:
    n, scale = 131, head_dim**-0.5
    cache = PagedCache(make_layout(name, heads, head_dim, dtype="float32"), layers=1)
    q, k, v = (
        torch.randn(1, heads * group, head_dim),
        torch.randn(n, heads, head_dim),
        torch.randn(n, heads, head_dim) + 0.3,
    )
    seq = cache.new()
    cache.append(0, k, v, cache.extend([seq], [n]))
    found = cache.decode(0, q, cache.batch([seq]), scale=scale)
    expected = dense_attention(q, stored(cache, k, "key", n), stored(cache, v, "value", n), scale)
    assert relative_error(found, expected) < 1e-5
    assert found.dtype == q.dtype


@pytest.mark.parametrize("implementation", ["reference", None])
@pytest.mark.parametrize(("rope", "raw"), [("", False), (",k.rope=block,rope_block=32", True), (",k.rope=pre", True)])
def test_windows_hold_unrotated_keys_as_the_model_gave_them(rope: str, raw: bool, implementation: str | None) -> None:
    """And attention reads them so: with windows for all tokens it is exact. Others are rounded after the Hadamard."""
    layout = make_layout(f"saw-int4-kv:sink=3,recent=87{rope}", 2, 64)
    assert layout.recipe.key.raw_window == raw
    assert layout.recipe.value.raw_window is False and not recipes.get("squat-pre").key.raw_window
    ropes = [rope_of(64)] if layout.recipe.wants_rope else None
    cache = PagedCache(layout, 1, ropes=ropes, implementation=implementation)
    k, v = torch.randn(2, 90, 2, 64).bfloat16()
    seq = cache.new()
    cache.append(0, k, v, cache.extend([seq], [90]))
    held = cache.stores[0].overlays["key"][seq.overlay_row]
    assert torch.equal(held, k) == raw
    seen = reference.read(cache.stores[0], "key", cache.batch([seq]), torch.tensor([90]))[0]
    assert torch.equal(seen[:90], k.float()) == raw
    q = torch.randn(1, 6, 64)
    values = stored(cache, v, "value", 90)
    found = cache.decode(0, q, cache.batch([seq]), scale=0.125)
    assert relative_error(found, dense_attention(q, k.float(), values, 0.125)) < (1e-6 if raw else 1e-2)


@pytest.mark.parametrize("name", ["full", "saw-int4-kv", *WINDOWED])
def test_prefill_reads_history_as_decode_would_and_new_tokens_in_full(name: str) -> None:
    heads, group, dim, history, fresh = 2, 3, 64, 150, 37
    cache = PagedCache(make_layout(name, heads, dim, dtype="float32"), layers=1)
    k, v = torch.randn(history + fresh, heads, dim), torch.randn(history + fresh, heads, dim)
    q = torch.randn(fresh, heads * group, dim)
    seq = cache.new()
    cache.append(0, k[:history], v[:history], cache.extend([seq], [history]))
    found = cache.prefill(0, q, k[history:], v[history:], cache.extend([seq], [fresh]), scale=0.2)
    keys = torch.cat((stored(cache, k[:history], "key", history), k[history:]))
    values = torch.cat((stored(cache, v[:history], "value", history), v[history:]))
    assert relative_error(found, dense_attention(q, keys, values, 0.2)) < 1e-5


@pytest.mark.parametrize("fresh", [1, 63, 600])
def test_prefill_without_history_is_exact_for_every_recipe(fresh: int) -> None:
    for name in ("int2", "quarot-int2-win", "full"):
        cache = PagedCache(make_layout(name, 1, 64, dtype="float32"), layers=1)
        q, k, v = torch.randn(fresh, 2, 64), torch.randn(fresh, 1, 64), torch.randn(fresh, 1, 64)
        found = cache.prefill(0, q, k, v, cache.extend([cache.new()], [fresh]), scale=0.125)
        assert relative_error(found, dense_attention(q, k, v, 0.125)) < 1e-5


@pytest.mark.parametrize(("softcap", "sliding_window"), [(None, 40), (5.0, None), (5.0, 70), (None, 1)])
def test_soft_cap_and_sliding_window(softcap: float | None, sliding_window: int | None) -> None:
    cache = PagedCache(make_layout("int8", 2, 64, dtype="float32"), layers=1)
    n = 150
    k, v = torch.randn(n, 2, 64), torch.randn(n, 2, 64)
    options = {"scale": 1.0, "softcap": softcap, "sliding_window": sliding_window}
    seq = cache.new()
    cache.append(0, k[:100], v[:100], cache.extend([seq], [100]))
    q = torch.randn(50, 4, 64)
    batch = cache.extend([seq], [50])
    found = cache.prefill(0, q, k[100:], v[100:], batch, **options)
    keys = torch.cat((stored(cache, k[:100], "key", 100), k[100:]))
    values = torch.cat((stored(cache, v[:100], "value", 100), v[100:]))
    assert relative_error(found, dense_attention(q, keys, values, 1.0, softcap, sliding_window)) < 1e-5
    cache.append(0, k[100:], v[100:], batch)
    found = cache.decode(0, q[-1:], cache.batch([seq]), **options)
    expected = dense_attention(
        q[-1:], stored(cache, k, "key", n), stored(cache, v, "value", n), 1.0, softcap, sliding_window
    )
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["full", "int4", "quarot-int2-win", "int2:sink=3,recent=20"])
def test_a_ragged_batch_is_each_sequence_alone(name: str) -> None:
    lengths = [1, 63, 64, 129, 7]
    layout = make_layout(name, 2, 64, dtype="float32")
    together = PagedCache(layout, layers=1)
    seqs = [together.new() for _ in lengths]
    k, v, q = torch.randn(sum(lengths), 2, 64), torch.randn(sum(lengths), 2, 64), torch.randn(sum(lengths), 6, 64)
    batch = together.extend(seqs, lengths)
    prefilled = together.prefill(0, q, k, v, batch, scale=0.1)
    together.append(0, k, v, batch)
    query = torch.randn(len(lengths), 6, 64)
    decoded = together.decode(0, query, together.batch(seqs), scale=0.1)
    start = 0
    for row, n in enumerate(lengths):
        part = slice(start, start + n)
        alone = PagedCache(layout, layers=1)
        seq = alone.new()
        own = alone.extend([seq], [n])
        torch.testing.assert_close(prefilled[part], alone.prefill(0, q[part], k[part], v[part], own, scale=0.1))
        alone.append(0, k[part], v[part], own)
        torch.testing.assert_close(decoded[row : row + 1], alone.decode(0, query[row : row + 1], own, scale=0.1))
        start += n


def test_padding_slots_write_nothing() -> None:
    cache = PagedCache(make_layout("int2:sink=2,recent=3", 2, 64), layers=1)
    seq = cache.new()
    batch = cache.extend([seq], [5])
    batch = batch._replace(slot_mapping=torch.full_like(batch.slot_mapping, -1))
    before = cache.stores[0].pages.clone()
    cache.append(0, torch.randn(5, 2, 64), torch.randn(5, 2, 64), batch)
    assert torch.equal(cache.stores[0].pages, before)
    assert cache.stores[0].overlays["key"].isnan().all()


def test_float64_queries_are_answered_in_float64() -> None:
    cache = PagedCache(make_layout("saw-int4", 2, 64), layers=1)
    seq = cache.new()
    cache.append(0, torch.randn(70, 2, 64), torch.randn(70, 2, 64), cache.extend([seq], [70]))
    q = torch.randn(1, 2, 64)
    exact = cache.decode(0, q.double(), cache.batch([seq]), scale=0.1)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(cache.decode(0, q, cache.batch([seq]), scale=0.1).double(), exact, rtol=1e-4, atol=1e-5)


def test_an_unknown_implementation_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="unknown implementation 'magic' of decode; known: .*reference"):
        choose("decode", make_layout("int4"), "cpu", "magic")
    assert "reference" in [i.name for i in implementations("append")]


def test_refusals_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.ops import registry

    broken = registry.Implementation("decode", "picky", lambda: None, lambda layout, device: "it is picky", rank=9)
    monkeypatch.setattr(registry, "_FOUND", {("decode", "picky"): broken})
    with pytest.raises(ValueError, match="nothing can decode recipe int4 on cpu: picky: it is picky"):
        choose("decode", make_layout("int4"), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run")
def test_the_reference_is_not_taken_without_a_word_on_a_gpu() -> None:
    layout = make_layout("kivi-k2v2")
    with pytest.warns(UserWarning, match=r"decode of recipe kivi-k2v2 on cuda is the plain torch reference.*cuda: "):
        assert choose("decode", layout, "cuda").name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose("decode", layout, "cuda", "reference")
        choose("decode", layout, "cpu")


@pytest.mark.parametrize("implementation", ["reference", None])
@pytest.mark.parametrize(
    ("name", "queries"),
    [
        ("int4", 4),
        ("int2:sink=5,recent=7,rollback=3", 4),
        ("int2:sink=5,recent=2,rollback=7", 8),  # more drafts than recent tokens
        ("saw-int4-kv:sink=3,recent=70,k.recent=9,rollback=2", 3),
        ("kivi-k2v2-sink:shift=false,rollback=5", 5),
    ],
)
@pytest.mark.parametrize("history", [0, 1, 62, 130])
def test_several_queries_read_what_each_would_have_alone(
    name: str, queries: int, history: int, implementation: str | None
) -> None:
    """Tokens that are appended at once and verified together, against tokens that come one by one."""
    heads, dim, options = 2, 64, {"scale": 0.125, "softcap": 20.0, "sliding_window": 90}
    layout = make_layout(name, heads, dim, dtype="float32")
    together, alone = (PagedCache(layout, layers=1, implementation=implementation) for _ in range(2))
    run = choose("decode", layout, "cpu", implementation).run
    n = history + queries
    k, v = torch.randn(2, n, heads, dim)
    q = torch.randn(n, 3 * heads, dim)
    one, other = together.new(), alone.new()
    for cache, seq in ((together, one), (alone, other)):
        if history:
            cache.append(0, k[:history], v[:history], cache.extend([seq], [history]))
    together.append(0, k[history:], v[history:], together.extend([one], [queries]))
    found = run(together.stores[0], q[history:], together.batch([one]), **options)
    for i in range(queries):
        at = slice(history + i, history + i + 1)
        alone.append(0, k[at], v[at], alone.extend([other], [1]))
        expected = run(alone.stores[0], q[at], alone.batch([other]), **options)
        torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-5, atol=1e-5)


def test_queries_that_the_window_no_longer_holds_are_refused() -> None:
    layout = make_layout("int2:sink=5,recent=7,rollback=2", 2, 64, dtype="float32")
    cache = PagedCache(layout, layers=1)
    seq = cache.new()
    cache.append(0, *torch.randn(2, 30, 2, 64), cache.extend([seq], [30]))
    decode = choose("decode", layout, "cpu").run
    with pytest.raises(ValueError, match="needs a rollback of 3, got 2"):
        decode(cache.stores[0], torch.randn(4, 2, 64), cache.batch([seq]), scale=0.1)
    with pytest.raises(ValueError, match="as many queries of every sequence, got 3 for 2 sequences"):
        decode(cache.stores[0], torch.randn(3, 2, 64), cache.batch([seq, seq]), scale=0.1)
