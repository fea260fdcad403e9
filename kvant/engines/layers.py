"""What a `kvant.Cache` is made of: layers as transformers sees them, groups of layers that share block tables, and the
forward pass under way."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvant.cache import PagedCache, Sequence
from kvant.ops import PagedBatch

if TYPE_CHECKING:
    from kvant.engines.hf import Cache

Tensor = torch.Tensor
ATTENTION = "kvant"


@dataclasses.dataclass
class Step:
    """One forward pass through the layers of a group."""

    batch: PagedBatch
    real: Tensor | None  # bool [batch, columns]; None where every column is a token
    columns: int
    before: list[int]  # lengths of the sequences before it
    same: list[int] | None  # where rows of the batch are the same text: for every row, the first one like it
    written: int = 0  # layers of the group that have their new tokens


@dataclasses.dataclass
class Group:
    """Layers that see the same tokens, and share block tables."""

    sliding_window: int | None
    layers: list[int]
    paged: PagedCache
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    step: Step | None = None


class Handle:
    """What `update` gives to the attention function in place of keys and values."""

    def __init__(self, cache: Cache, layer: int, key: Tensor, value: Tensor) -> None:
        self.cache, self.layer, self.key, self.value = cache, layer, key, value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"packed keys and values have no {name!r}: they are read by the attention implementation {ATTENTION!r} alone. "
            "Either the model's attention implementation was changed after the cache was made, or the model reads its cache "
            "outside of its attention function and cannot be served"
        )


class PackedLayer(CacheLayerMixin):
    """One layer of a `Cache`, as transformers sees it."""

    is_croppable = True

    def __init__(self, cache: Cache, index: int, sliding_window: int | None) -> None:
        super().__init__()
        self._cache = weakref.ref(
            cache
        )  # which has this layer: no cycle, so that memory goes with the last name for it
        self.index = index
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.columns = 0  # seen so far, padding included
        self.record_past = False

    @property
    def cache(self) -> Cache:
        cache = self._cache()
        assert cache is not None, "the cache of this layer is gone"
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handle = Handle(self.cache, self.index, key_states, value_states)
        if self.cache._decoder is None:  # which counts its steps itself, when it is closed
            self.columns += key_states.shape[-2]
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if (
            not query_length
        ):  # a model asks before its layers run, of which torch would say that they cannot be reshaped
            raise ValueError("the model was called with no new tokens: input_ids must have at least one column")
        if self.cache._decoder is not None:  # no mask is needed
            return query_length, 0
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        decoder = self.cache._decoder
        return self.columns if decoder is None else self.columns + decoder.done

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def batch_size(self) -> int:
        return self.cache.batch_size


def flatten(x: Tensor, real: Tensor | None) -> Tensor:
    """[batch, heads, columns, head_dim] -> [tokens, heads, head_dim], without padding."""
    x = x.transpose(1, 2)
    return x.reshape(-1, *x.shape[2:]) if real is None else x[real]


def unflatten(x: Tensor, real: Tensor | None, batch: int, columns: int) -> Tensor:
    """[tokens, heads, head_dim] -> [batch, columns, heads, head_dim], zero where padding was."""
    if real is None:
        return x.reshape(batch, columns, *x.shape[1:])
    out = x.new_zeros(batch, columns, *x.shape[1:])
    out[real] = x
    return out
