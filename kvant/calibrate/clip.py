"""Fitter of the clip ratio of a layer: the ratio with the least squared error of attention outputs on real text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvant.calibrate.exact_attention import causal, softmax_with_sink_logits
from kvant.calibrate.fitting import fits
from kvant.codecs.affine import Affine
from kvant.stats import LayerStats, Probe

Tensor = torch.Tensor
RATIOS = tuple(round(0.80 + 0.02 * step, 2) for step in range(11))


def scores(probe: Probe, keys: Tensor, stats: LayerStats) -> Tensor:
    """S = scale Q K^T of a probe: [heads, queries per head, rows, tokens], -inf where a query does not see a key."""
    out = torch.einsum("qhgd,nhd->hgqn", probe.queries, keys) * stats.scale
    if stats.softcap is not None:
        out = stats.softcap * torch.tanh(out / stats.softcap)
    return out.masked_fill(~causal(len(keys), stats.sliding_window, keys.device)[probe.rows], float("-inf"))


def outputs(weights: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("hgqn,nhd->hgqd", weights, values)


def search_errors(codecs: Sequence[Affine], probe: Probe, stats: LayerStats, stream: str) -> list[float]:
    """Squared error of the attention outputs for each codec. Only `stream` is coded, and only outside the recipe's window;
    the rest is exact. Queries that see no coded token do not count."""
    tokens = len(probe.keys)
    sink = min(stats.sink, tokens // 4)
    recent = min(stats.recent, tokens // 2 - sink)
    late = probe.rows >= sink + recent
    part = probe._replace(queries=probe.queries[late], rows=probe.rows[late])
    at = torch.arange(tokens, device=probe.keys.device)
    coded = (at >= sink) & (at <= part.rows[:, None] - recent)  # [rows, tokens]
    exact = scores(part, part.keys, stats)
    weights = softmax_with_sink_logits(exact, stats.sink_logits)
    out = []
    for codec in codecs:
        if stream == "key":
            rough = scores(part, codec.decode(codec.encode(part.keys)), stats)
            error = outputs(
                softmax_with_sink_logits(torch.where(coded, rough, exact), stats.sink_logits) - weights, part.values
            )
        else:
            error = outputs(weights * coded, codec.decode(codec.encode(part.values)) - part.values)
        out.append(float(error.double().square().sum()))
    return out


@fits(Affine, "probes")
def fit_clip(part: Affine, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    """The ratio with the least error, summed over all probes and heads of the layer."""
    codecs = [dataclasses.replace(part, clip=ratio) for ratio in RATIOS]
    errors = [search_errors(codecs, probe, stats, stream) for probe in stats.probes]
    total = torch.tensor(errors, dtype=torch.float64).sum(0)
    return {"clip": torch.tensor(RATIOS[int(total.argmin())], dtype=torch.float32)}
