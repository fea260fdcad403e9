"""What kernels ask of the GPU they run on."""

from __future__ import annotations

import torch


def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory that a CTA may have, and that a multiprocessor has."""
    found = torch.cuda.get_device_properties(device)
    return found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor  # type: ignore[attr-defined]


def copies_in_bulk(device: torch.device) -> bool:
    """Whether a GPU copies to shared memory in bulk (cp.async.bulk), and starts a kernel before the one before it has ended."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
