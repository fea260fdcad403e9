"""Queries, keys and values as attention sees them, drawn at random but shaped like a real layer's."""

from __future__ import annotations

import torch

from kvant.calibrate.gatherer import LayerGatherer, Plan
from kvant.engines.hf import ModelShape
from kvant.rope import Rope
from kvant.stats import LayerStats
from tests.conftest import dense_attention


def rope_of(dim: int, base: float = 10000.0) -> Rope:
    return Rope(base ** (-torch.arange(0, dim, 2) / dim))


def draw(tokens: int, heads: int, groups: int, dim: int, rope: Rope | None = None) -> tuple[torch.Tensor, ...]:
    """q [tokens, heads, groups, dim], k and v [tokens, heads, dim], RoPE'd at positions 0 onwards. Keys have a few
    channels with a large mean before RoPE, as real ones do; queries and values live mostly in a few directions."""
    generator = torch.Generator().manual_seed(7)

    def directions(*shape: int) -> torch.Tensor:
        basis = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
        x = torch.randn(*shape, dim) * torch.logspace(0.7, -1, dim)
        return torch.einsum("thgd,hde->thge", x, basis)

    centre = torch.randn(heads, dim, generator=generator)
    centre[:, :: max(1, dim // 8)] *= 6
    q = directions(tokens, heads, groups)
    v = directions(tokens, heads, 1)[:, :, 0]
    k = centre + torch.randn(tokens, heads, dim)
    if rope is not None:
        at = torch.arange(tokens)
        q, k = rope.rotate(q + centre[:, None] * 0.3, at), rope.rotate(k, at)
    return q, k, v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact causal attention of all queries: [tokens, heads, groups, dim]."""
    flat = dense_attention(q.flatten(1, 2), k, v, q.shape[-1] ** -0.5)
    return flat.unflatten(1, q.shape[1:3]).float()


def gather_layer(
    excerpts: list[tuple[torch.Tensor, ...]],
    max_position: int,
    rope: Rope | None = None,
    sink: int = 0,
    recent: int = 0,
    attention_weighted: bool = False,
    block: int = 0,
) -> LayerStats:
    """Statistics of a layer from excerpts of (q, k, v, o)."""
    tokens = sum(len(excerpt[1]) for excerpt in excerpts)
    heads, dim = excerpts[0][1].shape[1:]
    shape = ModelShape((None,), heads, dim, "float32")
    plan = Plan(len(excerpts), tokens, max_position, sink, recent, attention_weighted=attention_weighted, block=block)
    gatherer = LayerGatherer(0, shape, plan, rope, torch.device("cpu"))
    gatherer.scale = dim**-0.5
    for index, excerpt in enumerate(excerpts):
        gatherer.add(index, *excerpt)
    return gatherer.finish()


def layer_stats(tokens: int, heads: int, groups: int, dim: int) -> LayerStats:
    q, k, v = draw(tokens, heads, groups, dim)
    return gather_layer([(q, k, v, attend(q, k, v))], tokens)
