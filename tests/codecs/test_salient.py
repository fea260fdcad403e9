from __future__ import annotations

import pytest
import torch

from kvant.codecs.salient import Salient


def plain(x: torch.Tensor, top: int, dim: int) -> torch.Tensor:
    """Affine rounding of x with one grid along a dim, float16 scale and minimum."""
    low = x.amin(dim, keepdim=True).half().float()
    scale = ((x.amax(dim, keepdim=True) - low) / top).clamp_min(torch.finfo(torch.float16).tiny).half().float()
    return ((x - low) / scale).round().clamp(0, top) * scale + low


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("group", "share"), [(128, 0.4), (16, 0.5), (32, 0.1)])
def test_it_is_mixed_precision_by_token(axis: str, group: int, share: float) -> None:
    codec = Salient(axis, group, share)  # type: ignore[arg-type]
    x = torch.randn(2 * group, 3, 32) * torch.rand(32).exp() + torch.randn(32)
    saliency = torch.rand(2 * group, 3)
    found = codec.decode(codec.encode(x, saliency))
    for g in range(2):
        part = slice(g * group, (g + 1) * group)
        for h in range(3):
            own = x[part, h]
            top = set(saliency[part, h].argsort(descending=True)[: round(share * group)].tolist())
            mask = torch.tensor([t in top for t in range(group)])
            expected = torch.empty_like(own)
            norm = own.abs().amax(0).sqrt().half().float()
            for pick, levels in ((mask, 15), (~mask, 3)):
                if axis == "channel":
                    expected[pick] = plain(own[pick], levels, 0)
                else:
                    expected[pick] = plain(own[pick] / norm, levels, 1) * norm
            torch.testing.assert_close(found[part, h], expected, rtol=0, atol=0)


def test_ties_take_the_first_tokens() -> None:
    codec = Salient("channel", 16, 0.25)
    assert codec.encode(torch.randn(16, 1, 8))["index"][0, 0].tolist() == [0, 1, 2, 3, *[4] * 12]


def test_poisoned_parts_decode_without_a_fault() -> None:
    for axis in ("channel", "token"):
        codec = Salient(axis)  # type: ignore[arg-type]
        parts = {}
        for f in codec.fields(64):
            part = torch.full((128 // f.tokens, 1, f.width), 255, dtype=torch.uint8)
            parts[f.name] = part if f.dtype == "uint8" else part.to(getattr(torch, f.dtype)) * float("nan")
        assert codec.decode(parts).shape == (128, 1, 64)


@pytest.mark.parametrize("share", [0.0, 1.0, 0.001, -1.0])
def test_a_share_leaves_tokens_of_both_kinds(share: float) -> None:
    with pytest.raises(ValueError, match="share must leave tokens of both kinds"):
        Salient(share=share)
