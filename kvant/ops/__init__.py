"""Operations on paged, packed storage: append, decode, prefill. Implementations are found because they exist."""

from kvant.ops.registry import OPS, Implementation, choose, explain, implementations
from kvant.ops.types import BoundStream, LayerStore, PagedBatch
from kvant.spec import discover

__all__ = ["OPS", "BoundStream", "Implementation", "LayerStore", "PagedBatch", "choose", "explain", "implementations"]

discover(__name__)
