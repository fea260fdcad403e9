"""Bits and bytes of recipes at the context and the number of requests that the user will serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvant import recipes
from kvant.layouts import Layouts
from kvant.plan import plan
from kvant.shape import ModelShape

CONTEXT = 8192  # as kvant plan


@dataclasses.dataclass(frozen=True)
class Request:
    """What will be served: requests of `context` tokens, prompt and answer, at the same time."""

    context: int = CONTEXT
    requests: int = 1

    def __post_init__(self) -> None:
        if self.context < 1 or self.requests < 1:
            raise ValueError(
                f"--request-context and --requests must be positive, got {self.context} and {self.requests}"
            )

    def __str__(self) -> str:
        return f"{self.requests:,} request{'s' if self.requests > 1 else ''} of {self.context:,} tokens"


@dataclasses.dataclass(frozen=True)
class Memory:
    """A cache of all requests, on one device."""

    name: str
    bits: float  # per cached number, windows and partly filled pages included
    pages: int  # bytes
    windows: int  # bytes

    @property
    def total(self) -> int:
        return self.pages + self.windows


def served_dtype(shape: ModelShape) -> str:
    """The type that a model is served in: its own if that has 16 bits. Evaluations on a CPU run in float32."""
    return shape.dtype if shape.dtype in ("bfloat16", "float16") else "bfloat16"


def memory_of(names: Iterable[str], shape: ModelShape, request: Request) -> tuple[dict[str, Memory], dict[str, str]]:
    """The memory of recipes by name; and why it could not be counted, where it could not. The 16-bit and 8-bit caches are
    counted too, as `16-bit` and `8-bit`."""
    found: dict[str, Memory] = {}
    missing: dict[str, str] = {}
    n, dtype = request.context, served_dtype(shape)
    base = plan(shape, "full", context=n, dtype=dtype)
    for label, kind, bits in (("16-bit", base.bf16, 16.0), ("8-bit", base.fp8, 8.0)):
        found[label] = Memory(label, bits, request.requests * kind.request_bytes, 0)
    for name in names:
        try:
            recipe = recipes.get(name)
            kind = plan(shape, recipe, context=n, dtype=dtype).recipe
            layouts = Layouts.of(recipe, len(shape.layers), shape.heads, shape.head_dim, dtype=dtype)
            bits = layouts.bits_per_element(n)
        except ValueError as error:  # a recipe of another version, or one that the head_dim does not take
            missing[name] = str(error)
            continue
        windows = request.requests * kind.sequence_bytes
        found[name] = Memory(name, bits, request.requests * kind.request_bytes - windows, windows)
    return found, missing
