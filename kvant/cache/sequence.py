"""A sequence: its pages, and which of its tokens the overlay holds in full precision."""

from __future__ import annotations

import dataclasses

from kvant.layout import StreamName

SLID_OUT = -1  # in a sequence's pages: one that the sliding window has left, and that was given back
FREED = -1  # overlay row of a sequence that was freed


@dataclasses.dataclass(eq=False)
class Sequence:
    """A sequence: its length, its pages in order, its overlay row, and which of its tokens that row holds. Lists and dictionaries
    are replaced, not changed in place, so that an operation can be taken back."""

    overlay_row: int
    length: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    sinks: int = 0  # sink tokens that the overlay holds
    ring_start: dict[StreamName, int] = dataclasses.field(default_factory=lambda: {"key": 0, "value": 0})
    # the ring of a stream holds no token before this one; of a group-wise stream, all tokens before it are in pages
    visible: int | None = None  # sliding window by which pages were last given back; None where none were

    requantized_from: int | None = None
    # From this token on, pages may hold groups that were decoded and quantized again, as after a crop. Their codes depend on more
    # than the tokens, so they cannot be shared. None where there are none.

    @property
    def held(self) -> list[int]:
        """Pages to which this sequence has a reference."""
        return [page for page in self.pages if page != SLID_OUT]


FIELDS = tuple(field.name for field in dataclasses.fields(Sequence))
