"""Triton versions of decode and append for token-wise codes: for GPUs that the CUDA kernels do not serve, and for machines without
one, in Triton's interpreter (TRITON_INTERPRET=1), where they are tested. They are taken by name only, since
nobody has measured them on a GPU yet. Triton itself is imported when a kernel is first run."""

from kvant.ops.triton import append, decode

__all__ = ["append", "decode"]
