"""Bands of the keys' codes, and which channels the registers of the query operand stand for (codecs/tokenwise.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from kvant.layout import Layout
from kvant.ops.cuda.bands import ONE, code_offsets
from kvant.ops.cuda.levels import key_levels


class KeyPlane(NamedTuple):
    """The C++ types KeyPlane, of codes of three bits ThreeBitKeys, and LevelKeys: one stored band of the keys' codes. A lane
    multiplies each of its registers of four codes by a register of the query operand."""

    width: int  # channels
    bits: int  # of a code
    offset: int  # byte of the codes in a page of a head; of three bits, of their two low bits
    high: int  # byte of the third bits
    first: int  # channel
    weight: int  # what a code counts, over ONE: the band's step
    before: int  # registers of the bands before
    groups: int = 1  # groups of channels with a scale each, which the order of the codes keeps together
    levels: tuple[float, ...] = ()  # that codes are places in, over the scale; empty where they are evenly spaced

    @property
    def text(self) -> str:
        if self.groups > 1:
            return f"GroupedKeyPlane<{self.width}, {self.bits}, {self.offset}, {self.weight}, {self.groups}>"
        place = f"{self.first}, {self.weight}, {self.before}"
        plane = f"KeyPlane<{self.width}, {self.bits}, {self.offset}, {place}>"
        if self.bits == 3:
            plane = f"ThreeBitKeys<{self.width}, {self.offset}, {self.high}, {place}>"
        return f"LevelKeys<{plane}, {key_levels(self.levels).arguments(self.levels)}>" if self.levels else plane

    @property
    def _low_bits(self) -> int:
        """Bits of a code whose places give the order of channels."""
        return 2 if self.bits == 3 else self.bits

    @property
    def _row_bytes(self) -> int:
        return self.width * self._low_bits // 64

    @property
    def _halved(self) -> bool:
        """Whether a lane's share of a token is one byte."""
        return self.width * self._low_bits == 32

    @property
    def _per(self) -> int:
        """Codes of a byte that are at different places: of a nibble, where a row is one byte in each half of a word."""
        if self._halved:
            return 1
        return (4 if self._row_bytes == 1 and self._low_bits <= 2 else 8) // self._low_bits

    @property
    def places(self) -> int:
        """Registers that hold codes."""
        return 1 if self._halved else -(-self._row_bytes // 2) * self._per

    @property
    def _own_registers(self) -> int:
        """`places`, rounded up to the pairs of registers that an MMA takes."""
        return -(-self.places // 2) * 2

    @property
    def registers(self) -> int:
        """Of levels that are two bytes, those of the second bytes too."""
        return self._own_registers * self._parts

    @property
    def _parts(self) -> int:
        """Bytes of a level: registers hold first and second bytes in turn."""
        return key_levels(self.levels).parts if self.levels else 1

    def raised(self, i: int) -> int:
        """Bits by which the codes of register i are shifted left in their bytes."""
        if self.levels:
            return 7 if i % self._parts else 0
        return 0 if self.bits >= 4 else i % self._per % 2 * self._low_bits

    def channel(self, i: int, byte: int, lane: int) -> int:
        """The channel of a byte of register i in a lane of four, or -1."""
        if self.groups > 1:
            group, share = self.width // self.groups, self.width // self.groups // 4
            element = i // 2 * 8 + ((byte & 1) * 2 + i % 2) * 2 + (byte >> 1)
            return element // share * group + lane * share + element % share
        per, i = self._per, i // self._parts
        if self.levels and self.bits == 4:  # nibbles of a half of a word
            pair = i // 2 * 4 + byte
            return self.first + lane * (self.width // 4) + 2 * pair + i % 2 if pair < self.width // 8 else -1
        pair = i // per * (16 // self._low_bits) + (byte & 1) * per + i % per
        there = pair < self.width // 8 and i < self.places
        return self.first + lane * (self.width // 4) + 2 * pair + (byte >> 1) if there else -1


def key_planes(layout: Layout) -> list[KeyPlane]:
    """All stored bands of the keys; none for product quantization."""
    planes: list[KeyPlane] = []
    for band in layout.format("key").stored_bands:
        if any(section.names == (band.field,) and section.kind == "code" for section in layout.sections):
            low, high = code_offsets(layout, "key", band)
            before = planes[-1].before + planes[-1].registers if planes else 0
            weight, groups = round(ONE * band.step), layout.scale_groups("key")
            planes.append(KeyPlane(band.width, band.bits, low, high, band.first, weight, before, groups, band.levels))
    return planes
