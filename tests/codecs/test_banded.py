from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.codecs.banded import STEPS, STRETCH, Banded, BoundBanded, normal_levels
from kvant.layout import Layout


def bound(spec: Banded, heads: int = 2, dim: int = 64) -> BoundBanded:
    tensors = {"weights": torch.rand(heads, dim) + 0.2, "mean": torch.randn(heads, dim)}
    codec = spec.bind(dim, tensors)
    assert isinstance(codec, BoundBanded)
    return codec


def test_bits_of_the_recipe_are_counted_with_the_scale() -> None:
    recipe = recipes.get("kvant-2")
    assert Layout.of(recipe, 2, 64).bits_per_element() == (2 * 64 + 16) / 64
    assert Layout.of(recipe, 2, 128).bits_per_element() == (2 * 128 + 16) / 128  # 34 bytes a token
    assert Layout.of(recipe, 2, 128).order == Layout.of(recipe, 2, 64).order == "fragment"
    assert Layout.of(recipe, 2, 64).bits_per_element(32768) <= 2.4
    assert Layout.of(recipe, 2, 128).bits_per_element(32768) <= 2.3


def test_bands_of_the_same_bits_are_one() -> None:
    assert Banded("4/2/0").bands(128) == ((32, 4), (64, 2), (32, 0))
    assert Banded("2/2/2").bands(64) == ((64, 2),)
    assert Banded("4/2/2").bands(64) == ((16, 4), (48, 2))
    assert Banded("3").bands(80) == ((80, 3),)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_the_best_for_normal_numbers(bits: int) -> None:
    """No other uniform step, and no move of a Lloyd-Max level, has a smaller error on a normal density."""
    x = torch.linspace(-6, 6, 48001, dtype=torch.float64)
    density = torch.exp(-x * x / 2)
    density /= density.sum()

    def error(levels: torch.Tensor) -> float:
        return float((density * (x[:, None] - levels).square().amin(1)).sum())

    uniform = torch.tensor(normal_levels(bits, "uniform"), dtype=torch.float64)
    best = error(uniform)
    assert error(uniform * 1.01) > best
    assert error(uniform * 0.99) > best
    lloyd = torch.tensor(normal_levels(bits, "lloyd"), dtype=torch.float64)
    least = error(lloyd)
    assert least <= best + 1e-9
    for i in range(len(lloyd)):
        for step in (-0.01, 0.01):
            moved = lloyd.clone()
            moved[i] += step
            assert error(moved) > least


@pytest.mark.parametrize("levels", ["uniform", "lloyd"])
@pytest.mark.parametrize("bits", ["4/2/0", "3/2/1", "2", "0/4/1"])
def test_codes_are_the_nearest_levels_of_the_best_scale(bits: str, levels: str) -> None:
    spec = Banded(bits, levels=levels, unbiased=False)
    codec = bound(spec)
    x = torch.randn(37, 2, 64) * torch.rand(37, 2, 1) * 5
    parts = codec.encode(x)
    scale = parts["scale"].float()
    found = codec.decode(parts)
    first, widths = 0, spec.bands(64)
    weights = codec.weights
    for i, (width, b) in enumerate(widths):
        band, back = x[..., first : first + width], found[..., first : first + width]
        first += width
        if not b:
            assert not back.any()
            continue
        table = torch.tensor(normal_levels(b, levels))
        nearest = (scale * table[(band[..., None] / scale[..., None] - table).abs().argmin(-1)] - band).abs()
        torch.testing.assert_close((back - band).abs(), nearest, rtol=1e-4, atol=1e-5)
        assert int(parts[f"codes{i}"].max()) < 1 << b
    keep = torch.cat([torch.full((width,), b > 0) for width, b in widths])
    ours = (weights * torch.where(keep, x - found, 0.0).square()).sum(-1)
    for factor in codec.factors:  # every scale that was tried, with its own nearest levels, is no better
        rms = (torch.where(keep, x, 0.0).square().sum(-1, keepdim=True) / keep.sum()).sqrt()
        tried = (rms * factor).to(torch.bfloat16).float()
        error, first = torch.zeros_like(ours), 0
        for width, b in widths:
            band, own = x[..., first : first + width], weights[:, first : first + width]
            first += width
            if b:
                table = torch.tensor(normal_levels(b, levels))
                missed = (band[..., None] - tried[..., None] * table).square().amin(-1)
                error += (own * missed).sum(-1)
        assert bool((ours <= error * (1 + 1e-4) + 1e-6).all())


