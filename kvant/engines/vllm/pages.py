"""Pages of one size, where a model has several kinds of cache.

vLLM takes the blocks of all layers from one pool. Layers with a sliding window, layers without one and layers that are not attention
have block tables of their own, and a block is used by one of them at a time: it has the same bytes for all. Where pages differ, vLLM
pads them, and kvant's kernels read no padded blocks. So the sizes are made equal here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kvant.layout import Layout

SMALLEST_PAGE = 16  # tokens
LARGEST_MIXED = 512  # tokens of a block where some layers are in 16 bits


class Sized(NamedTuple):
    """A layout, and the multiple of tokens that a block of vLLM has in layers with that layout."""

    layout: Layout
    block_tokens: int


def is_raw(layout: Layout) -> bool:
    """Whether a layout stores numbers as they are, without codes."""
    return all(section.kind == "raw" for section in layout.sections)


def padding(layout: Layout) -> float:
    """The share of a page's bytes that hold nothing."""
    return 1 - dataclasses.replace(layout, align=layout.page_tokens).page_head_bytes / layout.page_head_bytes


def same_pages(layouts: Sequence[Layout], windows: Sequence[int | None], block_tokens: int) -> list[Sized]:
    """Layouts whose blocks have the same bytes. Pages of packed layers are padded to the largest of them. Layers in 16 bits that have
    a sliding window get pages of fewer tokens, and blocks of their own size; a block of the others has so many tokens that at least
    16 in 16 bits fit into its bytes."""
    packed = [layout for layout in layouts if not is_raw(layout)]
    if not packed or len({(layout.page_head_bytes, layout.page_tokens) for layout in layouts}) == 1:
        return [Sized(layout, block_tokens) for layout in layouts]
    for layout, window in zip(layouts, windows, strict=True):
        if is_raw(layout) and window is None:
            raise ValueError(
                f"recipe {layout.recipe.name} for some of the layers: in a model with several kinds of cache vLLM's blocks have one "
                "size, so all pages would be as large as those in 16 bits. It can be given to layers with a sliding window alone, as "
                f'{{"kvant": {{"sliding": "{layout.recipe.name}"}}}}'
            )
    size, unit = packed[0].page_tokens, max(layout.page_head_bytes for layout in packed)
    raw = [layout for layout in layouts if is_raw(layout)]
    least = max((_natural(layout, SMALLEST_PAGE).page_head_bytes for layout in raw), default=0)
    block = block_tokens
    while unit * block // size < least:
        block *= 2
    if block > LARGEST_MIXED:
        raise ValueError(
            f"layers in 16 bits beside recipe {packed[0].recipe.name} would need blocks of {block} tokens, more than {LARGEST_MIXED}"
        )
    room, out = unit * block // size, []
    for layout in layouts:
        if not is_raw(layout):
            out.append(Sized(dataclasses.replace(layout, align=unit), block))
            continue
        tokens = next(n for n in (64, 32, 16) if _natural(layout, n).page_head_bytes <= room)
        out.append(Sized(dataclasses.replace(_natural(layout, tokens), align=room), tokens))
    return out


def _natural(layout: Layout, tokens: int) -> Layout:
    return dataclasses.replace(layout, page_tokens=tokens, align=tokens)
