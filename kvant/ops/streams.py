"""The stream that kernels are queued on."""

from __future__ import annotations

import torch


def stream_handle(device: torch.device) -> int:
    """The driver's handle of the current stream of a device; 0 on a CPU. Every launch asks for it: torch's getter of the bare handle
    makes no object, where this torch has it."""
    if device.type != "cuda":
        return 0
    if device.index is not None and hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return int(torch._C._cuda_getCurrentRawStream(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)