def test_a_search_of_one_keeps_the_root_mean_square() -> None:
    codec = bound(Banded("2", search=1, unbiased=False))
    x = torch.randn(20, 2, 64) * 3
    expected = x.square().mean(-1, keepdim=True).sqrt().to(torch.bfloat16)
    assert torch.equal(codec.encode(x)["scale"], expected)


def test_an_unbiased_code_keeps_the_products_of_a_token_with_itself() -> None:
    spec = Banded("4/2/0", meta="float16")
    weights = torch.cat((torch.rand(2, 48) + 0.2, torch.rand(2, 16) * 0.3), 1)  # little is read of the last quarter
    codec = spec.bind(64, {"weights": weights})
    x = torch.randn(400, 2, 64)
    found = codec.decode(codec.encode(x))
    with_code = (codec.weights * x * found).sum(-1)
    with_itself = (codec.weights * x * x).sum(-1)
    plain = Banded("4/2/0", meta="float16", unbiased=False).bind(64, {"weights": codec.weights})
    short = (codec.weights * x * plain.decode(plain.encode(x))).sum(-1) / with_itself
    assert float(short.mean()) < 0.9  # the nearest levels, with a quarter of the channels left out, are too short
    inside = 1 / short < STRETCH[1]
    assert float(inside.float().mean()) > 0.9
    torch.testing.assert_close(with_code[inside], with_itself[inside], rtol=2e-3, atol=0)


def test_the_sign_of_the_scale_says_whether_the_mean_was_taken_off() -> None:
    mean = torch.randn(2, 64) * 3
    codec = Banded("2", weighted=False, unbiased=False, flag=True).bind(64, {"mean": mean})
    near_mean, near_zero = mean + 0.3 * torch.randn(30, 2, 64), 0.3 * torch.randn(30, 2, 64)
    parts = codec.encode(torch.cat((near_mean, near_zero)))
    taken = parts["scale"].float()[..., 0] < 0
    assert bool(taken[:30].all())
    assert not bool(taken[30:].any())
    found = codec.decode(parts)
    for part, x in ((found[:30], near_mean), (found[30:], near_zero)):
        assert float((part - x).square().mean()) < 0.25 * 0.09


def test_nothing_is_not_a_number() -> None:
    codec = bound(Banded("4/2/0", flag=True))
    x = torch.zeros(3, 2, 64)
    x[1] = 1e30
    x[2] = 1e-30
    assert torch.isfinite(codec.decode(codec.encode(x))).all()


@pytest.mark.parametrize("bits", ["", "5", "4/2", "0/0/0", "0", "4/2/x", "4/2/0/1", "-1"])
def test_refuses_bits(bits: str) -> None:
    with pytest.raises(ValueError, match="bits must be one width or three"):
        Banded(bits)


def test_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="search must be at least 1"):
        Banded(search=0)
    with pytest.raises(ValueError, match="multiple of 4"):
        Banded().fields(66)
    with pytest.raises(ValueError, match="weights .* got none"):
        Banded().bind(64, {})
    with pytest.raises(ValueError, match="mean .* got"):
        Banded(weighted=False, flag=True).bind(64, {"mean": torch.zeros(2, 32)})
    assert STEPS[4] < STEPS[3] < STEPS[2] < STEPS[1]
