"""GPU memory that an operation allocates while it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allocated_by(run: Callable[[], object], device: torch.device) -> int:
    """Peak of the bytes that `run` had allocated on a GPU; 0 on a CPU, where torch does not count."""
    if device.type != "cuda":
        run()
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before
