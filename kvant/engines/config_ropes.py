"""The rotary embedding that a transformers config describes, without the model's weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from kvant.rope import Rope, ropes_of


def ropes_from(config: Any, layers: int) -> list[Rope]:
    """The rotary embedding of every layer of the transformers model that a config describes."""
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
