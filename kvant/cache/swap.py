"""Sequences in host memory: room for others now, the same bytes later."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvant.cache.entry import SLID_OUT, Entry

if TYPE_CHECKING:
    from kvant.cache.paged import PagedCache

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Swapped:
    """Sequences that were swapped out together. Pages that they share are held once, and shared again afterwards."""

    digest: str
    sequences: tuple[Entry, ...]  # pages are places in `pages`, owners are rows of `owned`
    pages: tuple[Tensor, ...]  # of every layer, in host memory
    owned: tuple[tuple[Tensor, ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for layer in (self.pages, *self.owned) for t in layer)


def gathered(entries: Sequence[Entry]) -> tuple[list[int], list[Entry]]:
    """The pages of some sequences, each once, and the sequences with their places among these."""
    pages = list(dict.fromkeys(page for entry in entries for page in entry.held))
    place = {page: i for i, page in enumerate(pages)} | {SLID_OUT: SLID_OUT}
    moved = [
        dataclasses.replace(e, owner=row, pages=[place[page] for page in e.pages], exact=dict(e.exact))
        for row, e in enumerate(entries)
    ]
    return pages, moved


def settled(cache: PagedCache, moved: Sequence[Entry], pages: Sequence[int], share: bool = True) -> list[Entry]:
    """Sequences of `gathered` as new sequences of a cache over pages that were taken for them: all of them, or an error and
    none. `share`: a page has one reference so far; otherwise all are counted. Their windows are still to be filled."""
    entries: list[Entry] = []
    try:
        for _ in moved:
            entries.append(cache.new())
    except BaseException:  # they have no pages yet
        for entry in entries:
            cache.free(entry)
        raise
    seen: set[int] = set()
    for entry, each in zip(entries, moved, strict=True):
        entry.length, entry.sinks, entry.visible, entry.pure = each.length, each.sinks, each.visible, each.pure
        entry.exact = dict(each.exact)
        entry.pages = [page if page == SLID_OUT else pages[page] for page in each.pages]
        if share:
            cache.pool.share([page for page in entry.held if page in seen])
        seen.update(entry.held)
    return entries


def copied(cache: PagedCache, entries: Sequence[Entry]) -> Swapped:
    """Copies sequences to host memory. What they share with others is copied too."""
    with cache.lock:
        for entry in entries:
            cache.check_ours(entry)
        pages, moved = gathered(entries)
        ids = torch.tensor(pages, dtype=torch.int64, device=cache.device)
        rows = torch.tensor([entry.owner for entry in entries], dtype=torch.int64, device=cache.device)
        return Swapped(
            cache.digest,
            tuple(moved),
            tuple(store.pages[ids].cpu() for store in cache.stores),
            tuple(tuple(owned[rows].cpu() for owned in store.owned) for store in cache.stores),
        )


def swap_out(cache: PagedCache, entries: Sequence[Entry]) -> Swapped:
    """Copies sequences to host memory, as `copied` does, and frees them."""
    with cache.lock:
        swapped = copied(cache, entries)
        for entry in entries:
            cache.free(entry)
        return swapped


def swap_in(cache: PagedCache, swapped: Swapped) -> list[Entry]:
    """Brings sequences back, as they were: all of them, or an error (PoolFull, or torch's where memory runs out) and none.
    What was swapped out stays valid."""
    if swapped.digest != cache.digest:
        raise ValueError(
            f"these sequences come from a cache with the digest {swapped.digest:.16}..., this one has {cache.digest:.16}...: "
            "recipe, layout, artifact and model must be the same"
        )
    with cache.lock:
        count = len(swapped.pages[0])
        cache.reserve(count, len(swapped.sequences))
        pages = cache.pool.take(count)
        try:
            entries = settled(cache, swapped.sequences, pages)
        except BaseException:
            cache.pool.release(pages)
            raise
        try:
            ids = torch.tensor(pages, dtype=torch.int64, device=cache.device)
            rows = torch.tensor([entry.owner for entry in entries], dtype=torch.int64, device=cache.device)
            for store, data, windows in zip(cache.stores, swapped.pages, swapped.owned, strict=True):
                store.pages[ids] = data.to(cache.device)
                for owned, kept in zip(store.owned, windows, strict=True):
                    owned[rows] = kept.to(cache.device)
        except BaseException:
            for entry in entries:
                cache.free(entry)
            raise
        return entries
