from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.codecs import codebook
from kvant.codecs.codebook import nearest


def true_nearest(x: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Distances written out, in float64: [n, d] and [count, d] -> [n]."""
    distance = (x.double()[:, None] - book.double()).square().sum(-1)
    return distance.argmin(-1)


@given(st.integers(0, 70), st.sampled_from([1, 2, 7, 256, 1024, 2048, 4096]), st.integers(1, 9), st.integers(0, 2**31))
def test_the_index_is_that_of_the_true_nearest(n: int, count: int, dim: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n, dim, generator=random) * 3 + 1
    books = torch.randn(3, count, dim, generator=random).half()
    found = nearest(x, books)
    for each, book, index in zip(x, books, found, strict=True):
        assert torch.equal(index, true_nearest(each, book))


@pytest.mark.parametrize("count", [64, 4096])
def test_the_lowest_of_equally_near_centroids_is_taken(count: int) -> None:
    book = torch.randn(1, count // 4, 4).half().repeat(1, 4, 1)
    assert int(nearest(torch.randn(1, 500, 4), book).max()) < count // 4
    assert nearest(torch.zeros(1, 3, 2), torch.tensor([[[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]])).tolist() == [[0, 0, 0]]


def test_a_vector_has_the_same_index_whatever_it_is_batched_with() -> None:
    x, book = torch.randn(1, 2000, 8) * 100, (torch.randn(1, 4096, 8) * 100).half()
    whole = nearest(x, book)
    alone = torch.cat([nearest(x[:, i : i + 1], book) for i in range(0, 2000, 37)], 1)
    assert torch.equal(whole[:, ::37], alone)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many vectors there are, never more scores at a time than a few MiB."""
    sizes = []
    product = torch.bmm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = product(a, b)
        sizes.append(out.nbytes)
        return out

    monkeypatch.setattr(torch, "bmm", counted)
    nearest(torch.randn(1, 50_000, 2), torch.randn(1, 256, 2))
    nearest(torch.randn(6, 1000, 4), torch.randn(6, 4096, 4))
    assert max(sizes) <= 8 * codebook.SCORES["cpu"] == 4 << 20
