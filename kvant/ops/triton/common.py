"""What the Triton kernels serve, and the constants that they take from a layout."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from kvant.codecs.affine import Affine
from kvant.layout import Layout, StreamName

BITS = (8, 4, 2)
METAS = {"bfloat16": 0, "float16": 1}


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the Triton kernels cannot serve a layout on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and not interpreted():
        return "it runs on GPUs, or in Triton's interpreter (TRITON_INTERPRET=1)"
    return refuse_layout(layout)


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    for name, stream in layout.recipe.streams.items():
        codec = stream.codec
        if not isinstance(codec, Affine):
            return f"it reads token-wise affine codes, and the {name}s are coded by {type(codec).__name__}"
        if codec.bits not in BITS:
            return f"it reads codes of 8, 4 or 2 bits, and the {name}s have {codec.bits}"
        if codec.groups(layout.head_dim) > 1:
            return f"it reads one scale a token, and the {name}s have {codec.groups(layout.head_dim)}"
        if stream.rope != "post":
            return "it scores keys as they are stored, and they are stored unrotated"
    if layout.recipe.key.window != layout.recipe.value.window:
        return "keys and values have different windows"
    return None


def constants(layout: Layout, name: StreamName) -> dict[str, Any]:
    """A stream's part of a run, in the kernels' words."""
    own = [section for section in layout.sections if section.stream == name]
    (codes,) = (section for section in own if section.kind == "code")
    (meta,) = (section for section in own if section.kind == "meta")
    prefix = name.upper()
    return {
        f"{prefix}_BITS": codes.bits,
        f"{prefix}_OFFSET": codes.offset,
        f"{prefix}_META_OFFSET": meta.offset,
        f"{prefix}_META_TYPE": METAS[meta.dtype],
        f"{prefix}_INTEGER_ZERO": meta.names[1] == "zero",
    }
