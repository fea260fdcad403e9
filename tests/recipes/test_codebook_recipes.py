"""VecInfer, MILLION, SAW-INT4's k-means and TurboQuant on the paged cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant import recipes
from kvant.cache import PagedCache
from kvant.layout import Layout
from tests.cache.test_paged import chunkings, contents, fill
from tests.codes import assert_same_parts, stored_numbers
from tests.conftest import make_layout, poison
from tests.fitted import made_up_tensors

OURS = [
    name
    for name in recipes.names()
    if name.startswith(("vecinfer", "million", "saw-int4-kmeans", "turboquant")) and ":" not in name
]
VARIANTS = [
    "saw-int4-kmeans:centroids=1",
    "saw-int4-kmeans:centroids=16",
    "saw-int4-kmeans-rot:centroids=2048,books=layer",
    "vecinfer-2:books=space",
    "million-3:books=head,recent=0",
]
BITS = {  # counted at head_dim 64 and 128
    "vecinfer-4": (4, 4),
    "vecinfer-3": (3, 3),
    "vecinfer-2": (2, 2),
    "vecinfer-2-mixed": (2, 2),
    "vecinfer-1.5": (1.5, 1.5),
    "vecinfer-1.25": (1.25, 1.25),
    "million-4": (4, 4),
    "million-3": (3, 3),
    "million-2": (2, 2),
    "million-1.5": (1.5, 1.5),
    "saw-int4-kmeans": (4.625, 4.3125),
    "saw-int4-kmeans-rot": (4.625, 4.3125),
    "turboquant-4": (4.25, 4.125),
    "turboquant-3": (3.25, 3.125),
    "turboquant-2": (2.25, 2.125),
}


def test_every_recipe_is_there_and_its_bits_are_counted() -> None:
    assert set(OURS) == set(BITS)
    for name, expected in BITS.items():
        assert tuple(Layout.of(recipes.get(name), 2, dim).bits_per_element() for dim in (64, 128)) == expected


def test_vecinfer_and_million_of_one_size_differ_by_the_transforms_of_the_keys_alone() -> None:
    for size in ("4", "3", "2", "1.5"):
        ours, theirs = recipes.get(f"vecinfer-{size}"), recipes.get(f"million-{size}")
        assert [type(t).__name__ for t in ours.key.transforms] == ["Smooth", "Hadamard"]
        assert (ours.key.codec, ours.key.window, ours.value) == (theirs.key.codec, theirs.key.window, theirs.value)
        assert not theirs.key.transforms
        assert ours.key.window.recent == ours.value.window.recent == 128


@settings(max_examples=30)
@given(st.sampled_from([*OURS, *VARIANTS]), chunkings(), st.sampled_from([16, 64]), st.sampled_from([64, 80, 96]))
def test_every_way_to_append_leaves_the_same_bytes(
    name: str, chunking: tuple[int, list[int]], page_tokens: int, head_dim: int
) -> None:
    n, chunks = chunking
    k, v = torch.randn(n, 2, head_dim), torch.randn(n, 2, head_dim)
    layout = make_layout(name, 2, head_dim, page_tokens=page_tokens, dtype="float32")
    tensors = {0: made_up_tensors(layout.recipe, 2, head_dim)}
    seen = []
    for ways in ([n], chunks, [1] * n):
        cache = PagedCache(layout, layers=1, pages=layout.pages_for(n), tensors=tensors)
        poison(cache.stores[0])
        seq = cache.new()
        fill(cache, seq, k, v, ways)
        seen.append(contents(cache, seq))
    for other in seen[1:]:
        for first, second in zip(seen[0], other, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("name", [*OURS, *VARIANTS])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_token_comes_back_from_its_page_as_its_codec_left_it(name: str, head_dim: int) -> None:
    heads, n = 2, 70
    layout = make_layout(name, heads, head_dim, dtype="float32")
    cache = PagedCache(layout, 1, tensors={0: made_up_tensors(layout.recipe, heads, head_dim)})
    x = torch.randn(n, heads, head_dim) * 3
    seq = cache.new()
    cache.append(0, x, x, cache.extend([seq], [n]))
    store = cache.stores[0]
    for side in ("key", "value"):
        stream = store.stream(side)
        found = layout.unpack(side, store.pages[torch.tensor(seq.pages)])
        found = {field: codes[:n] for field, codes in found.items()}
        expected = stream.codec.encode(stream.forward(x))
        assert_same_parts(stream.codec, found, expected, *stored_numbers(stream, x, torch.arange(n)))


@pytest.mark.parametrize("name", [*OURS, *VARIANTS])
def test_queries_and_keys_keep_their_products_through_the_transforms(name: str) -> None:
    layout = make_layout(name, 2, 64, dtype="float32")
    cache = PagedCache(layout, 1, tensors={0: made_up_tensors(layout.recipe, 2, 64)})
    stream = cache.stores[0].key
    q, k = torch.randn(9, 2, 3, 64), torch.randn(9, 2, 64)
    found = torch.einsum("nhgd,nhd->nhg", stream.dual(q).double(), stream.forward(k).double())  # in any order the same
    torch.testing.assert_close(found, torch.einsum("nhgd,nhd->nhg", q.double(), k.double()), rtol=1e-5, atol=1e-5)


def test_an_artifact_serves_every_way_to_code_the_residual_but_no_other_codebook() -> None:
    fits = recipes.get("saw-int4-kmeans").fits
    assert set(fits) == {"key.codec", "value.codec"}
    assert recipes.get("saw-int4-kmeans:bits=3,zero=integer").fits == fits
    assert recipes.get("saw-int4-kmeans:centroids=16").fits != fits
    assert recipes.get("vecinfer-2:recent=5").fits == recipes.get("vecinfer-2").fits
    assert recipes.get("vecinfer-2:power=0.3").fits != recipes.get("vecinfer-2").fits


def test_a_cache_without_the_artifact_is_refused() -> None:
    for name in ("vecinfer-2", "million-4", "saw-int4-kmeans"):
        with pytest.raises(ValueError, match="that kvant calibrate fits"):
            PagedCache(make_layout(name), 1)
