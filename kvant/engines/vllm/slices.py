"""What one rank of a tensor-parallel model needs of an artifact, and the rotary embedding that a config describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvant.rope import Rope, ropes_of

Tensor = torch.Tensor


def own_heads(total: int, world: int, rank: int) -> range:
    """KV heads of a rank: its share, or one that several ranks hold where there are more ranks than heads."""
    if total >= world:
        if total % world:
            raise ValueError(f"{total} KV heads cannot be shared by {world} ranks")
        return range(rank * total // world, (rank + 1) * total // world)
    if world % total:
        raise ValueError(f"{world} ranks cannot share {total} KV heads")
    return range(rank * total // world, rank * total // world + 1)


def own_tensors(tensors: Mapping[str, Tensor], total: int, heads: range) -> dict[str, Tensor]:
    """A layer's calibrated tensors for some of its heads. Tensors are numbers, or have a row for every head, or one for all."""
    out = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or len(tensor) == 1:
            out[name] = tensor
        elif len(tensor) == total:
            out[name] = tensor[heads.start : heads.stop]
        else:
            raise ValueError(
                f"{name} of the artifact has {len(tensor)} rows, expected 1 or one for each of {total} heads"
            )
    return out


def ropes_from(config: Any, layers: int) -> list[Rope]:
    """The rotation of every layer of the transformers model that a config describes, without the model."""
    import sys

    import transformers

    name = getattr(config, "model_type", type(config).__name__)
    made = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if made is None:
        raise ValueError(f"cannot find the rotary embedding of {name}: transformers has no such model")
    module = sys.modules[made.__module__]
    kinds = [kind for key, kind in vars(module).items() if key.endswith("RotaryEmbedding") and "Vision" not in key]
    if len(kinds) != 1:
        raise ValueError(
            f"cannot find the rotary embedding of {name}: its transformers module has {len(kinds)} of them"
        )
    holder = torch.nn.Module()
    with torch.device("cpu"):
        holder.rotary = kinds[0](config)
    holder.config = config  # type: ignore[assignment]
    return ropes_of(holder, layers)
