from __future__ import annotations

import torch

from kvant.calibrate.smooth import fit_smooth
from kvant.transforms.smooth import Smooth
from tests.fitted import layer_stats


def test_factors_are_the_square_roots_of_the_channels_maxima() -> None:
    keys, values = torch.randn(3, 200, 64) * torch.logspace(-1, 2, 64), torch.randn(3, 200, 64)
    stats = layer_stats(keys, values)
    for stream, x in (("key", keys), ("value", values)):
        factors = fit_smooth(Smooth(), stats, stream)["factors"]
        torch.testing.assert_close(factors, x.abs().amax(1).sqrt())
        smoothed = Smooth().bind(64, {"factors": factors}).forward(x.transpose(0, 1))
        torch.testing.assert_close(smoothed.abs().amax(0), x.abs().amax(1).sqrt())
    assert torch.equal(fit_smooth(Smooth(power=0.0), stats, "key")["factors"], torch.ones(3, 64))


def test_a_silent_channel_or_head_is_not_blown_up() -> None:
    keys = torch.randn(2, 100, 64)
    keys[0, :, 7] = 0
    keys[1] = 0
    factors = fit_smooth(Smooth(), layer_stats(keys), "key")["factors"]
    assert float(factors[0, 7]) == float((keys[0].abs().max() * 1e-4).double().sqrt().float())
    assert torch.equal(factors[1], torch.ones(64))
