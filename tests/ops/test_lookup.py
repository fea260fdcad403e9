"""Algorithm 1 against dequantization: the same stored bytes on both sides, poisoned memory, odd shapes."""

from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.cache import PagedCache
from kvant.codecs.product_vq import BoundProductVQ
from kvant.ops import choose, lookup
from tests.conftest import make_layout, relative_error
from tests.fitted import made_up_tensors

SERVED = [name for name in recipes.names() if name.startswith(("vecinfer", "million"))]
MIXED = [
    "vecinfer-2:books=head",
    "million-2:books=space",
    "million-2:recent=0",
    "vecinfer-2:sink=3,recent=9,v.recent=40",
    "million-4:sink=70,recent=0",
    "vecinfer-2:sink=3,recent=9,v.window_dtype=fp8",
]


def caches(name: str, heads: int, head_dim: int) -> tuple[PagedCache, PagedCache]:
    """The same recipe with the same codebooks, read by the reference and by lookup."""
    layout = make_layout(name, heads, head_dim, dtype="float32")
    tensors = {0: made_up_tensors(layout.recipe, heads, head_dim)}
    return (
        PagedCache(layout, 1, tensors=tensors, implementation="reference"),
        PagedCache(layout, 1, tensors=tensors, implementation="lookup"),
    )


def decoded(cache: PagedCache, lengths: list[int], group: int, seed: int, **options: float | None) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    heads, dim = cache.layout.heads, cache.layout.head_dim
    seqs = [cache.new() for _ in lengths]
    for seq, n in zip(seqs, lengths, strict=True):
        k, v = (torch.randn(n, heads, dim, generator=random) for _ in range(2))
        cache.append(0, k, v + 0.3, cache.extend([seq], [n]))
    q = torch.randn(len(lengths), heads * group, dim, generator=random)
    return cache.decode(0, q, cache.batch(seqs), scale=dim**-0.5, **options)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [*SERVED, *MIXED])
@pytest.mark.parametrize(("heads", "group", "head_dim"), [(2, 1, 64), (1, 3, 96), (2, 4, 128)])
def test_lookup_equals_dequantization(name: str, heads: int, group: int, head_dim: int) -> None:
    lengths = [1, 63, 64, 129, 333]
    torch.manual_seed(1)
    reference, looked_up = caches(name, heads, head_dim)
    expected = decoded(reference, lengths, group, 7)
    found = decoded(looked_up, lengths, group, 7)
    assert torch.equal(reference.stores[0].pages, looked_up.stores[0].pages)
    assert relative_error(found, expected) < 1e-5
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("softcap", "sliding_window"), [(None, 40), (5.0, None), (5.0, 70), (None, 1), (None, 300)])
def test_soft_cap_and_sliding_window(softcap: float | None, sliding_window: int | None) -> None:
    reference, looked_up = caches("vecinfer-2:recent=20", 2, 64)
    options = {"softcap": softcap, "sliding_window": sliding_window}
    expected = decoded(reference, [300, 5], 2, 3, **options)
    assert relative_error(decoded(looked_up, [300, 5], 2, 3, **options), expected) < 1e-5


def test_blocks_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, looked_up = caches("vecinfer-4", 1, 64)
    expected = decoded(reference, [700, 20], 2, 5)
    for pages in (1, 2, 5):
        monkeypatch.setattr(lookup, "BLOCK_PAGES", pages)
        assert relative_error(decoded(looked_up, [700, 20], 2, 5), expected) < 1e-5


def test_cropped_sequences_read_their_pages_where_the_window_is_gone() -> None:
    reference, looked_up = caches("vecinfer-2:recent=16", 2, 64)
    k, v, q = torch.randn(200, 2, 64), torch.randn(200, 2, 64), torch.randn(1, 4, 64)
    found = []
    for cache in (reference, looked_up):
        seq = cache.new()
        cache.append(0, k, v, cache.extend([seq], [200]))
        cache.crop(seq, 150)
        found.append(cache.decode(0, q, cache.batch([seq]), scale=0.125))
    assert relative_error(found[1], found[0]) < 1e-5


def test_keys_are_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, looked_up = caches("vecinfer-2", 1, 64)
    store = looked_up.stores[0]
    decode = BoundProductVQ.decode

    def guarded(self: BoundProductVQ, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self is not store.key.codec, "a key was decoded"
        return decode(self, parts)

    monkeypatch.setattr(BoundProductVQ, "decode", guarded)
    decoded(looked_up, [300], 2, 5)


def test_another_is_chosen_unless_lookup_is_named() -> None:
    layout = make_layout("vecinfer-2")
    for op in ("append", "decode", "prefill"):
        assert choose(op, layout, "cpu").name != "lookup"
        assert choose(op, layout, "cpu", "lookup").name == "lookup"


@pytest.mark.parametrize("name", ["int4", "full", "saw-int4-kmeans", "turboquant-4"])
def test_other_codecs_are_refused_with_the_reason(name: str) -> None:
    codec = type(recipes.get(name).key.codec).__name__
    with pytest.raises(ValueError, match=f"lookup: it looks scores up .* {codec} stores none"):
        choose("decode", make_layout(name), "cpu", "lookup")
