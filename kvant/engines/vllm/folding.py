"""Folds a recipe's value transforms into the weights that vLLM has loaded (kvant/engines/fold.py), where these are plain numbers.

A rank of a tensor-parallel model has whole KV heads and the columns of the output projection that belong to them, so each rank folds
its own. vLLM does not tell an attention layer which module it is part of; torch does, when the layer becomes an attribute of it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from kvant.artifact import Artifact
from kvant.engines import fold
from kvant.recipe import Recipe

Tensor = torch.Tensor
MODELS = "vllm.model_executor.models."
# Attention modules of vLLM that give the outputs of attention to o_proj as they are. Others may gate or normalize them.
LINEAR = (
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)


def note_parent(impl: Any) -> None:
    """Sets `impl.parent` once the attention layer of an implementation becomes an attribute of a module."""

    def hook(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if child is not None and id(getattr(child, "impl", None)) == id(impl):
            impl.parent = weakref.ref(module)
            handle.remove()

    handle = register_module_module_registration_hook(hook)


def refusal(config: Any, layer: Any) -> str | None:
    """Why value transforms cannot be folded into the projections beside an attention layer, or None."""
    if config.lora_config is not None:
        return "LoRA adapters are made for the weights as they were"
    parent = _parent(layer)
    kind = type(parent)
    if not kind.__module__.startswith(MODELS) or kind.__name__ not in LINEAR:
        return f"{kind.__name__} is not known to pass the outputs of attention on to o_proj as they are"
    sizes = {"qkv_proj": (0, layer.num_heads + 2 * layer.num_kv_heads), "o_proj": (1, layer.num_heads)}
    for name, (dim, heads) in sizes.items():
        linear: Any = getattr(parent, name)
        if type(linear.quant_method) is not UnquantizedLinearMethod:
            return f"{name} is quantized ({type(linear.quant_method).__name__})"
        weight = linear.weight
        if weight.ndim != 2 or not weight.is_floating_point() or weight.shape[dim] != heads * layer.head_size:
            return f"vLLM has packed the weights of {name}"
    return None


def _parent(layer: Any) -> Any:
    found = layer.impl.parent
    return None if found is None else found()


@torch.no_grad()
def fold_layer(layer: Any, matrix: Tensor) -> None:
    """Folds a map of values, float64 [KV heads of this rank, head_dim, head_dim], into the projections beside an attention layer."""
    parent = _parent(layer)
    rows = slice(-layer.num_kv_heads * layer.head_size, None)  # queries, keys, values
    bias = parent.qkv_proj.bias
    fold.fold_values(parent.qkv_proj.weight[rows], None if bias is None else bias[rows], matrix)
    fold.fold_output(parent.o_proj.weight, matrix)


def fold_layers(
    config: Any, layers: dict[int, Any], recipe: Recipe, artifact: Artifact | None, total: int, heads: range
) -> str | None:
    """Folds a recipe's value transforms into all of these layers, by their number, or into none: then returns why. `heads` are the KV
    heads of this rank, of `total`."""
    if not recipe.value.transforms:
        return f"recipe {recipe.name} has no value transforms"
    for layer in layers.values():
        reason = refusal(config, layer)
        if reason is not None:
            return reason
    try:
        maps = {i: fold.value_map(recipe, artifact, i, total, layer.head_size) for i, layer in layers.items()}
    except ValueError as error:
        return str(error)
    for i, layer in layers.items():
        fold_layer(layer, maps[i][heads.start : heads.stop])
        layer.impl.folded = True
    return None
