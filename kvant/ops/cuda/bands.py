"""Bands of a stream's codes, in the words of include/bands.cuh."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvant.layout import Layout, StreamName
from kvant.ops.cuda.plan import ONE, stored_bands


class CodeBand(NamedTuple):
    """Neighbouring channels whose codes have the same number of bits; 0 bits where no codes are stored."""

    width: int  # channels
    bits: int
    offset: int  # byte of the codes in a page of a head
    high_offset: int  # byte of the third bits of 3-bit codes
    first: int  # channel
    step: float  # between levels, over the scale

    @property
    def text(self) -> str:
        (bits,) = struct.unpack("<I", struct.pack("<f", self.step))
        numbers = (self.width, self.bits, self.offset, self.high_offset, self.first)
        return f"Band<{', '.join(map(str, numbers))}, {bits}u, {round(ONE * self.step)}>"


def code_bands(layout: Layout, name: StreamName) -> list[CodeBand]:
    """The bands of a stream that have codes; one of all channels where the stream has a single width."""
    found = []
    for band in stored_bands(layout, name):
        low, *high = (s.offset for s in layout.sections if s.stream == name and s.names == (band.field,))
        found.append(CodeBand(band.width, band.bits, low, high[0] if high else 0, band.first, band.step))
    return found


def all_bands(layout: Layout, name: StreamName) -> list[CodeBand]:
    """As `code_bands`, with bands of 0 bits for the channels between and after them."""
    out, end = [], 0
    for band in [*code_bands(layout, name), CodeBand(0, 0, 0, 0, layout.head_dim, 0.0)]:
        if end < band.first:
            out.append(CodeBand(band.first - end, 0, 0, 0, end, 0.0))
        if band.width:
            out.append(band)
        end = band.first + band.width
    return out


def bands_text(bands: list[CodeBand]) -> str:
    """The list of types that a kernel takes."""
    return f"Bands<{', '.join(band.text for band in bands)}>"
