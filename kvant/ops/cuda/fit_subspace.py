"""SQuat's query subspace on a GPU, by kernels/fit_subspace.cu: what `kvant.correctors.subspace.Subspace.observe` does, of all
sequences in a launch whose grid depends on the shapes alone, or in two where prompts are long. Sequences of which a group is packed
are left alone."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvant.correctors.subspace import Subspace
from kvant.layout import Layout
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import UNROTATE_FIELDS, Arguments, int32, optional, pointer
from kvant.ops.cuda.config import ELEMENT_TYPES, page_config
from kvant.ops.cuda.device import shared_memory
from kvant.ops.types import LayerStore, PagedBatch, check_queries

Tensor = torch.Tensor
MAX_HEAD_DIM = 128  # a square matrix of doubles lies in shared memory
MAX_RANK = 64
ROWS_AT_ONCE = 8  # of kernels/fit_subspace.cu
GRAM_CTAS = 512  # CTAs that sums over the queries of a prompt are spread over, beside one for every sequence and head
STATIC_BYTES = 2048  # of static shared memory of kvant_fit_subspace, at most
LEAST_CHUNK = 256  # tokens of such a sum, at least
_PLANS: nvrtc.Numbered[FitPlan] = nvrtc.Numbered()


def refuse_layout(layout: Layout) -> str | None:
    """Why subspaces of a layout's queries cannot be fitted, or None."""
    key = layout.recipe.key
    assert isinstance(key.corrector, Subspace)
    if key.corrector.shared:
        return "it fits a subspace for every sequence, and all of a batch share one"
    if key.transforms:
        return "it fits subspaces of queries as they come, and the keys are transformed"
    if layout.head_dim > MAX_HEAD_DIM or layout.head_dim % 32:
        return f"it fits subspaces of 32, 64, 96 or 128 channels, and the head dim is {layout.head_dim}"
    if key.corrector.rank > MAX_RANK:
        return f"it fits subspaces of at most {MAX_RANK} vectors, and the rank is {key.corrector.rank}"
    return None


FitSubspaceArguments = Arguments(
    "FitSubspaceArguments",
    query=pointer("const void", "[tokens, KV_HEADS * GROUP, HEAD_DIM]"),
    subspace=pointer("float", "[rows, KV_HEADS, RANK, HEAD_DIM]: singular values times vectors"),
    grams=optional("double", "[chunks, KV_HEADS, HEAD_DIM, HEAD_DIM]: sums over chunks; null where one CTA sums them"),
    query_start_loc=pointer("const s64", "[batch + 1], first new token of a sequence"),
    seq_lens=pointer("const s64", "[batch], tokens of a sequence with its new ones"),
    overlay_rows=pointer("const s64", "[batch], row of the subspaces"),
    key_ring_start=pointer("const s64", "[batch], position before which the ring of keys holds nothing"),
    **UNROTATE_FIELDS,
    batch=int32("sequences"),
    half_batch=int32("largest power of two below the batch, or 0: where a binary search begins"),
    chunk_tokens=int32("new tokens of a chunk"),
    most_columns=int32("columns that dynamic shared memory has room for"),
)


