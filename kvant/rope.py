"""Rotary position embedding (RoPE), to rotate keys and queries to other positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of the half-split kind (channel i is paired with i + rotated / 2), as Llama, Qwen, Mistral and Gemma use it.

    inv_freq has one entry per pair; channels past the rotated ones are left alone. `first` is the position of a sequence's
    first token.
    """

    inv_freq: Tensor  # [rotated / 2]
    first: int = 0

    def rotate(self, x: Tensor, positions: Tensor | int) -> Tensor:
        """Rotates vectors by a number of positions (negative unrotates).

        x is [tokens, ..., head_dim]; positions is one number, or one per token. Angles are computed in float64, so that
        rotating forth and back is exact to the type of x even at large positions.
        """
        half = len(self.inv_freq)
        at = torch.as_tensor(positions, dtype=torch.float64, device=x.device).reshape(-1, *[1] * (x.ndim - 1))
        angle = at * self.inv_freq.to(device=x.device, dtype=torch.float64)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def ropes_of(model: torch.nn.Module, layers: int) -> list[Rope]:
    """The rotation of every layer of a transformers model, from its rotary embedding module; refuses what has none."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    modules = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    if not modules:
        raise ValueError(f"cannot find the rotary embedding of {name}")
    module: Any = modules[0]
    kinds = getattr(module.config, "layer_types", None) or ["full_attention"] * layers
    ropes = []
    for kind in kinds:
        rope_type = module.rope_type[kind] if isinstance(module.rope_type, dict) else module.rope_type
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"cannot rotate keys of {name}: its rotary embedding ({rope_type}) changes with the length"
            )
        inv_freq = getattr(module, f"{kind}_inv_freq", None)
        ropes.append(Rope((module.inv_freq if inv_freq is None else inv_freq).detach().float().cpu()))
    return ropes
