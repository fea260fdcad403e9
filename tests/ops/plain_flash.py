"""Fused attention without a kernel, with the arguments of torch's, vLLM's and cuDNN's."""

from __future__ import annotations

import torch

from kvant.ops import flash


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: flash.Bounds,
    scale: float,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a kernel, sequence by sequence."""
    parts, ends = [], [x.tolist() for x in bounds[:2]]
    assert bounds[2:] == tuple(max(x.diff().tolist()) for x in bounds[:2])
    assert ends[0][-1] == len(q) and ends[1][-1] == len(k) == len(v)
    for b in range(len(ends[0]) - 1):
        rows, tokens = (slice(*x[b : b + 2]) for x in ends)
        parts.append(one_plain(q[rows], k[tokens], v[tokens], scale, causal, softcap, sliding_window))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def one_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert causal or sliding_window is None
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        ahead, ones = k.shape[1] - q.shape[1], torch.ones(scores.shape[1:], dtype=torch.bool)
        hidden = ones.triu(ahead + 1)
        if sliding_window is not None:
            hidden |= ones.tril(ahead - sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def plain_fixed_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As cuDNN's attention, without a kernel: 16-bit outputs, heads before rows in memory."""
    assert not causal or q.shape[1] == k.shape[1]
    parts = [one_plain(*x, scale, causal) for x in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(x).transpose(1, 2).contiguous().transpose(1, 2) for x in zip(*parts, strict=True))
    return out.to(q.dtype), lse
