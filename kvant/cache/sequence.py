"""A sequence: where its tokens lie, and what of it is held in full precision."""

from __future__ import annotations

import dataclasses

from kvant.layout import StreamName

SLID_OUT = -1  # stands in a sequence's pages for one that a sliding window has left behind
FREED = -1  # owner of a sequence that was given back


@dataclasses.dataclass(eq=False)
class Sequence:
    """A sequence: its length, its pages in order, its row of the overlays and what that row really holds."""

    overlay_row: int
    length: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    sinks: int = 0  # sink tokens held in full precision
    ring_start: dict[StreamName, int] = dataclasses.field(default_factory=lambda: {"key": 0, "value": 0})
    # the ring of a stream holds no token before this one; of a group-wise stream, all tokens before it are in pages
    visible: int | None = None  # tokens that the sliding window last seen keeps; None where nothing has slid out

    requantized_from: int | None = (
        None  # pages hold codes of the tokens themselves up to here; None: everywhere. From here on a group
    )
    # was coded again from what had been decoded

    @property
    def held(self) -> list[int]:
        """Pages that it has a reference to."""
        return [page for page in self.pages if page != SLID_OUT]
