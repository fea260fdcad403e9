"""Prefill under the name of the CUDA kernels: that of kvant.ops.blocked, which is torch's fused attention over decoded blocks."""

from __future__ import annotations

import torch

from kvant.layout import Layout
from kvant.ops import blocked
from kvant.ops.cuda import plan
from kvant.ops.registry import register


def refuse(layout: Layout, device: torch.device) -> str | None:
    return plan.refuse(layout, device) or blocked.refuse(layout, device)


register("prefill", "cuda", refuse, rank=-1)(blocked.prefill)
