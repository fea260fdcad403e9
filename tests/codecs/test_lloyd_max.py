from __future__ import annotations

import math

import pytest
import torch

from kvant.codecs.lloyd_max import LloydMax, lloyd_max_levels

# Max (1960), table I: the levels of a normal variable with unit variance
NORMAL = {
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_in_many_dimensions_the_levels_are_those_of_a_normal_variable(bits: int) -> None:
    levels = torch.tensor(lloyd_max_levels(bits, 1 << 20), dtype=torch.float64) * 1024
    expected = torch.tensor(NORMAL[bits], dtype=torch.float64)
    torch.testing.assert_close(levels[len(levels) // 2 :], expected, rtol=0, atol=6e-4)
    assert torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 255])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_each_level_is_the_mean_of_what_it_stands_for(bits: int, dim: int) -> None:
    """Against the density on a fine grid: Lloyd's condition, in any dimension."""
    levels = torch.tensor(lloyd_max_levels(bits, dim), dtype=torch.float64)
    t = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 1e6 - 1
    density = (1 - t * t) ** ((dim - 3) / 2)
    cell = torch.bucketize(t, (levels[1:] + levels[:-1]) / 2)
    mass = torch.zeros_like(levels).index_add_(0, cell, density)
    mean = torch.zeros_like(levels).index_add_(0, cell, density * t) / mass
    torch.testing.assert_close(levels, mean, rtol=0, atol=2e-6)


def test_levels_are_the_same_on_every_machine() -> None:
    """Computed by sums, products, quotients and roots alone, so these digits are exact."""
    assert lloyd_max_levels(2, 64) == lloyd_max_levels.__wrapped__(2, 64)
    found = [level.hex() for level in lloyd_max_levels(2, 64)[2:]]
    assert found == ["0x1.cef84522a1e68p-5", "0x1.7ffe5922f357dp-3"]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("bits", "error"), [(4, 0.00950), (3, 0.03454), (2, 0.1175), (1, 0.3634)])
def test_error_of_rotated_vectors_is_that_of_the_levels(bits: int, error: float, head_dim: int) -> None:
    """Vectors with random directions, of whatever length, lose the share of their energy that Max's table gives."""
    codec = LloydMax(bits)  # type: ignore[arg-type]
    x = torch.randn(500, 3, head_dim) * torch.logspace(-3, 3, 500)[:, None, None]
    decoded = codec.decode(codec.encode(x))
    relative = ((decoded - x).square().sum(-1) / x.square().sum(-1)).mean()
    assert 0.85 * error < float(relative) < 1.02 * error


def test_codes_are_the_nearest_levels_and_norms_the_vectors_lengths() -> None:
    codec = LloydMax(3)
    x = torch.randn(20, 2, 64)
    parts = codec.encode(x)
    assert torch.equal(parts["norm"], x.double().norm(dim=-1, keepdim=True).half())
    unit = x / parts["norm"].float()
    levels = codec.levels(64)
    distance = (unit[..., None] - levels).abs()
    torch.testing.assert_close(distance.gather(-1, parts["codes"].long()[..., None])[..., 0], distance.amin(-1))


def test_zero_and_huge_vectors() -> None:
    codec = LloydMax(2)
    x = torch.zeros(2, 1, 64)
    x[1] = 1e6
    decoded = codec.decode(codec.encode(x))
    assert not decoded[0].any()
    assert bool(decoded.isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bits must be 4, 3, 2 or 1, got 5"):
        LloydMax(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim must be at least 4, got 2"):
        LloydMax().fields(2)
    assert math.isclose(sum(lloyd_max_levels(4, 128)), 0.0, abs_tol=1e-15)
