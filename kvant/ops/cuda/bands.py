"""Bands of a stream's codes, in the words of include/bands.cuh."""

from __future__ import annotations

import struct

import torch

from kvant.codecs.format import Band, StreamFormat
from kvant.layout import Layout, StreamName

ONE = 1 << 20  # what kernels write fractions over


def code_bands(layout: Layout, name: StreamName) -> str:
    """The bands of a stream that have codes, as the list of types that a kernel takes."""
    return _text(layout, name, layout.format(name).stored_bands)


def all_bands(layout: Layout, name: StreamName) -> str:
    """As `code_bands`, of all channels: those without codes are bands of 0 bits."""
    return _text(layout, name, layout.format(name).bands)


def code_offsets(layout: Layout, name: StreamName, band: Band) -> tuple[int, int]:
    """Byte of a band's codes in a page of a head, and of the third bits of 3-bit codes; 0 where there are none."""
    low, *high = (s.offset for s in layout.sections if s.stream == name and s.names == (band.field,))
    return low, high[0] if high else 0


def level_edges(stream: StreamFormat) -> str:
    """The positive edges between the levels of a stream's table as a type of include/bands.cuh; none where levels are evenly spaced.
    As kvant.codecs.lloyd_max computes them."""
    levels = torch.tensor([level for band in stream.bands for level in band.levels], dtype=torch.float32)
    edges = ((levels[1:] + levels[:-1]) / 2).tolist()
    assert edges == [-edge for edge in reversed(edges)], "levels mirror each other"
    return f"LevelEdges<{', '.join(_bits(edge) for edge in edges[len(edges) // 2 + 1 :])}>"


def _bits(x: float) -> str:
    """The bits of a float."""
    return f"{struct.unpack('<I', struct.pack('<f', x))[0]}u"


def _text(layout: Layout, name: StreamName, bands: tuple[Band, ...]) -> str:
    return f"Bands<{', '.join(_band(layout, name, band) for band in bands)}>"


def _band(layout: Layout, name: StreamName, band: Band) -> str:
    offset, high_offset = code_offsets(layout, name, band) if band.bits else (0, 0)
    step = band.step if band.bits else 0.0
    return f"Band<{band.width}, {band.bits}, {offset}, {high_offset}, {band.first}, {_bits(step)}, {round(ONE * step)}>"
