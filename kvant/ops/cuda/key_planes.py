"""Planes of the keys' codes, and which channels the registers of the query operand stand for (codecs/tokenwise.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from kvant.layout import Layout
from kvant.ops.cuda.bands import ONE


class KeyPlane(NamedTuple):
    """The C++ type of the same name: one plane of one stored band of the keys' codes. A lane multiplies each of its registers of
    four codes by a register of the query operand."""

    width: int  # channels
    bits: int  # of a code in this plane
    offset: int  # byte of the plane in a page of a head
    first: int  # channel
    weight: int  # what a code of the plane counts, over ONE: the band's step times 2**shift
    before: int  # registers of the planes before
    groups: int = 1  # groups of channels with a scale each, which the order of the codes keeps together

    @property
    def text(self) -> str:
        if self.groups > 1:
            return f"GroupedKeyPlane<{self.width}, {self.bits}, {self.offset}, {self.weight}, {self.groups}>"
        return f"KeyPlane<{', '.join(map(str, self[:6]))}>"

    @property
    def places(self) -> int:
        """Registers that hold codes."""
        return -(-self.width * self.bits // 64 // 2) * (8 // self.bits)

    @property
    def registers(self) -> int:
        """`places`, rounded up to the pairs of registers that an MMA takes."""
        return -(-self.places // 2) * 2

    def raised(self, i: int) -> int:
        """Bits by which the codes of register i are shifted left in their bytes."""
        return 0 if self.bits >= 4 else i % (8 // self.bits) % 2 * self.bits

    def channel(self, i: int, byte: int, lane: int) -> int:
        """The channel of a byte of register i in a lane of four, or -1."""
        if self.groups > 1:
            group, share = self.width // self.groups, self.width // self.groups // 4
            element = i // 2 * 8 + ((byte & 1) * 2 + i % 2) * 2 + (byte >> 1)
            return element // share * group + lane * share + element % share
        per = 8 // self.bits
        pair = i // per * (16 // self.bits) + (byte & 1) * per + i % per
        there = pair < self.width // 8 and i < self.places
        return self.first + lane * (self.width // 4) + 2 * pair + (byte >> 1) if there else -1


def key_planes(layout: Layout) -> list[KeyPlane]:
    """The planes of all stored bands of the keys; none for product quantization."""
    planes: list[KeyPlane] = []
    for band in layout.format("key").stored_bands:
        for section in layout.sections:
            if (section.stream, section.kind, section.names) == ("key", "code", (band.field,)):
                before = planes[-1].before + planes[-1].registers if planes else 0
                weight = round(ONE * band.step * (1 << section.shift))
                planes.append(
                    KeyPlane(section.width, section.bits, section.offset, band.first, weight, before, section.groups)
                )
    return planes
