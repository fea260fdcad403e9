"""Decode attention in Triton: split along the sequence, merged by torch. No host synchronisation."""

from __future__ import annotations

import torch

from kvant.ops import blocked
from kvant.ops.registry import register
from kvant.ops.triton.common import constants, refuse
from kvant.ops.types import LayerStore, PagedBatch

Tensor = torch.Tensor
SPLITS = 8  # parts of a sequence


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _refuse_prefill(layout: object, device: torch.device) -> str | None:
    return refuse(layout, device) or blocked.refuse(layout, device)  # type: ignore[arg-type]


register("prefill", "triton", _refuse_prefill, rank=-1)(blocked.prefill)


@register("decode", "triton", refuse, rank=-1)
def decode(
    store: LayerStore,
    query: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """As the reference's `decode`. A mean that was taken off the keys is made up for where a soft cap would notice."""
    from kvant.ops.triton import kernels

    layout = store.layout
    sequences, query_heads, dim = query.shape
    group = query_heads // layout.heads
    q = query.float().view(sequences, layout.heads, group, dim)
    if softcap is not None and store.key.mean_logit(q) is not None:
        raise ValueError(
            f"recipe {layout.recipe.name} takes a mean off its keys, which the Triton kernel's soft cap misses"
        )
    q = store.key.dual(q).contiguous()
    parts = sequences, layout.heads, SPLITS, group
    out = torch.empty(*parts, dim, dtype=torch.float32, device=query.device)
    m, total = (torch.empty(parts, dtype=torch.float32, device=query.device) for _ in range(2))
    spec = layout.recipe.key.window
    if sequences:
        kernels.decode[(sequences, layout.heads, SPLITS)](
            q,
            store.pages,
            batch.block_table,
            batch.seq_lens,
            batch.overlay_rows,
            batch.sinks,
            batch.ring_start["key"],
            batch.ring_start["value"],
            store.overlays["key"],
            store.overlays["value"],
            out,
            m,
            total,
            scale,
            softcap or 1.0,
            sliding_window or 0,
            batch.block_table.shape[1],
            HEADS=layout.heads,
            GROUP=group,
            ROWS=max(16, _next_power(group)),
            D=dim,
            BLOCK_D=max(16, _next_power(dim)),
            PAGE=layout.page_tokens,
            RUN=layout.page_head_bytes,
            SPLITS=SPLITS,
            SINK=spec.sink,
            RECENT=spec.recent,
            RING=max(1, spec.ring),
            WINDOW_TOKENS=layout.overlay_tokens("key"),
            SOFTCAP=softcap is not None,
            FRAGMENT=layout.order == "fragment",
            **constants(layout, "key"),
            **constants(layout, "value"),
        )
    weights = (m - m.amax(2, keepdim=True)).exp()
    merged = (out * weights[..., None]).sum(2) / (total * weights).sum(2).clamp_min(1e-37)[..., None]
    return store.value.inverse(merged).reshape(sequences, query_heads, dim).to(query.dtype)
