"""Benchmark of generation in transformers: a Qwen3 model with random weights, prompts of random tokens, greedy steps.

Append and decode are first checked against the reference on pages of the same shape, as in their own benchmarks. Every cache is
warmed up: another one like it reads a short prompt and decodes a token untimed.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from kvant.bench import append, attention
from kvant.bench.synthetic import Shape, fill
from kvant.ops import choose
from kvant.recipe import Recipe

Tensor = torch.Tensor
WARM_UP = 256  # tokens of an untimed prompt, at most
CHECKED = (4, 2048)  # most sequences, and tokens of each, that are checked


@dataclasses.dataclass
class Result:
    recipe: str  # or "transformers": its own cache and attention
    implementations: dict[str, str]
    shape: dict[str, Any]
    layers: int
    new_tokens: int
    prefill_seconds: float
    tokens_per_second: float  # of all sequences together, after the prefill
    cache_bytes: int
    error: float = 0.0  # relative error of decode against the reference in float64


def make_model(shape: Shape, layers: int, device: torch.device, vocabulary: int = 32_000) -> Any:
    """A Qwen3 model of this shape; hidden size heads * head_dim, intermediate size 3 times that."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden = shape.heads * shape.head_dim
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 20,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.torch_dtype)
    try:
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def measure(
    model: Any, recipe: Recipe | None, shape: Shape, new_tokens: int, implementation: str | None = None
) -> Result:
    """Times one prefill and `new_tokens` steps; without a recipe, with transformers' own cache."""
    from transformers import DynamicCache

    from kvant.engines.hf import Cache

    if recipe is not None and recipe.calibrated:
        raise ValueError(
            f"recipe {recipe.name} needs calibration, which is not possible on random weights: name one that needs no artifact"
        )
    error = 0.0 if recipe is None else check(recipe, shape, model.device, implementation)
    layers = model.config.num_hidden_layers

    def make() -> Any:
        if recipe is not None:
            return Cache(model, recipe, implementation=implementation)
        model.config._attn_implementation = "sdpa"  # a cache of kvant's may have changed it
        return DynamicCache(config=model.config)

    tokens = torch.randint(0, 32_000, (shape.batch, shape.context), device=model.device)
    with torch.inference_mode():
        spare = make()
        _step(model, _step(model, tokens[:, :WARM_UP], spare), spare)
        del spare
        cache = make()
        start = _now(model.device)
        token = _step(model, tokens, cache)
        read = _now(model.device)
        for _ in range(new_tokens):
            token = _step(model, token, cache)
    end = _now(model.device)
    names: dict[str, str] = {}
    if recipe is None:
        nbytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    else:
        nbytes = cache.nbytes_used
        names = {op: chosen.name for op, chosen in cache.groups[0].paged.ops.items()}
    name = "transformers" if recipe is None else recipe.name
    speed = shape.batch * new_tokens / (end - read)
    return Result(name, names, dataclasses.asdict(shape), layers, new_tokens, read - start, speed, nbytes, error)


def check(recipe: Recipe, shape: Shape, device: torch.device, implementation: str | None) -> float:
    """Checks append and decode on a small part of the work; returns the error of decode."""
    small = dataclasses.replace(shape, batch=min(shape.batch, CHECKED[0]), context=min(shape.context, CHECKED[1]))
    append.check(recipe, small, device, implementation)
    filled = fill(recipe, small, device)
    chosen = choose("decode", filled.cache.layout, device, implementation)
    return attention.checked(filled, attention.queries(small, device), chosen, {"scale": small.head_dim**-0.5})


def _step(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
