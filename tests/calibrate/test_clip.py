from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant.calibrate.clip import RATIOS, fit_clip, search_errors
from kvant.codecs.affine import Affine
from kvant.stats import LayerStats
from tests.calibrate.synthetic import attend, draw, gather_layer
from tests.conftest import dense_attention


def stats_of(sink: int = 8, recent: int = 16, tokens: int = 96) -> LayerStats:
    q, k, v = draw(tokens, 2, 3, 32)
    return gather_layer([(q, k, v, attend(q, k, v))], tokens, sink=sink, recent=recent)


@pytest.mark.parametrize("stream", ["key", "value"])
def test_errors_are_those_of_the_windows_as_served(stream: str) -> None:
    """Written out query by query: sinks and recent tokens exact, all before coded, the other stream exact."""
    sink, recent = 8, 16
    stats = stats_of(sink, recent)
    probe = stats.probes[0]
    codec = Affine(bits=2, clip=0.9)
    expected = 0.0
    for i, row in enumerate(probe.rows.tolist()):
        if row < sink + recent:
            continue
        k, v = probe.keys[: row + 1].clone(), probe.values[: row + 1].clone()
        coded = slice(sink, row + 1 - recent)
        x = k if stream == "key" else v
        x[coded] = codec.decode(codec.encode(x[coded]))
        q = probe.queries[i : i + 1].flatten(1, 2)
        exact = dense_attention(q, probe.keys[: row + 1], probe.values[: row + 1], stats.scale)
        expected += float((dense_attention(q, k, v, stats.scale) - exact).square().sum())
    (found,) = search_errors([codec], probe, stats, stream)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found > 0


@pytest.mark.parametrize("stream", ["key", "value"])
def test_the_ratio_of_least_error_is_found(stream: str) -> None:
    stats = stats_of()
    part = Affine(bits=2, clip=0.0)
    found = fit_clip(part, stats, stream)["clip"]
    errors = [search_errors([Affine(bits=2, clip=ratio)], stats.probes[0], stats, stream)[0] for ratio in RATIOS]
    assert float(found) == pytest.approx(RATIOS[errors.index(min(errors))])
    assert min(errors) < errors[-1]  # some clipping is better than none for two bits


def test_short_excerpts_and_long_windows() -> None:
    stats = dataclasses.replace(stats_of(tokens=40), sink=64, recent=256)
    assert min(RATIOS) <= float(fit_clip(Affine(bits=2, clip=0.0), stats, "key")["clip"]) <= 1


def test_a_calibrated_clip_is_bound_from_the_artifact() -> None:
    codec = Affine(bits=2, clip=0.0)
    assert codec.calibrated
    assert not Affine(bits=2, clip=0.9).calibrated
    bound = codec.bind(64, {"clip": torch.tensor(0.875)})
    assert bound == Affine(bits=2, clip=0.875)
    x = torch.randn(5, 2, 64)
    for name, part in Affine(bits=2, clip=0.875).encode(x).items():
        assert torch.equal(bound.encode(x)[name], part)
    assert codec.bind(64).fields(64) == Affine(bits=2).fields(64)  # a layout asks for the fields alone
    with pytest.raises(ValueError, match="kvant calibrate"):
        codec.bind(64, {})
