"""Describes the streams of a layout for the compiled operations, and says which layouts they cannot serve."""

from __future__ import annotations

import torch

from kvant.codecs import ScaleKind, StreamFormat
from kvant.layout import Layout, StreamName
from kvant.ops.cpu import library, structures
from kvant.ops.cpu.structures import FP8, TYPES, Kind
from kvant.ops.fused import refuse_rope
from kvant.ops.types import LayerStore

Tensor = torch.Tensor
LARGEST_DIM = 256
LEVELS = 16  # entries of the largest table of levels
KINDS = {ScaleKind.MIN: Kind.SCALE_MIN, ScaleKind.ZERO: Kind.SCALE_ZERO, ScaleKind.ALONE: Kind.SCALE_ALONE}


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the compiled operations cannot serve a layout on a device, or None."""
    if device.type != "cpu":
        return f"it runs on CPUs, not on {device.type}"
    return library.missing() or refuse_layout(layout)


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not depend on the machine."""
    if layout.head_dim > LARGEST_DIM or layout.head_dim % 2:
        return f"it takes even head dims up to {LARGEST_DIM}, got {layout.head_dim}"
    for name, form in layout.formats.items():
        book = form.codebook
        if form.is_pq and book is not None and book.dim == 2 and layout.head_dim % 4:
            return f"it takes sub-vectors of 2 channels in pairs, got head dim {layout.head_dim}"
        if form.is_pq or form.is_raw:
            continue
        if layout.order != "lanes":
            return f"it reads pages in the order lanes, and this layout's is {layout.order}"
        if not (form.is_tokenwise or form.is_channelwise or form.is_residual):
            return f"it cannot read the format of the {name}s, that of {form.codec}"
        if not form.uniform and form.encoding.scale != "norm":
            return f"it needs uniform levels, and those of the {name}s are from a table"
        width = form.head_dim // form.scale_groups
        if form.scale_groups > structures.MAX_SPANS or (form.scale_groups > 1 and width % 4):
            return f"it takes groups of a multiple of 4 channels, at most {structures.MAX_SPANS}, got {width}"
    return refuse_rope(layout)


def stream_of(store: LayerStore, name: StreamName) -> tuple[structures.Stream, list[Tensor]]:
    """A stream as the compiled operations read it, without its overlay, and the tensors that the structure points to."""
    layout, window = store.layout, store.stream(name).spec.window
    form, tensors = layout.format(name), store.stream(name).codec.tensors
    out = structures.Stream(sink=window.sink, ring=window.ring, flush=window.flush, recent=window.recent)
    out.first = window.first
    out.overlay_tokens, out.group_tokens = layout.overlay_tokens(name), form.group_tokens
    out.raw_window = int(store.stream(name).spec.raw_window)
    out.window_type = FP8 if layout.is_fp8_window(name) else TYPES[layout.overlay_dtype]
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.float().contiguous())
        return kept[-1].data_ptr()

    _place(out, layout, name, form)
    _scale(out, form)
    if tensors.mean is not None:
        out.mean = keep(tensors.mean)
    if form.is_channelwise:
        out.kind = Kind.BOOSTED if form.boosted else Kind.CHANNEL
        out.boosted = form.boosted
    elif not form.uniform:
        (band,) = form.bands
        levels = torch.tensor(band.levels, dtype=torch.float32)
        out.kind, out.levels = Kind.LEVELS, keep(torch.nn.functional.pad(levels, (0, LEVELS - len(levels))))
    elif form.scales is not None:
        out.kind = KINDS[form.scales.kind]
    elif form.is_raw:
        out.kind, out.meta_type = Kind.RAW, TYPES[form.raw_dtype]
    if form.codebook is not None:
        book = form.codebook
        assert tensors.codebooks is not None
        out.books, out.books_heads = keep(tensors.codebooks), len(tensors.codebooks)
        if form.is_pq:
            out.kind, out.subvector_dim, out.book_bits = Kind.CENTROIDS, book.dim, book.bits
            out.books_subvectors = tensors.codebooks.shape[1]
        else:
            out.centers = book.centroids
    return out, kept


def _place(out: structures.Stream, layout: Layout, name: StreamName, form: StreamFormat) -> None:
    """Sets the offsets of a stream's sections in a page."""
    bands = {band.field: band for band in form.stored_bands}
    indices = form.codebook.field if form.is_pq and form.codebook is not None else ""
    for section in (s for s in layout.sections if s.stream == name):
        field = section.names[0]
        if section.kind in ("code", "raw") or field == indices:
            band = bands.get(field)
            first, step = (0, 1.0) if band is None else (band.first, band.step or 1.0)
            out.section[out.sections] = structures.Section(
                section.offset, section.bits, first, section.width, section.shift, step * (1 << section.shift)
            )
            out.sections += 1
        elif section.kind == "meta":
            out.meta_offset, out.meta_fields, out.meta_type = section.offset, len(section.names), TYPES[section.dtype]
        elif field == "high":
            out.high_offset = section.offset
        elif section.shift:  # the second byte of an index
            out.high_offset, out.index_bits = section.offset, section.shift + section.bits
        else:
            out.index_offset, out.index_bits = section.offset, section.bits


def _scale(out: structures.Stream, form: StreamFormat) -> None:
    """Sets the spans: channels that share a scale and a code width."""
    out.metas, out.spans = form.scale_groups, 0
    if form.scale_groups > 1:
        (band,) = form.bands
        size = form.head_dim // form.scale_groups
        for i in range(form.scale_groups):
            out.span[i] = structures.Span(i * size, (i + 1) * size, i, band.bits, 1.0, 0.0)
        out.spans = form.scale_groups
        return
    for band in form.stored_bands:
        step, lowest = (1.0, 0.0) if band.levels else (band.step, band.lowest)
        out.span[out.spans] = structures.Span(band.first, band.end, 0, band.bits, step, lowest)
        out.spans += 1
    if not form.bands:
        out.span[0], out.spans = structures.Span(0, form.head_dim, 0, 0, 1.0, 0.0), 1
