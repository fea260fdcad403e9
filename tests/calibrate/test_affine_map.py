"""What the fitters of affine maps find, and what attention reads of a token."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kvant import recipes
from kvant.calibrate import fit_layer
from kvant.calibrate.affine_map import balanced, fit_balance, fit_spectral
from kvant.calibrate.fitting import MAX_SHRINKAGE, SHRINKAGE
from kvant.calibrate.gatherer import UNWEIGHTED, relative, token_weights
from kvant.stats import LayerStats
from kvant.transforms.affine_map import Balance, Spectral
from tests.calibrate.synthetic import attend, draw, gather_layer, layer_stats, rope_of


def moments(heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(heads, 4 * dim, dim, dtype=torch.float64) * torch.logspace(1, -1, dim, dtype=torch.float64)
    q = torch.randn(heads, 4 * dim, dim, dtype=torch.float64)
    q[..., :3] *= 5
    return x.mT @ x / (4 * dim), q.mT @ q / (4 * dim)


@pytest.mark.parametrize("bands", ["quarters", "one"])
@pytest.mark.parametrize("dim", [64, 128])
def test_channels_have_unit_variance_and_within_a_band_errors_cost_alike(dim: int, bands: str) -> None:
    covariance, queries = moments(2, dim)
    part = Balance(bands=bands)
    a = balanced(covariance, queries, part)
    torch.testing.assert_close(
        (a.mT @ covariance @ a).diagonal(dim1=-2, dim2=-1), torch.ones(2, dim, dtype=torch.float64)
    )
    back = torch.linalg.inv(a)
    cost = (back @ queries @ back.mT).diagonal(dim1=-2, dim2=-1)
    means = []
    for band in cost.split(part.widths(dim), -1):
        torch.testing.assert_close(band, band.mean(-1, keepdim=True).expand_as(band))
        means.append(band.mean(-1))
    for more, less in itertools.pairwise(means):
        assert bool((more > less).all())


def test_without_the_hadamard_keys_are_white_and_queries_sorted() -> None:
    covariance, queries = moments(3, 64)
    a = balanced(covariance, queries, Balance(hadamard=False))
    torch.testing.assert_close(a.mT @ covariance @ a, torch.eye(64, dtype=torch.float64).expand(3, 64, 64))
    back = torch.linalg.inv(a)
    found = back @ queries @ back.mT
    spread = found.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, torch.diag_embed(spread))
    assert bool((spread.diff(dim=-1) <= 0).all())


def test_silent_directions_are_not_blown_up() -> None:
    covariance, queries = moments(1, 64)
    covariance[:, :, 5], covariance[:, 5, :] = 0.0, 0.0
    a = balanced(covariance, queries, Balance())
    assert torch.isfinite(a).all()
    assert float(torch.linalg.cond(a).max()) < 1e6


def test_spectral_halves_the_spread_of_values() -> None:
    stats = layer_stats(300, 2, 2, 64)
    part = Spectral(share=0.0)
    a = fit_spectral(part, stats, "value")["matrix"].double()
    moments = stats.values
    covariance = moments.second - moments.mean[:, :, None] * moments.mean[:, None, :]
    before = torch.linalg.eigvalsh(covariance)
    after = torch.linalg.eigvalsh(a.mT @ covariance @ a)
    torch.testing.assert_close(after, before.sqrt(), rtol=1e-3, atol=1e-6)


def test_balance_is_for_keys() -> None:
    with pytest.raises(ValueError, match="use Spectral"):
        fit_balance(Balance(share=0.0), layer_stats(100, 2, 2, 64), "value")


@pytest.mark.parametrize(("sliding_window", "softcap", "recent"), [(None, None, 0), (40, None, 8), (None, 5.0, 16)])
def test_what_is_read_is_the_sum_over_queries(sliding_window: int | None, softcap: float | None, recent: int) -> None:
    tokens, heads, groups, dim = 90, 2, 3, 16
    q, k, v = draw(tokens, heads, groups, dim)
    o = torch.zeros(tokens, heads, groups, dim)
    keys, values = torch.zeros(tokens, heads), torch.zeros(tokens, heads)
    for i in range(tokens):
        for h in range(heads):
            for g in range(groups):
                first = 0 if sliding_window is None else max(0, i - sliding_window + 1)
                logits = (k[first : i + 1, h] @ q[i, h, g]) * 0.3
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                p = logits.softmax(0)
                o[i, h, g] = p @ v[first : i + 1, h]
                for t in range(max(first, UNWEIGHTED), i - recent + 1):
                    keys[t, h] += p[t - first] ** 2 * (v[t, h] - o[i, h, g]).square().sum()
                    values[t, h] += p[t - first] ** 2
    found = token_weights(q, k, v, o, 0.3, sliding_window, softcap, recent)
    torch.testing.assert_close(found.keys, keys, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.values, values, rtol=1e-3, atol=1e-5)


def test_weights_are_capped_at_a_hundred_times_the_mean() -> None:
    read = torch.ones(1000, 1)
    read[3] = 1e9
    assert float(relative(read).max()) == 100.0
    assert float(relative(torch.zeros(5, 1)).max()) == 0.0


def test_keys_are_measured_within_their_block_and_queries_everywhere() -> None:
    """Keys that are alike before RoPE look alike in a block too short for RoPE to rotate them, and do not over all positions."""
    rope = rope_of(64)
    q, k, v = draw(256, 2, 2, 64)
    k = rope.rotate(torch.randn(2, 64).expand(256, 2, 64) * 3, torch.arange(256))
    excerpts = [(q, k, v, attend(q, k, v))]
    near = gather_layer(excerpts, 8192, rope, block=1)
    wide = gather_layer(excerpts, 8192, rope)

    def spread(stats: LayerStats) -> float:
        return float((stats.keys.second - stats.keys.mean[:, :, None] * stats.keys.mean[:, None, :]).norm())

    assert spread(near) < 1e-3 * spread(wide)
    torch.testing.assert_close(near.queries.second, wide.queries.second)


def test_every_tensor_is_fitted_on_what_the_parts_before_it_leave() -> None:
    recipe = recipes.get("kvant-2:rope=post")
    rope = rope_of(64)
    q, k, v = draw(256, 2, 2, 64, rope)
    stats = gather_layer([(q, k, v, attend(q, k, v))], 4096, rope, 4, 64, attention_weighted=True)
    tensors = fit_layer(recipe, stats)
    a = tensors["key.transforms[0].matrix"].double()
    back = torch.linalg.inv(a)
    queries = stats.queries.shrunk(MAX_SHRINKAGE)  # of 252 tokens little is known
    cost = (back @ queries.second @ back.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(
        tensors["key.codec.weights"].double(), cost / cost.mean(-1, keepdim=True), rtol=1e-3, atol=0
    )
    values = stats.weighted_moments("value", 0.5).mean[:, None, :] @ tensors["value.transforms[0].matrix"].double()
    torch.testing.assert_close(tensors["value.codec.mean"].double(), values[:, 0], rtol=1e-3, atol=1e-4)
    plain = dataclasses.replace(recipe, key=dataclasses.replace(recipe.key, transforms=(Balance(mean=False),)))
    assert not fit_layer(plain, stats)["key.transforms[0].offset"].any()


def test_queries_are_shrunk_by_how_little_is_known_of_them() -> None:
    """By 2 head_dim / tokens of the mean second moment of a channel, and no more than a tenth: directions that hardly any query
    asks for get a part of it, the eigenvectors stay."""
    recipe = recipes.get("kvant-2:rope=post")
    q, k, v = draw(4096, 1, 2, 16)
    stats = gather_layer([(q, k, v, attend(q, k, v))], 4096, None, 4, 64, attention_weighted=True)
    amount = SHRINKAGE * 16 / stats.keys.count
    assert 0.005 < amount < MAX_SHRINKAGE
    shrunk = stats.queries.shrunk(amount)
    old, new = (torch.linalg.eigh(each.second[0]) for each in (stats.queries, shrunk))
    torch.testing.assert_close(new.eigenvalues, old.eigenvalues + amount * old.eigenvalues.mean())
    torch.testing.assert_close((new.eigenvectors.mT @ old.eigenvectors).abs(), torch.eye(16, dtype=torch.float64))
    fitted = fit_layer(recipe, stats)["key.transforms[0].matrix"]
    by_hand = balanced(stats.weighted_moments("key", 0.3).covariance, shrunk.second, Balance())
    torch.testing.assert_close(fitted, by_hand.float())
    without = balanced(stats.weighted_moments("key", 0.3).covariance, stats.queries.second, Balance())
    assert not torch.allclose(fitted, without.float())
