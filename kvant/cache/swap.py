"""Swapping sequences to host memory and back, as the same bytes."""

from __future__ import annotations

import dataclasses
from collections import abc

import torch

from kvant.cache.paged import PagedCache
from kvant.cache.sequence import SLID_OUT, Sequence

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Swapped:
    """Sequences that were swapped out together. Pages that they share are stored once, and shared again by `swap_in`."""

    digest: str
    sequences: tuple[Sequence, ...]  # page ids index `pages`, overlay rows index `rows`
    pages: tuple[Tensor, ...]  # of every layer, in host memory
    rows: tuple[tuple[Tensor, ...], ...]  # of every layer: its tensors with a row for each sequence

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for layer in (self.pages, *self.rows) for t in layer)


def gathered(sequences: abc.Sequence[Sequence]) -> tuple[list[int], list[Sequence]]:
    """The pages of some sequences, each once; and copies of the sequences whose page ids are indices into that list."""
    pages = list(dict.fromkeys(page for seq in sequences for page in seq.held))
    place = {page: i for i, page in enumerate(pages)} | {SLID_OUT: SLID_OUT}
    moved = [
        dataclasses.replace(
            seq, overlay_row=row, pages=[place[page] for page in seq.pages], ring_start=dict(seq.ring_start)
        )
        for row, seq in enumerate(sequences)
    ]
    return pages, moved


def restored_sequences(
    cache: PagedCache, moved: abc.Sequence[Sequence], pages: abc.Sequence[int], share: bool = True
) -> list[Sequence]:
    """New sequences of a cache like those of `gathered`, over pages that were taken for them, as a part of an operation on the cache.
    `share`: pages have one reference each, and those of several sequences get more; otherwise all are counted already. The
    overlay rows are still to be filled."""
    sequences = [cache.new() for _ in moved]
    seen: set[int] = set()
    for seq, each in zip(sequences, moved, strict=True):
        seq.length, seq.sinks, seq.visible, seq.requantized_from = (
            each.length,
            each.sinks,
            each.visible,
            each.requantized_from,
        )
        seq.ring_start = dict(each.ring_start)
        seq.pages = [page if page == SLID_OUT else pages[page] for page in each.pages]
        if share:
            cache.pool.share([page for page in seq.held if page in seen])
        seen.update(seq.held)
    return sequences


def copied(cache: PagedCache, sequences: abc.Sequence[Sequence]) -> Swapped:
    """Copies sequences to host memory, pages that they share with others included."""
    with cache.lock:
        for seq in sequences:
            cache.check_ours(seq)
        pages, moved = gathered(sequences)
        ids = torch.tensor(pages, dtype=torch.int64, device=cache.device)
        rows = torch.tensor([seq.overlay_row for seq in sequences], dtype=torch.int64, device=cache.device)
        return Swapped(
            cache.digest,
            tuple(moved),
            tuple(store.pages[ids].cpu() for store in cache.stores),
            tuple(tuple(tensor[rows].cpu() for tensor in store.owned) for store in cache.stores),
        )


def swap_out(cache: PagedCache, sequences: abc.Sequence[Sequence]) -> Swapped:
    """Copies sequences to host memory, as `copied` does, and frees them."""

    def move() -> Swapped:
        swapped = copied(cache, sequences)
        for seq in sequences:
            cache.free(seq)
        return swapped

    return cache.whole(move)


def swap_in(cache: PagedCache, swapped: Swapped) -> list[Sequence]:
    """Brings sequences back as they were: all of them, or none and an error (PoolFull, or torch's where memory runs out). `swapped`
    can be used again."""
    if swapped.digest != cache.digest:
        raise ValueError(
            f"these sequences come from a cache with the digest {swapped.digest:.16}..., this one has {cache.digest:.16}...: "
            "recipe, layout, artifact and model must be the same"
        )

    def move() -> list[Sequence]:
        count = len(swapped.pages[0])
        cache.reserve(count, len(swapped.sequences))
        pages = cache.pool.take(count)
        sequences = restored_sequences(cache, swapped.sequences, pages)
        ids = torch.tensor(pages, dtype=torch.int64, device=cache.device)
        rows = torch.tensor([seq.overlay_row for seq in sequences], dtype=torch.int64, device=cache.device)
        for store, data, per_row in zip(cache.stores, swapped.pages, swapped.rows, strict=True):
            store.pages[ids] = data.to(cache.device)
            for tensor, saved in zip(store.owned, per_row, strict=True):
                tensor[rows] = saved.to(cache.device)
        return sequences

    return cache.whole(move)
