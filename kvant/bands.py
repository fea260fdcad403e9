"""Bands of channels: a transform sorts channels by importance into bands, and a codec gives each band its code width."""

from __future__ import annotations


def quarters(dim: int) -> tuple[int, int, int]:
    """Channels of the three bands of a head: a quarter, a half, a quarter."""
    if dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4 to be cut into bands, got {dim}")
    return dim // 4, dim // 2, dim // 4
