from __future__ import annotations

import pytest
import torch

from kvant.calibrate.fitting import fit_layer
from kvant.calibrate.kmeans import LEAST, distinct, fit_product_vq, fit_residual_kmeans, kmeans
from kvant.codecs.codebook import nearest
from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.recipes import get
from tests.fitted import layer_stats


def error(x: torch.Tensor, book: torch.Tensor) -> float:
    return float((x - book[nearest(x[None], book[None])[0]]).square().sum(-1).mean())


def test_one_centroid_is_the_mean() -> None:
    x = torch.randn(1000, 8) + 3
    torch.testing.assert_close(kmeans(x, 1), x.mean(0, keepdim=True))


@pytest.mark.parametrize("dim", [2, 4, 64])
def test_well_separated_clusters_are_found(dim: int) -> None:
    """k-means++ starts in nearly every cluster, and empty centroids find the rest."""
    centres = torch.randn(40, dim) * 100
    x = centres.repeat_interleave(50, 0) + torch.randn(2000, dim) * 0.1
    book = kmeans(x[torch.randperm(2000)], 60)
    assert float((centres[:, None] - book).norm(dim=-1).amin(1).max()) < 1.0


@pytest.mark.parametrize(("dim", "count"), [(2, 256), (4, 256)])
def test_codebooks_of_a_normal_distribution_are_as_good_as_they_can_be(dim: int, count: int) -> None:
    """Against the high-resolution limit (Zador) with the best known lattices' constants: no book of this size does much
    better, and ours is within a few percent of it on the vectors that it was fitted on."""
    x = torch.randn(64 * count, dim)
    zador = {2: 0.0801875, 4: 0.0766}[dim]  # normalized second moments of the hexagonal and the D4 lattice
    volume = 2 * torch.pi * ((dim + 2) / dim) ** ((dim + 2) / 2)
    limit = dim * zador * volume * count ** (-2 / dim)
    assert error(x, kmeans(x, count)) < 1.1 * limit


def test_the_mean_squared_error_never_rises_with_more_iterations() -> None:
    x = torch.randn(3000, 4)
    errors = [error(x, kmeans(x, 64, iterations=i)) for i in (1, 2, 5, 30)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.97 * errors[0]


def test_no_centroid_is_wasted() -> None:
    x = torch.cat((torch.zeros(3000, 4), torch.randn(1000, 4) * 10))[torch.randperm(4000)]
    book = kmeans(x, 256)
    assert len(nearest(x[None], book[None])[0].unique()) == 256


def test_a_shift_of_all_vectors_shifts_the_codebook() -> None:
    x = torch.randn(4000, 4)
    assert error(x + 1000, kmeans(x + 1000, 128)) < 1.05 * error(x, kmeans(x, 128))


def test_distinct_counts_different_vectors() -> None:
    x = torch.randn(500, 8)
    assert distinct(torch.cat((x, x, x[:3]))) == 500
    x[0] = 0.0
    assert distinct(torch.cat((x, -x[:1]))) == 500  # minus zero is zero
    assert distinct(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])) == 2


@pytest.mark.parametrize(("books", "shape"), [("layer", (1, 1)), ("head", (3, 1)), ("space", (3, 16))])
def test_codebooks_fit_the_stream_they_are_for(books: str, shape: tuple[int, int]) -> None:
    keys = torch.randn(3, 300, 64) * 5
    stats = layer_stats(keys, keys * 0.01)
    part = ProductVQ(4, 5, books)  # type: ignore[arg-type]
    for stream, x in (("key", keys), ("value", keys * 0.01)):
        tensors = fit_product_vq(part, stats, stream)
        assert tensors["codebooks"].shape == (*shape, 32, 4)
        codec = part.bind(64, tensors)
        tokens = x.transpose(0, 1)
        relative = (codec.decode(codec.encode(tokens)) - tokens).square().sum() / tokens.square().sum()
        # 1.25 bits an element: no code beats 2^-2.5 = 0.177 but on its own sample; Zador's limit here is 0.287
        assert 0.1 < float(relative) < 0.287


def test_too_few_vectors_are_refused_with_both_numbers() -> None:
    stats = layer_stats(torch.randn(2, 100, 64).repeat(1, 5, 1))  # 100 different tokens
    found, needed = 2 * 100 * 8, LEAST * 2**16
    with pytest.raises(
        ValueError, match=f"d8b16: 65536 centroids need at least {needed} .* the calibration has {found};"
    ):
        fit_product_vq(ProductVQ(8, 16), stats, "key")
    with pytest.raises(ValueError, match=f"256 centroids need at least {LEAST * 256} .* the calibration has 100;"):
        fit_residual_kmeans(ResidualKMeans(256), stats, "key")


def test_centroids_that_16_bits_cannot_hold_are_refused() -> None:
    stats = layer_stats(torch.randn(1, 200, 64) * 1e6)
    with pytest.raises(ValueError, match=r"do not fit torch\.float16"):
        fit_product_vq(ProductVQ(2, 2), stats, "key")
    with pytest.raises(ValueError, match=r"do not fit torch\.float16"):
        fit_residual_kmeans(ResidualKMeans(1), layer_stats(torch.full((1, 9, 64), 1e6)), "key")


@pytest.mark.parametrize("books", ["head", "layer"])
def test_one_centroid_removes_the_mean_of_all_that_was_seen(books: str) -> None:
    """Of all vectors, not only of the sample; to the rounding of 16 bits."""
    mean = torch.randn(3, 1, 64) * 10
    keys = torch.randn(3, 400, 64) + mean
    stats = layer_stats(keys)
    part = ResidualKMeans(1, books)  # type: ignore[arg-type]
    tensors = fit_residual_kmeans(part, stats, "key")
    expected = keys.double().mean(1, keepdim=True)
    expected = expected if books == "head" else expected.mean(0, keepdim=True)
    assert torch.equal(tensors["centroids"], expected.half())
    left = keys.double() - tensors["centroids"].double()
    left = left.mean(1) if books == "head" else left.mean((0, 1))
    assert float(left.abs().max()) <= 2**-11 * float(expected.abs().max())


def test_more_centroids_leave_smaller_residuals() -> None:
    centres = torch.randn(2, 64, 64) * 3
    keys = centres.repeat(1, 40, 1) + torch.randn(2, 2560, 64) * 0.5
    stats = layer_stats(keys)
    errors = []
    for centroids in (1, 16, 256):
        part = ResidualKMeans(centroids)
        codec = part.bind(64, fit_residual_kmeans(part, stats, "key"))
        tokens = keys.transpose(0, 1)
        errors.append(float((codec.decode(codec.encode(tokens)) - tokens).square().mean()))
    assert errors[2] < 0.5 * errors[1] < 0.5 * errors[0]


def test_a_whole_recipe_is_fitted_in_order_each_part_on_what_the_ones_before_leave() -> None:
    keys = torch.randn(2, 700, 64) * torch.logspace(-1, 1.5, 64)
    recipe = get("vecinfer-2:bits=6")
    tensors = fit_layer(recipe, layer_stats(keys))
    assert set(tensors) == {"key.transforms[0].factors", "key.codec.codebooks", "value.codec.codebooks"}
    torch.testing.assert_close(tensors["key.transforms[0].factors"], keys.abs().amax(1).sqrt())
    smoothed = keys / keys.abs().amax(1, keepdim=True).sqrt()
    # a rotation keeps energy, so the centroids have that of the smoothed keys, not of the keys
    energy = float(tensors["key.codec.codebooks"].double().square().mean())
    assert energy < 4 * float(smoothed.square().mean()) < float(keys.square().mean())
