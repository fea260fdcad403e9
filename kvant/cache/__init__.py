"""Paged storage of packed keys and values: a pool of pages, sequences over it, and their operations."""

from kvant.cache.paged import Entry, PagedCache
from kvant.cache.pool import PagePool, PoolFull

__all__ = ["Entry", "PagePool", "PagedCache", "PoolFull"]
