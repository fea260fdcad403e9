"""Paged storage of packed keys and values: a pool of pages, sequences over it, and their operations."""

from kvant.cache.finite import NotFinite
from kvant.cache.paged import PagedCache
from kvant.cache.pool import PagePool, PoolFull
from kvant.cache.prefix import PrefixCache
from kvant.cache.sequence import Sequence
from kvant.cache.snapshot import Snapshot, save
from kvant.cache.static import StaticBatch
from kvant.cache.swap import Swapped, swap_in, swap_out

__all__ = [
    "NotFinite",
    "PagePool",
    "PagedCache",
    "PoolFull",
    "PrefixCache",
    "Sequence",
    "Snapshot",
    "StaticBatch",
    "Swapped",
    "save",
    "swap_in",
    "swap_out",
]
