"""Page ids and their reference counts, whatever the pages hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class PoolFull(RuntimeError):
    """More pages, or overlay rows, were asked for than there are. Nothing has changed: free something and try again.

    asked      pages that were asked for
    used       pages in use, of `total`
    evictable  of these, pages that only the prefix cache holds. Evicting them would not have been enough
    sequences  where an overlay row for one more sequence was asked for: the number of rows
    frees      of every sequence, pages that freeing (or swapping out) it alone would give back

    >>> import kvant
    >>> from kvant.models import tiny
    >>> model, tokenizer = tiny()
    >>> inputs = tokenizer("A text of more than one page. " * 5, return_tensors="pt")
    >>> try:
    ...     _ = model.generate(**inputs, past_key_values=kvant.Cache(model, "int4", max_tokens=64), max_new_tokens=1)
    ... except kvant.PoolFull as full:
    ...     print(full.asked, full.total)
    3 1
    """

    def __init__(
        self,
        asked: int,
        used: int,
        total: int,
        evictable: int = 0,
        frees: Sequence[int] = (),
        sequences: int | None = None,
    ) -> None:
        text = (
            f"the cache is full: {asked} more pages were asked for, {total - used} of {total} are free ({used} in use)"
        )
        if sequences is not None:
            text = f"the cache is full: one more sequence was asked for, all {sequences} overlay rows are in use"
        if evictable:
            text += f", {evictable} more are held by the prefix cache alone"
        if frees:
            gains = ", ".join(map(str, frees[:8])) + (", ..." if len(frees) > 8 else "")
            text += f"; freeing a sequence gives back {gains} pages" + (" (one figure each)" if len(frees) > 1 else "")
        super().__init__(f"{text}; free, crop or swap out a sequence, or make the pool larger")
        self.asked, self.used, self.total = asked, used, total
        self.evictable, self.frees, self.sequences = evictable, tuple(frees), sequences


class PagePool:
    """Hands out page ids 0 ... total - 1. A page in use has one reference for each sequence that reads it, and one for each node of
    the prefix cache."""

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"a pool has at least 0 pages, got {total}")
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """New pages with one reference each: all of them, or PoolFull and none."""
        if count > self.free:
            raise PoolFull(count, self.used, self.total)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page; a page without references is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def recount(self, references: Counter[int], total: int) -> None:
        """Sets the references to every one of `total` pages."""
        pages = range(total)
        self._references = [references[page] for page in pages]
        self._free = [page for page in reversed(pages) if not references[page]]

    def grow(self, total: int) -> None:
        """Adds pages up to a new total."""
        assert total >= self.total, (total, self.total)
        self._free[:0] = range(total - 1, self.total - 1, -1)
        self._references += [0] * (total - self.total)
