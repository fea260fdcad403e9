"""What an operation is given: one layer's storage, and where its sequences are in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Self, TypeVar

import torch

from kvant.codecs import DTYPES, BoundCodec
from kvant.layout import Layout, StreamName
from kvant.ops.flash import TORCH, Flash
from kvant.recipe import Stream
from kvant.rope import Rope
from kvant.transforms import BoundTransform

Tensor = torch.Tensor
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
COUNTERS = 2  # zeros that decode in a CUDA graph needs per sequence and query head, at most: the last tile of heads may be short


class PagedBatch(NamedTuple):
    """All that an operation knows of requests. The new tokens of all sequences are concatenated."""

    block_table: Tensor  # int64 [sequences, pages]; entries past a sequence's last page, or slid out, are never read
    seq_lens: Tensor  # int64 [sequences]: tokens after the new ones
    slot_mapping: Tensor  # int64 [new tokens]: page * page_tokens + token of the page; -1 is padding
    query_start_loc: Tensor  # int64 [sequences + 1]: first new token of each sequence
    overlay_rows: Tensor  # int64 [sequences]: row of the overlays
    sinks: Tensor  # int64 [sequences]: sink tokens that the overlay row holds
    ring_start: dict[StreamName, Tensor]  # int64 [sequences]: position of the first token that a stream's ring holds

    @property
    def positions(self) -> tuple[Tensor, Tensor]:
        """Sequence and position of every new token: int64 [new tokens] each."""
        counts = self.query_start_loc.diff()
        sequence = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        first = self.seq_lens - counts - self.query_start_loc[:-1]
        return sequence, torch.arange(len(sequence), device=counts.device) + first[sequence]


def one_sequence(batch: PagedBatch, b: int) -> PagedBatch:
    """The batch of its sequence b alone; slot_mapping and query_start_loc stay those of the batch."""
    return some_sequences(batch, slice(b, b + 1))


def some_sequences(batch: PagedBatch, at: slice) -> PagedBatch:
    """The batch of some of its sequences; slot_mapping and query_start_loc stay those of the batch."""
    if at == slice(0, batch.seq_lens.shape[0]):
        return batch
    return batch._replace(
        block_table=batch.block_table[at],
        seq_lens=batch.seq_lens[at],
        overlay_rows=batch.overlay_rows[at],
        sinks=batch.sinks[at],
        ring_start={name: ring_start[at] for name, ring_start in batch.ring_start.items()},
    )


def without_overlay(batch: PagedBatch) -> PagedBatch:
    """The batch whose tokens are all read from pages, as if overlays held none of them."""
    return batch._replace(
        sinks=torch.zeros_like(batch.sinks), ring_start=dict.fromkeys(batch.ring_start, batch.seq_lens)
    )


def queries_per_sequence(query: Tensor, batch: PagedBatch, layout: Layout) -> int:
    """Queries that decode is given for every sequence: those of its last tokens, [sequences * queries, query heads, head_dim]."""
    sequences, rows = batch.seq_lens.shape[0], query.shape[0]  # `len` of a tensor takes four times as long
    queries, rest = divmod(rows, sequences) if sequences else (1, rows)
    if rest or not queries:
        raise ValueError(f"decode needs as many queries of every sequence, got {rows} for {sequences} sequences")
    if queries == 1:
        return 1
    for name, stream in layout.recipe.streams.items():
        if stream.window.ring and stream.window.rollback < queries - 1:
            raise ValueError(
                f"decode of {queries} queries a sequence reads {name}s as they were {queries - 1} tokens ago: the window needs a "
                f"rollback of {queries - 1}, got {stream.window.rollback}"
            )
    return queries


def one_query_each(batch: PagedBatch, queries: int) -> PagedBatch:
    """The batch in which every query is a sequence of its own, which ends with the query's token: decode of several queries a
    sequence is defined as decode of this batch. slot_mapping and query_start_loc stay those of the batch."""
    if queries == 1:
        return batch
    sequences = torch.arange(len(batch.seq_lens), device=batch.seq_lens.device)[:, None].expand(-1, queries).flatten()
    after = torch.arange(queries - 1, -1, -1, device=batch.seq_lens.device).repeat(len(batch.seq_lens))
    return ending_before(batch, sequences, after)


def ending_before(batch: PagedBatch, sequences: Tensor, after: Tensor) -> PagedBatch:
    """These sequences of a batch, each without so many of its last tokens: int64 [n] both. slot_mapping and query_start_loc
    stay those of the batch."""
    return batch._replace(
        block_table=batch.block_table[sequences],
        seq_lens=(batch.seq_lens[sequences] - after).clamp_min(0),
        overlay_rows=batch.overlay_rows[sequences],
        sinks=batch.sinks[sequences],
        ring_start={name: ring_start[sequences] for name, ring_start in batch.ring_start.items()},
    )


PrefillOne = Callable[[Tensor, Tensor, Tensor, PagedBatch, int], Tensor]
"""(query, key, value, batch of one sequence, tokens of its history) -> output; query and output [new tokens, query heads,
head_dim], key and value [new tokens, heads, head_dim]."""


def prefill_each(query: Tensor, key: Tensor, value: Tensor, batch: PagedBatch, attend: PrefillOne) -> Tensor:
    """Prefill sequence by sequence: the outputs of `attend` of every sequence that has new tokens, concatenated."""
    out = torch.empty_like(query)
    query_start_loc, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for b, length in enumerate(seq_lens):
        part = slice(query_start_loc[b], query_start_loc[b + 1])
        new = part.stop - part.start
        if new:
            out[part] = attend(query[part], key[part], value[part], one_sequence(batch, b), length - new)
    return out


@dataclasses.dataclass(frozen=True)
class BoundStream:
    """A stream for one layer: transforms and codec with their tensors.

    Attention happens in one basis: that of the stored tensors; or the model's own where keys are stored unrotated, since one
    query cannot serve keys that are rotated by different angles when they are read. `forward`, `dual` and `inverse` lead into
    that basis and out of it.
    """

    spec: Stream
    codec: BoundCodec
    transforms: tuple[BoundTransform, ...]
    rope: Rope | None = None  # of a stream whose keys are stored unrotated

    @staticmethod
    def of(
        spec: Stream,
        head_dim: int,
        dtype: str,
        device: torch.device | str,
        tensors: Mapping[str, Tensor] | None = None,
        rope: Rope | None = None,
    ) -> BoundStream:
        tensors = {name: tensor.to(device) for name, tensor in (tensors or {}).items()}
        transforms = tuple(
            transform.bind(head_dim, _below(tensors, f"transforms[{i}]."), device)
            for i, transform in enumerate(spec.transforms)
        )
        if spec.rope == "post":
            rope = None
        elif rope is None:
            raise ValueError("keys are stored unrotated: the layer's rope is needed, got none")
        else:
            rope = Rope(rope.inv_freq.to(device), rope.first)
        return BoundStream(spec, spec.codec.bind(head_dim, _below(tensors, "codec."), dtype), transforms, rope)

    def forward(self, x: Tensor) -> Tensor:
        """Keys or values into the basis of attention: [..., heads, head_dim]."""
        return x if self.rope is not None else self._forward(x)

    def dual(self, q: Tensor) -> Tensor:
        """Queries into the basis of attention: [..., heads, queries per head, head_dim]."""
        return q if self.rope is not None else self._dual(q)

    def inverse(self, o: Tensor) -> Tensor:
        """Outputs out of the basis of attention: [..., heads, queries per head, head_dim]."""
        return o if self.rope is not None else self._inverse(o)

    def mean_logit(self, q: Tensor) -> Tensor | None:
        """q . mu, which removing the key mean took off every logit of a query: [..., heads, queries per head], or None where no
        mean is removed. It is the same for all keys."""
        found: Tensor | None = None
        if self.rope is None:
            for transform in self.transforms:
                here = transform.mean_logit(q)
                found = here if found is None else found if here is None else found + here
                q = transform.dual(q)
        return found

    def rope_block_start(self, position: Tensor) -> Tensor:
        """First position of the RoPE block of each of these positions of a sequence: keys are stored rotated by minus its
        angle."""
        assert self.rope is not None
        return (position + self.rope.first) // self.spec.effective_rope_block * self.spec.effective_rope_block

    def stored(self, x: Tensor, position: Tensor) -> Tensor:
        """Keys or values at these positions as they are stored: unrotated, then transformed. [tokens, heads, head_dim]."""
        return self._forward(x if self.rope is None else self.rope.rotate(x, -self.rope_block_start(position)))

    def windowed(self, x: Tensor, position: Tensor) -> Tensor:
        """Keys or values at these positions as overlays hold them, before they are rounded: [tokens, heads, head_dim]."""
        return x if self.spec.raw_window else self.stored(x, position)

    def probes(self, q: Tensor, position: Tensor) -> Tensor:
        """Queries in the basis of the stored keys: [tokens, heads, queries per head, head_dim]."""
        return self._dual(q if self.rope is None else self.rope.rotate(q, -self.rope_block_start(position)))

    def attended(self, x: Tensor, position: Tensor) -> Tensor:
        """Stored keys or values in the basis of attention: [tokens, ..., heads, head_dim]."""
        if self.rope is None:
            return x
        return self.rope.rotate(self._inverse(x[..., None, :])[..., 0, :], self.rope_block_start(position))

    def attended_window(self, x: Tensor, position: Tensor) -> Tensor:
        """Keys or values of an overlay in the basis of attention: [tokens, ..., heads, head_dim]."""
        return x if self.spec.raw_window else self.attended(x, position)

    def _forward(self, x: Tensor) -> Tensor:
        for transform in self.transforms:
            x = transform.forward(x)
        return x

    def _dual(self, q: Tensor) -> Tensor:
        for transform in self.transforms:
            q = transform.dual(q)
        return q

    def _inverse(self, o: Tensor) -> Tensor:
        for transform in reversed(self.transforms):
            o = transform.inverse(o)
        return o


class Derived:
    """What an implementation derives from a layer's store: matrices, tables, structures for compiled code. Each implementation
    has a subclass of its own, and a store holds one object of each, made at the first `LayerStore.derive`."""

    @classmethod
    def of(cls, store: LayerStore) -> Self:
        raise NotImplementedError(f"{cls.__name__} must say how it is made from a store")


D = TypeVar("D", bound=Derived)


@dataclasses.dataclass
class LayerStore:
    """One layer's pages and overlays, the full-precision tokens beside them. Overlays are stored transformed, like the pages; those
    of keys that are stored unrotated and token by token hold them as the model gave them (`Stream.raw_window`)."""

    layout: Layout
    key: BoundStream
    value: BoundStream
    pages: Tensor  # uint8 [pages, heads, page_head_bytes]
    overlays: dict[StreamName, Tensor]  # [overlay rows, overlay tokens, heads, head_dim]
    states: dict[StreamName, Tensor]  # float32 [overlay rows, heads, ...]: what a stream's corrector remembers
    derived: dict[type[Derived], Derived] = dataclasses.field(default_factory=dict)  # by `derive`
    flash: Flash = TORCH  # fused attention over unpacked tokens; an engine may bring a faster one

    @staticmethod
    def allocate(
        layout: Layout,
        pages: int,
        overlay_rows: int,
        device: torch.device | str = "cpu",
        tensors: Mapping[str, Tensor] | None = None,
        rope: Rope | None = None,
    ) -> LayerStore:
        streams = {
            name: BoundStream.of(stream, layout.head_dim, layout.dtype, device, _below(tensors, f"{name}."), rope)
            for name, stream in layout.recipe.streams.items()
        }
        return LayerStore(
            layout,
            streams["key"],
            streams["value"],
            torch.empty(pages, layout.heads, layout.page_head_bytes, dtype=torch.uint8, device=device),
            {name: empty_overlay(layout, name, overlay_rows, device) for name in streams},
            empty_states(layout, overlay_rows, device),
        )

    def stream(self, name: StreamName) -> BoundStream:
        return self.key if name == "key" else self.value

    def derive(self, kind: type[D]) -> D:
        """The object of this type that belongs to the store; made at the first call."""
        found = self.derived.get(kind)
        if found is None:
            found = self.derived[kind] = kind.of(self)
        assert isinstance(found, kind)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that torch allocated for this layer."""
        return self.pages.nbytes + sum(owned.nbytes for owned in self.owned)

    @property
    def owned(self) -> list[Tensor]:
        """Tensors with a row for every sequence: [overlay rows, ...]."""
        return [*self.overlays.values(), *self.states.values()]


