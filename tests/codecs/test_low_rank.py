from __future__ import annotations

import pytest
import torch

from kvant.codecs.channel import Channel
from kvant.codecs.low_rank import LowRank


def data(tokens: int = 256, dim: int = 64) -> torch.Tensor:
    return torch.randn(tokens, 2, dim) * torch.rand(dim).exp() + 3 * torch.randn(dim)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("outliers", [0, 1, 3])
def test_outliers_come_back_as_they_were(axis: str, outliers: int) -> None:
    codec = LowRank(axis, outliers=outliers)  # type: ignore[arg-type]
    x = data().half().float()
    found = codec.decode(codec.encode(x))
    blocks = x.reshape(2, 128, 2, 64)
    error = (found.reshape(2, 128, 2, 64) - blocks).abs()
    along = 1 if axis == "channel" else 3
    order = blocks.argsort(dim=along, stable=True)
    count = blocks.shape[along]
    for i in [*range(outliers), *range(count - outliers, count)]:
        place = order.select(along, i).unsqueeze(along)
        assert float(error.gather(along, place).max()) == 0.0


def test_without_a_rank_to_speak_of_it_is_kivi() -> None:
    """What GEAR-L adds to KIVI's codes is the low-rank part alone."""
    codec, kivi = LowRank("channel", outliers=0), Channel(bits=2, group=32)
    x = data()
    parts, expected = codec.encode(x), kivi.encode(x)
    assert torch.equal(parts["codes"], expected["codes"])
    # [blocks, heads, groups * channels] against [groups, heads, channels]
    scales = parts["scale"].unflatten(-1, (4, 64)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(scales, expected["scale"])
    nothing = {**parts, "right": torch.zeros_like(parts["right"])}
    torch.testing.assert_close(codec.decode(nothing), kivi.decode(expected), rtol=0, atol=0)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_the_factors_are_near_the_best_of_their_rank(axis: str) -> None:
    """Power iteration finds what the SVD of the error finds, where the error has a dominant part."""
    torch.manual_seed(3)
    rest = torch.randn(1, 2, 128, 2) @ torch.randn(1, 2, 2, 64) + 0.05 * torch.randn(1, 2, 128, 64)
    left, right = LowRank(axis)._factors(rest)  # type: ignore[arg-type]
    u, s, v = torch.linalg.svd(rest)
    best = (u[..., :2] * s[..., None, :2]) @ v[..., :2, :]
    torch.testing.assert_close(left @ right, best, rtol=1e-3, atol=1e-3)


def test_each_part_lowers_the_error() -> None:
    torch.manual_seed(5)
    x = data()
    x[torch.rand_like(x) < 0.01] *= 8
    kivi = Channel(bits=2, group=32)
    errors = [float((kivi.decode(kivi.encode(x)) - x).norm())]
    for codec in (LowRank(outliers=0), LowRank(outliers=1), LowRank(outliers=1, rank=8)):
        errors.append(float((codec.decode(codec.encode(x)) - x).norm()))
    assert errors == sorted(errors, reverse=True), errors


def test_poisoned_parts_decode_without_a_fault() -> None:
    for axis in ("channel", "token"):
        codec = LowRank(axis)  # type: ignore[arg-type]
        parts = {}
        for f in codec.fields(64):
            part = torch.full((128 // f.tokens, 1, f.width), 255, dtype=torch.uint8)
            parts[f.name] = part if f.dtype == "uint8" else part.to(getattr(torch, f.dtype)) * float("nan")
        assert codec.decode(parts).shape == (128, 1, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": "row"}, "axis must be"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"group": 48}, "group must divide the block"),
        ({"outliers": 16}, "outliers must leave something"),
        ({"block": 100}, "block must be a power of two"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRank(**changes)  # type: ignore[arg-type]
