"""What the compiled operations have to know of a layout, and which layouts they cannot serve."""

from __future__ import annotations

import torch

from kvant.codecs.affine import Affine
from kvant.codecs.banded import STEPS, Banded
from kvant.codecs.boosted import Boosted
from kvant.codecs.channel import Channel
from kvant.codecs.lloyd_max import LloydMax
from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.raw import Raw
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.layout import Layout, StreamName
from kvant.ops.cpu import library, structures
from kvant.ops.cpu.structures import (
    BOOSTED,
    CENTROIDS,
    CHANNEL,
    LEVELS,
    PLAIN,
    SCALE_ALONE,
    SCALE_MIN,
    SCALE_ZERO,
    TYPES,
)
from kvant.ops.fused import refuse_rope
from kvant.ops.types import LayerStore

Tensor = torch.Tensor
LARGEST_DIM = 256


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the compiled operations cannot serve a layout on a device, or None."""
    if device.type != "cpu":
        return f"it runs on CPUs, not on {device.type}"
    return library.missing() or refuse_layout(layout)


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    if layout.head_dim > LARGEST_DIM or layout.head_dim % 2:
        return f"it takes even head dims up to {LARGEST_DIM}, got {layout.head_dim}"
    for name, stream in layout.recipe.streams.items():
        codec = stream.codec
        if isinstance(codec, ProductVQ) and codec.dim == 2 and layout.head_dim % 4:
            return f"it takes sub-vectors of 2 channels in pairs, got head dim {layout.head_dim}"
        if isinstance(codec, ProductVQ | Raw):
            continue
        if layout.order != "lanes":
            return f"it reads pages in the order of lanes, and this one's is {layout.order}"
        if isinstance(codec, Banded):
            if codec.levels != "uniform":
                return f"it sums codes of uniform levels, and the {name}s have {codec.levels} levels"
        elif isinstance(codec, Affine | ResidualKMeans):
            if layout.head_dim // (codec.group or layout.head_dim) > structures.MAX_SPANS or (
                codec.group and codec.group % 4
            ):
                return f"it takes groups of a multiple of 4 channels, at most {structures.MAX_SPANS}, got {codec.group}"
        elif not isinstance(codec, Channel | Boosted | LloydMax | ResidualKMeans):
            return f"it does not know the codec of the {name}s, {type(codec).__name__}"
    return refuse_rope(layout)


def stream_of(store: LayerStore, name: StreamName) -> tuple[structures.Stream, list[Tensor]]:
    """A stream as the compiled operations see it, but for its window; and the tensors that it points to."""
    layout, codec, window = store.layout, store.stream(name).spec.codec, store.stream(name).spec.window
    out = structures.Stream(sink=window.sink, ring=window.ring, flush=window.flush, recent=window.recent)
    out.rows, out.group_tokens = layout.overlay_tokens(name), codec.group_tokens
    kept: list[Tensor] = []
    own = [s for s in layout.sections if s.stream == name]
    codes = [s for s in own if s.kind in ("code", "raw") or s.names == ("indices",)]
    first = {}  # channel of a field of codes
    if isinstance(codec, Banded):
        start = 0
        for i, (width, _) in enumerate(codec.bands(layout.head_dim)):
            first[f"codes{i}"] = start
            start += width
    for i, section in enumerate(codes):
        alpha = float(1 << section.shift)
        field = next(f for f in layout.fields(name) if f.name == section.names[0])
        if isinstance(codec, Banded):
            alpha *= STEPS[field.bits]
        start = first.get(section.names[0], 0)
        out.section[i] = structures.Section(section.offset, section.bits, start, section.width, section.shift, alpha)
    out.sections = len(codes)
    for section in own:
        if section.kind == "meta":
            out.meta_offset, out.names, out.meta_type = section.offset, len(section.names), TYPES[section.dtype]
        elif section.names == ("high",):
            out.high_offset = section.offset
        elif section.names == ("index",):
            if section.shift:
                out.high_offset = section.offset
            else:
                out.index_offset = section.offset
            out.index_bits = section.shift + section.bits
    out.metas = out.spans = 1
    out.span[0] = structures.Span(0, layout.head_dim, 0, 0, 1.0, 0.0)
    if isinstance(codec, Banded):
        out.kind, out.spans = SCALE_ALONE, 0
        start = 0
        for width, bits in codec.bands(layout.head_dim):
            if bits:
                center = -STEPS[bits] * ((1 << bits) - 1) / 2
                out.span[out.spans] = structures.Span(start, start + width, 0, bits, STEPS[bits], center)
                out.spans += 1
            start += width
        mean = getattr(store.stream(name).codec, "mean", None)
        if mean is not None:
            kept.append(mean.float().contiguous())
            out.mean = kept[-1].data_ptr()
    elif isinstance(codec, Affine | ResidualKMeans):
        out.kind = SCALE_MIN if codec.zero == "float" else SCALE_ZERO
        out.metas = out.spans = (codec if isinstance(codec, Affine) else codec.residual).groups(layout.head_dim)
        size = layout.head_dim // out.spans
        for i in range(out.spans):
            out.span[i] = structures.Span(i * size, (i + 1) * size, i, codec.bits, 1.0, 0.0)
        if isinstance(codec, ResidualKMeans):
            kept.append(store.stream(name).codec.book.float().contiguous())  # type: ignore[attr-defined]
            out.books, out.books_heads, out.centers = kept[-1].data_ptr(), len(kept[-1]), codec.centroids
    elif isinstance(codec, LloydMax):
        levels = codec.levels(layout.head_dim, torch.device("cpu"))
        kept.append(torch.nn.functional.pad(levels, (0, 16 - len(levels))))
        out.kind, out.levels, out.span[0].bits = LEVELS, kept[-1].data_ptr(), codec.bits
    elif isinstance(codec, Channel):
        out.kind, out.span[0].bits = CHANNEL, codec.bits
    elif isinstance(codec, Boosted):
        out.kind, out.extra = BOOSTED, codec.boosted(layout.head_dim)
    elif isinstance(codec, Raw):
        out.kind, out.meta_type = PLAIN, TYPES[codes[0].dtype]
    else:
        assert isinstance(codec, ProductVQ)
        books = store.stream(name).codec.codebooks.float().contiguous()  # type: ignore[attr-defined]
        kept.append(books)
        out.kind, out.extra, out.book_bits, out.books = CENTROIDS, codec.dim, codec.bits, books.data_ptr()
        out.books_heads, out.books_spaces = books.shape[:2]
    return out, kept
