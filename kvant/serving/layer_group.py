"""Layers that a server serves alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvant.layout import Layout, StreamName
from kvant.ops import Implementation, LayerStore
from kvant.ops.registry import Op
from kvant.ops.types import empty_overlay
from kvant.serving.overlay import without_windows

Tensor = torch.Tensor


@dataclasses.dataclass
class LayerGroup:
    """Layers of a server with the same recipe and layout: their stores, overlays and operations."""

    layout: Layout
    names: list[str]
    stores: list[LayerStore]
    pages_only: list[LayerStore]  # the same pages, without overlays
    overlays: dict[StreamName, Tensor]  # [layers, rows + 1, tokens, heads, head_dim]
    ops: dict[Op, Implementation]
    drafts: int  # tokens that a step may write and the next one take back
    workspace: int = 0  # bytes that operations allocate while they run
    counters: Tensor | None = None  # zeros that the decode kernels of all graphs share: graphs run one after another

    def decode(self, *args: Any, **options: Any) -> Tensor:
        """The operation decode."""
        if self.counters is None:
            return self.ops["decode"].run(*args, **options)
        from kvant.ops.cuda.counters import sharing_counters

        with sharing_counters(self.counters):
            return self.ops["decode"].run(*args, **options)

    @property
    def has_overlay(self) -> bool:
        """Whether any token is kept in full precision."""
        return any(overlay.shape[2] for overlay in self.overlays.values())

    @property
    def ring(self) -> bool:
        """Whether recent tokens are."""
        return any(stream.window.ring for stream in self.layout.recipe.streams.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and head in a page."""
        assert self.layout.page_head_bytes % self.layout.page_tokens == 0
        return self.layout.page_head_bytes // self.layout.page_tokens


def layered_overlay(layout: Layout, name: StreamName, layers: int, rows: int, device: torch.device) -> Tensor:
    one = empty_overlay(layout, name, 1, device)
    return one.new_zeros(layers, rows, *one.shape[1:])


def pages_only(store: LayerStore) -> LayerStore:
    recipe = without_windows(store.layout.recipe)
    layout = dataclasses.replace(store.layout, recipe=recipe)
    assert layout.sections == store.layout.sections
    return LayerStore(
        layout,
        dataclasses.replace(store.key, spec=recipe.key),
        dataclasses.replace(store.value, spec=recipe.value),
        store.pages,
        {name: empty_overlay(layout, name, 1, store.pages.device) for name in recipe.streams},
        {},
    )
