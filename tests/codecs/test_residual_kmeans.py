from __future__ import annotations

import pytest
import torch

from kvant.codecs.affine import Affine
from kvant.codecs.residual_kmeans import BoundResidualKMeans, ResidualKMeans
from kvant.layout import Layout
from kvant.recipe import Recipe, Stream


def bound(spec: ResidualKMeans, head_dim: int, heads: int, spread: float = 3.0) -> BoundResidualKMeans:
    own = heads if spec.books == "head" else 1
    codec = spec.bind(head_dim, {"centroids": (torch.randn(own, spec.centroids, head_dim) * spread).half()})
    assert isinstance(codec, BoundResidualKMeans)
    return codec


@pytest.mark.parametrize("books", ["head", "layer"])
@pytest.mark.parametrize("centroids", [1, 16, 256, 300, 2048])
def test_equations_5_and_6(books: str, centroids: int) -> None:
    """id = argmin |x - c|^2; x - c is stored as token-wise INT4; x comes back as the centroid plus the residual."""
    codec = bound(ResidualKMeans(centroids, books), 64, 3)  # type: ignore[arg-type]
    x = torch.randn(33, 3, 64) * 2
    parts = codec.encode(x)
    book = codec.book.float().expand(3, centroids, 64)
    distance = (x.double()[:, :, None] - book.double()).square().sum(-1)  # [tokens, heads, centroids]
    index = distance.argmin(-1)
    if centroids == 1:
        assert set(parts) == {"codes", "scale", "zero"}
    else:
        assert torch.equal(parts["index"][..., 0].long(), index)
    centroid = book[torch.arange(3), index]
    plain = Affine(bits=4, zero="integer")
    rest = plain.encode(x - centroid)
    assert all(torch.equal(parts[name], rest[name]) for name in rest)
    assert torch.equal(codec.decode(parts), plain.decode(rest) + centroid)


def test_near_its_centroid_a_vector_costs_next_to_nothing() -> None:
    codec = bound(ResidualKMeans(256), 128, 2, spread=50.0)
    index = torch.randint(0, 256, (40, 2))
    x = codec.book.float()[torch.arange(2), index] + torch.randn(40, 2, 128) * 0.01
    assert torch.equal(codec.encode(x)["index"][..., 0].long(), index)
    assert float((codec.decode(codec.encode(x)) - x).abs().max()) < 0.01
    plain = Affine(bits=4, zero="integer")
    assert float((plain.decode(plain.encode(x)) - x).abs().max()) > 1.0


@pytest.mark.parametrize(("centroids", "extra"), [(1, 0), (16, 8), (256, 8), (257, 16), (2048, 16)])
def test_the_index_is_counted(centroids: int, extra: int) -> None:
    def bits(codec: object) -> float:
        stream = Stream(codec)  # type: ignore[arg-type]
        return Layout.of(Recipe("x", stream, stream), 2, 128).bits_per_element()

    assert bits(ResidualKMeans(centroids)) == bits(Affine(bits=4)) + extra / 128
    assert ResidualKMeans(centroids).codebook_bytes(128, 8) == 8 * centroids * 128 * 2
    assert ResidualKMeans(centroids, "layer").codebook_bytes(128, 8) == centroids * 128 * 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("centroids", [1, 16, 256, 2048])
def test_round_trip_through_a_page(head_dim: int, centroids: int) -> None:
    stream = Stream(ResidualKMeans(centroids))
    layout = Layout.of(Recipe("x", stream, stream), 2, head_dim)
    codec = bound(ResidualKMeans(centroids), head_dim, 2)
    parts = codec.encode(torch.randn(64, 2, head_dim) * 3)
    pages = torch.full((1, 2, layout.page_head_bytes), 0xFF, dtype=torch.uint8)
    data, places = layout.pack_tokens("value", parts, torch.arange(64))
    for token in range(50):  # the rest of the page stays as it was
        pages[0][:, places[token]] = data[token]
    found = layout.unpack("value", pages)
    assert all(torch.equal(found[name][:50], parts[name][:50]) for name in parts)
    assert torch.equal(codec.decode(found)[:50], codec.decode(parts)[:50])


def test_what_does_not_fit_is_refused() -> None:
    for fields, message in (
        ({"centroids": 0}, "centroids must be between 1 and 65536, got 0"),
        ({"books": "space"}, "books must be layer or head, got 'space'"),
        ({"bits": 5}, "bits must be 8, 4, 3 or 2, got 5"),
        ({"group": -1}, "group must be a number of channels"),
    ):
        with pytest.raises(ValueError, match=message):
            ResidualKMeans(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the centroids that kvant calibrate fits"):
        ResidualKMeans().bind(64, {})
    for wrong in (torch.zeros(2, 16, 64), torch.zeros(2, 256, 32), torch.zeros(256, 64)):
        with pytest.raises(ValueError, match=r"centroids must be \[heads, 256, 64\]"):
            ResidualKMeans().bind(64, {"centroids": wrong.half()})
    with pytest.raises(ValueError, match=r"centroids must be \[1, 256, 64\], got \[2, 256, 64\]"):
        ResidualKMeans(books="layer").bind(64, {"centroids": torch.zeros(2, 256, 64).half()})
