"""Capacity planning: bytes of a cache, computed from a model's config and a recipe alone.

The answer is what a `kvant.Cache(model, recipe, max_tokens=context, max_sequences=requests)` allocates, to the byte. It is of one
device; with tensor parallelism every device holds its share of the KV heads. Weights and activations are not in it. A server with
prefix caching also keeps the sinks of first pages in full precision while the pages are cached, in layers without a sliding window:
`sink_rows` of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from kvant import recipes
from kvant.layout import Order
from kvant.layouts import Layouts
from kvant.recipe import Recipe
from kvant.shape import ModelShape

UNITS = {"B": 1} | {
    f"{letter}{kind}": base ** (i + 1)
    for i, letter in enumerate("KMGT")
    for kind, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


SINK_SHARE = 32  # sink rows take one part in so many of the memory for pages ...
SINK_ROWS = 16, 4096  # ... but at least and at most so many
SPARE_ROWS = 4  # overlay rows of a server beyond one for each sequence, by default


def sink_rows(memory: int, page_bytes: int, sink_bytes: int) -> int:
    """Sink rows that a server allocates by default beside `memory` bytes of pages; never more than pages."""
    if not sink_bytes:
        return 0
    least, most = SINK_ROWS
    return min(memory // page_bytes, max(least, min(most, memory // (SINK_SHARE * sink_bytes))))


def _full(layers: int, heads: int, head_dim: int) -> ModelShape:
    return ModelShape((None,) * layers, heads, head_dim, "bfloat16")


PRESETS: Mapping[str, ModelShape] = {  # layers, KV heads, head dim, as in the models' published configs
    "qwen3-4b": _full(36, 8, 128),
    "qwen3-8b": _full(36, 8, 128),
    "qwen3-32b": _full(64, 8, 128),
    "llama-3.1-8b": _full(32, 8, 128),
    "llama-3.1-70b": _full(80, 8, 128),
    "mistral-7b": _full(32, 8, 128),  # version 0.3; the first had a sliding window
    "smollm2-135m": _full(30, 3, 64),
}


def parse_bytes(text: str | int) -> int:
    """ "80GiB" -> 85899345920. A bare letter is binary: 80G = 80GiB; 80GB = 80 * 10^9. A text needs a unit, an int is bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is not None and not match[2]:
        raise ValueError(f"memory needs a unit, got {text!r}: {match[1]}GiB? {match[1]}B is bytes")
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"memory must be a number of bytes such as 80GiB or 512MiB, got {text!r}")
    return int(float(match[1]) * unit)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What one kind of cache holds in the given memory of one device."""

    recipe: str
    bits: float  # per cached number, of a full page
    bytes_per_token: float  # of all layers, without overlay rows
    sequence_bytes: int  # overlay rows and corrector states of one sequence
    request_bytes: int  # of one request of `context` tokens
    tokens: int  # longest sequence that fits alone
    requests: int  # of `context` tokens that fit together
    allocated: int  # bytes of these
    sink_bytes: int = (
        0  # of a sink row: a first page's full-precision sinks in a server, in layers without a sliding window
    )
    sink_rows: int = 0  # that a server allocates beside `memory` bytes of pages


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe compared with a 16-bit and an 8-bit cache."""

    model: str
    memory: int
    context: int
    tensor_parallel: int
    kv_heads: int  # on one device
    recipe: Kind
    bf16: Kind
    fp8: Kind

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan(
    model: Any,
    recipe: str | Recipe = recipes.DEFAULT,
    memory: str | int = "80GiB",
    context: int = 8192,
    *,
    tensor_parallel: int = 1,
    dtype: str | None = None,
    page_tokens: int | None = None,
    order: Order | None = None,
) -> Plan:
    """What fits into `memory` bytes of each device.

    model            a name of PRESETS, a ModelShape, or a transformers model or config.
    context          tokens of a request, prompt and answer.
    tensor_parallel  devices that share the KV heads; where there are more devices than heads, each holds one.
    dtype            of the model (default: that of its config), which is also the dtype of overlays.

    >>> import kvant
    >>> plan = kvant.plan("qwen3-8b", "kvant-2", memory="24GiB", context=32768)
    >>> f"{plan.recipe.requests} requests in {plan.recipe.bits:.2f} bits, {plan.bf16.requests} in bf16"
    '38 requests in 2.12 bits, 5 in bf16'
    """
    shape, name = _named_shape(model)
    recipe = recipes.get(recipe)
    memory = parse_bytes(memory)
    for label, value in (("context", context), ("tensor_parallel", tensor_parallel)):
        if value < 1:
            raise ValueError(f"{label} must be positive, got {value}")
    if shape.heads % tensor_parallel and tensor_parallel % shape.heads:
        raise ValueError(
            f"tensor_parallel must divide the {shape.heads} KV heads or be a multiple of them, got {tensor_parallel}"
        )
    heads = max(1, shape.heads // tensor_parallel)
    layers = len(shape.layers)
    options: dict[str, Any] = {"page_tokens": page_tokens, "order": order, "dtype": dtype or shape.dtype}
    layouts = Layouts.of(recipe, layers, heads, shape.head_dim, **options)
    half = Layouts.of(recipes.get("full"), layers, heads, shape.head_dim, page_tokens=page_tokens, dtype="bfloat16")
    quarter = dataclasses.replace(_kind("full", half, memory, context, 2), recipe="fp8")
    # a sliding window leaves the first page, and its sinks with it
    sinks = sum(one.sink_bytes for one, window in zip(layouts.layers, shape.layers, strict=True) if window is None)
    return Plan(
        name,
        memory,
        context,
        tensor_parallel,
        heads,
        _kind(recipe.name, layouts, memory, context, sink_bytes=sinks),
        dataclasses.replace(_kind("full", half, memory, context), recipe="bf16"),
        quarter,
    )


def _kind(name: str, layouts: Layouts, memory: int, context: int, smaller: int = 1, sink_bytes: int = 0) -> Kind:
    """`smaller` divides the bytes of a page: half of a 16-bit page is an 8-bit one. `sink_bytes`: of a sink row."""
    page, windows, layout = layouts.page_bytes // smaller, layouts.overlay_bytes, layouts.first
    request = windows + max(1, layout.pages_for(context)) * page
    left = (memory - windows) // page  # pages of the longest sequence
    tokens = 0
    if left > 0:
        tokens = layout.recipe.origin + left * layout.page_tokens
    requests = memory // request
    return Kind(
        recipe=name,
        bits=layouts.bits_per_element() / smaller,
        bytes_per_token=page / layout.page_tokens,
        sequence_bytes=windows,
        request_bytes=request,
        tokens=tokens,
        requests=requests,
        allocated=requests * request,
        sink_bytes=sink_bytes,
        sink_rows=sink_rows(memory, page, sink_bytes),
    )


def shape_of(model: Any) -> ModelShape:
    """The shape of a name of PRESETS, or of a transformers model or config."""
    return _named_shape(model)[0]


def _named_shape(model: Any) -> tuple[ModelShape, str]:
    if isinstance(model, ModelShape):
        return model, "given"
    if isinstance(model, str):
        if model.lower() not in PRESETS:
            raise ValueError(
                f"unknown preset {model!r}; known: {', '.join(PRESETS)}; or give a transformers model or config"
            )
        return PRESETS[model.lower()], model.lower()
    config = getattr(model, "config", model)
    return ModelShape.of(model, hybrid=True).packed, str(getattr(config, "model_type", "given"))
