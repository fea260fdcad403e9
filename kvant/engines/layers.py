"""A layer of a cache as transformers sees it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvant.engines.attention import AttendingCache, Handle

Tensor = torch.Tensor


class PackedLayer(CacheLayerMixin):
    """One layer of a `kvant.Cache`, or of another cache that attends by itself. It stores nothing: `update` returns a handle."""

    is_croppable = True

    def __init__(self, cache: AttendingCache, index: int, sliding_window: int | None) -> None:
        super().__init__()
        # The cache holds this layer. A weak reference makes no cycle, so memory is freed with the last name of the cache.
        self._cache = weakref.ref(cache)
        self.index = index
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.columns = 0  # columns that this layer has got, padding included
        self.record_past = False  # whether a crop may come, so that pages left by a sliding window must stay

    @property
    def cache(self) -> AttendingCache:
        cache = self._cache()
        assert cache is not None, "the cache of this layer is gone"
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        handle = Handle(cache, self.index, key_states, value_states)
        if cache.fixed_steps is None:
            self.columns += key_states.shape[-2]
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers."""
        if not query_length:  # refused here: torch's own error, later, is that an empty tensor cannot be reshaped
            raise ValueError("the model was called with no new tokens: input_ids must have at least one column")
        if self.cache.fixed_steps is not None:  # every sequence attends to all of itself: no mask
            return query_length, 0
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns + (self.cache.fixed_steps or 0)

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def batch_size(self) -> int:
        return self.cache.batch_size