def check_queries(query: Tensor, layout: Layout, types: Collection[str]) -> None:
    """Refuses decode queries that kernels for these types and this layout cannot read: [sequences, query heads, head_dim]."""
    if NAMES.get(query.dtype) not in types:
        raise ValueError(f"queries must be {', '.join(types)}, got {query.dtype}")
    shape = query.shape
    if len(shape) != 3 or shape[1] % layout.heads or shape[2] != layout.head_dim:
        raise ValueError(
            f"queries must be [sequences, a multiple of {layout.heads} heads, {layout.head_dim}], got {list(shape)}"
        )


def check_sink_logits(sink_logits: Tensor | None, query: Tensor) -> Tensor | None:
    """The model's sink logits as kernels read them, float32 [query heads], contiguous; refuses another shape or device."""
    if sink_logits is None:
        return None
    if sink_logits.shape != query.shape[1:2] or sink_logits.device != query.device:
        raise ValueError(
            f"sink_logits must be [{query.shape[1]} query heads] on {query.device}, got {list(sink_logits.shape)} on "
            f"{sink_logits.device}"
        )
    return sink_logits.detach().float().contiguous()


def empty_overlay(layout: Layout, name: StreamName, overlay_rows: int, device: torch.device | str) -> Tensor:
    shape = overlay_rows, layout.overlay_tokens(name), layout.heads, layout.head_dim
    return torch.empty(shape, dtype=layout.window_dtype(name), device=device)


def as_held(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as an overlay of this type holds them. fp8 has no infinity: what is beyond its largest number becomes that."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def empty_states(layout: Layout, overlay_rows: int, device: torch.device | str) -> dict[StreamName, Tensor]:
    shapes = {name: layout.state_shape(name) for name in layout.recipe.streams}
    return {
        name: torch.empty(overlay_rows, layout.heads, *shape, dtype=torch.float32, device=device)
        for name, shape in shapes.items()
        if shape is not None
    }


def _below(tensors: Mapping[str, Tensor] | None, prefix: str) -> dict[str, Tensor]:
    """Calibrated tensors of one stream or part, by their names in it."""
    return {key[len(prefix) :]: value for key, value in (tensors or {}).items() if key.startswith(prefix)}