@dataclasses.dataclass(frozen=True)
class FitPlan:
    """The kernels for one layout, query heads of a KV head and type of queries."""

    layout: Layout
    group: int
    query: str

    @property
    def text(self) -> str:
        layout, window = self.layout, self.layout.recipe.key.window
        corrector = layout.recipe.key.corrector
        assert isinstance(corrector, Subspace)
        config: dict[str, object] = {
            **page_config(layout),
            "ORIGIN": layout.recipe.origin,
            "KEY_RECENT": window.recent,
            "KEY_FLUSH": window.flush,
            "ROPE_BLOCK": layout.recipe.key.effective_rope_block,
            "RANK": corrector.rank,
            "GROUP": self.group,
            "QUERY_TYPE": ELEMENT_TYPES[self.query],
        }
        return nvrtc.program("kernels/fit_subspace.cu", config=config, arguments=[FitSubspaceArguments])

    def columns(self, tokens: int) -> int:
        """Columns of the largest matrix that so many new tokens may give a sequence."""
        corrector, dim = self.layout.recipe.key.corrector, self.layout.head_dim
        assert isinstance(corrector, Subspace)
        return min(dim, -(-(corrector.rank + tokens * self.group) // 2) * 2)

    def shared(self, columns: int) -> int:
        dim = self.layout.head_dim
        return 8 * (columns * (dim + 8) + ROWS_AT_ONCE * dim)


def refuse_memory(layout: Layout, device: torch.device) -> str | None:
    """Why a device's shared memory does not hold a square matrix of doubles, or None."""
    needed = FitPlan(layout, 1, "float32").shared(layout.head_dim) + STATIC_BYTES
    if needed > shared_memory(device)[0]:
        return f"a matrix of doubles of {needed} bytes, of which subspaces are fitted, is more than this GPU's shared memory holds"
    return None


@functools.lru_cache(maxsize=256)
def _kernel(made: FitPlan, name: str, device: torch.device, shared: int = 0) -> nvrtc.Kernel:
    return nvrtc.Kernel(made.text, name, device, 4 * made.layout.head_dim, shared)


def fit(store: LayerStore, query: Tensor, batch: PagedBatch, cosine: Tensor | None, sine: Tensor | None) -> None:
    """Lets the subspaces of sequences without a packed group take in the queries of their new tokens, [tokens, query heads,
    head_dim]. `cosine` and `sine` are `rope_table`'s, where keys are stored unrotated."""
    check_queries(query, store.layout, ELEMENT_TYPES)
    made = FitPlan(store.layout, query.shape[1] // store.layout.heads, str(query.dtype).removeprefix("torch."))
    first = 0 if store.key.rope is None else store.key.rope.first
    ends = batch.query_start_loc, batch.seq_lens, batch.overlay_rows, batch.ring_start["key"]
    _fit_subspace(store.states["key"], query.contiguous(), *ends, cosine, sine, first, _PLANS.number(made))


@torch.library.custom_op("kvant::fit_subspace", mutates_args=("subspace",))
def _fit_subspace(
    subspace: Tensor,
    query: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    overlay_rows: Tensor,
    key_ring_start: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    rope_first: int,
    plan: int,
) -> None:
    made = _PLANS[plan]
    tokens, batch, heads, dim = len(query), len(seq_lens), made.layout.heads, made.layout.head_dim
    if not batch:
        return
    chunk = max(LEAST_CHUNK, -(-tokens * heads // GRAM_CTAS))
    chunks, grams = tokens // chunk + batch, None
    if tokens > LEAST_CHUNK and tokens > batch:  # a sequence may have more than one chunk
        grams = torch.empty(chunks * heads * dim * dim, dtype=torch.float64, device=query.device)
    columns = made.columns(tokens)
    arguments = FitSubspaceArguments.fill(
        query=query,
        subspace=subspace,
        grams=grams,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        overlay_rows=overlay_rows,
        key_ring_start=key_ring_start,
        cosine=cosine,
        sine=sine,
        rope_first=rope_first,
        rope_blocks=1 if cosine is None else len(cosine),
        rope_half=0 if cosine is None else cosine.shape[1],
        batch=batch,
        half_batch=nvrtc.half_of(batch),
        chunk_tokens=chunk,
        most_columns=columns,
    )
    if grams is not None:
        _kernel(made, "kvant_subspace_gram", query.device).launch((chunks, heads), arguments)
    kernel = _kernel(made, "kvant_fit_subspace", query.device, made.shared(columns))
    # no more CTAs than the GPU holds at once: in most steps none of them has anything to do
    kernel.launch((batch, max(1, min(heads, kernel.blocks // batch))), arguments)


@_fit_subspace.register_fake
def _(*args: object) -> None:
    return None
