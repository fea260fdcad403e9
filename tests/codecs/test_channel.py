from __future__ import annotations

import pytest
import torch

from kvant.codecs.channel import Channel


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [2, 32, 128])
def test_every_channel_of_a_group_is_rounded_to_its_own_grid(bits: int, group: int) -> None:
    codec = Channel(bits=bits, group=group)
    x = torch.randn(3 * group, 2, 48) * torch.logspace(-2, 2, 48) + torch.randn(48)
    parts = codec.encode(x)
    assert parts["codes"].dtype == torch.uint8
    assert parts["scale"].shape == parts["min"].shape == (3, 2, 48)
    found = codec.decode(parts)
    for g in range(3):
        for h in range(2):
            for c in range(48):
                own = x[g * group : (g + 1) * group, h, c]
                scale, low = float(parts["scale"][g, h, c]), float(parts["min"][g, h, c])
                # float16 rounds the minimum by 2^-11 of itself and the scale by 2^-11 of the range
                assert low == pytest.approx(float(own.min()), rel=2**-10)
                slack = 2**-10 * (abs(low) + float(own.max() - own.min()))
                error = (found[g * group : (g + 1) * group, h, c] - own).abs().max()
                assert float(error) <= scale / 2 + slack


def test_groups_do_not_see_each_other() -> None:
    codec = Channel(bits=2, group=32)
    x = torch.randn(96, 3, 64)
    whole = codec.encode(x)
    for g in range(3):
        alone = codec.encode(x[32 * g : 32 * (g + 1)])
        assert torch.equal(alone["codes"], whole["codes"][32 * g : 32 * (g + 1)])
        for name in ("scale", "min"):
            assert torch.equal(alone[name], whole[name][g : g + 1])


@pytest.mark.parametrize(("value", "error"), [(0.0, 0.0), (-3.25, 0.0), (1e-7, 2e-7), (7e4, 5e3), (-7e4, 5e3)])
def test_constant_channels_and_those_past_float16_stay_finite(value: float, error: float) -> None:
    x = torch.full((32, 1, 16), value)
    found = Channel(bits=2, group=32).decode(Channel(bits=2, group=32).encode(x))
    torch.testing.assert_close(found, x, rtol=0, atol=error)


@pytest.mark.parametrize("group", [0, 1, 24, 256])
def test_groups_that_fill_no_page_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group must be a power of two from 2 to 128 tokens, got {group}"):
        Channel(group=group)
