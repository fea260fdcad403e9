"""A step's sequences as vLLM describes them -> what kvant's operations are told of them.

Sequences with one new token come first and are decodes; the others are prefills. The order in which a layer works on them
follows from two facts. A prefill reads the history of its sequence as it was before its new tokens, whose ring of recent tokens
they overwrite. And vLLM lets a sequence share a block that another one writes in this very step, so all pages are written
before anything is read. Hence: first everything of decodes and of prefills without history, and the pages of the other
prefills; then attention; then the windows of those other prefills. Each is given its own tokens and no others, as far as they
lie side by side: packing a token costs the same whether it is kept or not.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from kvant.engines.vllm.bind import Layers, check_block
from kvant.engines.vllm.windows import Found, Windows
from kvant.ops import PagedBatch
from kvant.ops.types import COUNTERS

Tensor = torch.Tensor


class Part(NamedTuple):
    """Sequences side by side, and their new tokens among the step's. Slots of -1 are tokens that are not meant."""

    tokens: slice
    batch: PagedBatch


@dataclasses.dataclass
class Step(AttentionMetadata):
    """One forward pass. Tokens of decodes come first; the rest are those of prefills."""

    tokens: int
    batch: PagedBatch  # all sequences
    appends: list[Part]  # what is written first, with windows
    decodes: int  # sequences, and tokens
    found: Found | None
    windows: Windows | None
    prefill: PagedBatch | None = None  # the other sequences; their lengths and starts lie on the host
    history: bool = False  # whether any of them has one
    last: Part | None = None  # prefills whose windows are written last

    @functools.cached_property
    def decoding(self) -> PagedBatch:
        """The sequences that are decodes."""
        b, n = self.batch, self.decodes
        ring_start = {name: ring_start[:n] for name, ring_start in b.ring_start.items()}
        return PagedBatch(
            b.block_table[:n],
            b.seq_lens[:n],
            b.slot_mapping[:n],
            b.query_start_loc[: n + 1],
            b.overlay_rows[:n],
            b.sinks[:n],
            ring_start,
        )


class KvantBuilder(AttentionMetadataBuilder[Step]):
    """Makes a Step of vLLM's metadata, without waiting for the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_block(kv_cache_spec.block_size)
        context = vllm_config.compilation_config.static_forward_context
        self.attention = [context[name] for name in layer_names]
        layers: Layers = self.attention[0].impl.layers
        assert sorted(layers.names) == sorted(layer_names), (layers.names, layer_names)
        self.layers, self.device = layers, torch.device(device)
        for store in (*layers.stores, *layers.pages_only):  # pages of a cache that vLLM made to measure with
            store.pages = store.pages.new_empty(0, *store.pages.shape[1:])
        self.windows: Windows | None = None
        self.graphs = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER
        self._kept: dict[str, Tensor] = {}
        if self.graphs and self.device.type == "cuda":
            heads = max(layer.impl.num_heads for layer in self.attention)
            layers.counters = torch.zeros(
                self._room("seq_lens")[0] * heads * COUNTERS, dtype=torch.int32, device=self.device
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        context = vllm_config.compilation_config.static_forward_context.values()
        found = [layer.impl.layers for layer in context if getattr(getattr(layer, "impl", None), "layers", None)]
        kernels = {group.ops[op].name for group in found for op in ("append", "decode")}
        return cls._cudagraph_support if kernels == {"cuda"} else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        m = common_attn_metadata
        host = m.query_start_loc_cpu[: m.num_reqs + 1].long()
        several = (host.diff() > 1).nonzero()
        count, tokens = m.num_reqs, int(host[-1])
        decodes = count if not len(several) else int(several[0])
        captured = self.graphs and decodes == count  # may be, in a graph, padding and all
        if captured:
            tokens = m.num_actual_tokens
        table = m.block_table_tensor[:count]
        if self.device.type == "cpu":  # kernels on a GPU look at lengths; plain torch looks at every page
            table = table[:, : max(1, -(-int(m.max_seq_len) // self.layers.layout.page_tokens))]
        table = self._stay("table", table)
        seq_lens = self._stay("seq_lens", m.seq_lens[:count])
        query_start_loc = self._stay("query_start_loc", m.query_start_loc[: count + 1])
        slot_mapping = self._stay("slot_mapping", m.slot_mapping[:tokens])
        found = self._rows(table, seq_lens, query_start_loc, slot_mapping, not captured)
        nothing = torch.zeros(count, dtype=torch.int64, device=self.device)
        overlay_rows, sinks, since = (nothing,) * 3 if found is None else found[:3]
        batch = PagedBatch(
            table,
            seq_lens,
            slot_mapping,
            query_start_loc,
            self._stay("overlay_rows", overlay_rows),
            self._stay("sinks", sinks),
            dict.fromkeys(("key", "value"), self._stay("since", since)),  # type: ignore[arg-type]
        )
        step = Step(tokens, batch, [Part(slice(0, tokens), batch)], decodes, found, self.windows)
        if decodes < count:
            self._split(step, host, m)
        return step

    def _split(self, step: Step, host: Tensor, m: Any) -> None:
        """Adds what concerns prefills."""
        batch, first = step.batch, step.decodes
        sure = getattr(m, "seq_lens_cpu_upper_bound", None)
        if self.device.type == "cpu" or sure is None or self.layers.drafts:
            sure = m.seq_lens.cpu()
        seq_lens, query_start_loc = sure[first : m.num_reqs].long(), host[first:] - host[first]
        counts = query_start_loc.diff()
        older = seq_lens > counts
        step.history = bool(older.any())
        step.prefill = batch._replace(
            block_table=batch.block_table[first:],
            seq_lens=seq_lens,
            slot_mapping=batch.slot_mapping[int(host[first]) :],
            query_start_loc=query_start_loc,
            overlay_rows=batch.overlay_rows[first:],
            sinks=batch.sinks[first:],
            ring_start={name: ring_start[first:] for name, ring_start in batch.ring_start.items()},
        )
        if not (step.history and self.layers.ring):
            return
        places = older.nonzero()[:, 0] + first
        low, high = int(places[0]), int(places[-1]) + 1
        part = _part(batch, host, low, high)
        step.appends = [_part(batch, host, i, j) for i, j in ((0, low), (high, m.num_reqs)) if host[i] < host[j]]
        step.last = part
        if len(places) < high - low:  # others lie between them
            mask = torch.zeros(part.tokens.stop - part.tokens.start, dtype=torch.bool)
            for b in places.tolist():
                mask[int(host[b]) - part.tokens.start : int(host[b + 1]) - part.tokens.start] = True
            mask = mask.to(self.device)
            both = (torch.where(here, part.batch.slot_mapping, -1) for here in (~mask, mask))
            between, last = (Part(part.tokens, part.batch._replace(slot_mapping=slot_mapping)) for slot_mapping in both)
            step.appends.append(between)
            step.last = last

    def _rows(
        self, table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor, late: bool
    ) -> Found | None:
        if not self.layers.windowed:
            return None
        if self.windows is None:
            pages = self.attention[0].kv_cache
            self.windows = Windows(self.layers.layout, pages.shape[0], self.layers.overlays, self.layers.drafts)
        return self.windows.step(table, seq_lens, query_start_loc, slot_mapping, late)

    def _stay(self, name: str, x: Tensor) -> Tensor:
        """A tensor as int64; on a GPU at an address that stays, for graphs that have been captured."""
        if self.device.type == "cpu":
            return x.long()
        if name not in self._kept:
            self._kept[name] = torch.zeros(self._room(name), dtype=torch.int64, device=self.device)
        kept = self._kept[name]
        if name == "table":  # what lies beyond the longest sequence is never read
            x = x[:, : kept.shape[1]]
            kept[: len(x), : x.shape[1]] = x
            return kept[: len(x)]
        kept[: len(x)] = x
        # a graph reads what it was captured with: sequences and tokens that are not there now do nothing
        rest = kept[len(x) :]
        rest.copy_(x[-1]) if name == "query_start_loc" else rest.fill_(-1 if name == "slot_mapping" else 0)
        return kept[: len(x)]

    def _room(self, name: str) -> tuple[int, ...]:
        """Shape that holds the largest step."""
        config = self.vllm_config
        largest = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
        sequences = max(config.scheduler_config.max_num_seqs, largest) + 1
        if name == "slot_mapping":
            return (max(config.scheduler_config.max_num_batched_tokens, largest) + 1,)
        pages = -(-config.model_config.max_model_len // self.layers.layout.page_tokens) + 2
        return (sequences, pages) if name == "table" else (sequences,)


def _part(batch: PagedBatch, host: Tensor, first: int, last: int) -> Part:
    """Sequences [first, last) of a batch whose starts lie on the host, too."""
    tokens, at = slice(int(host[first]), int(host[last])), slice(first, last)
    part = batch._replace(
        block_table=batch.block_table[at],
        seq_lens=batch.seq_lens[at],
        slot_mapping=batch.slot_mapping[tokens],
        query_start_loc=batch.query_start_loc[first : last + 1] - tokens.start,
        overlay_rows=batch.overlay_rows[at],
        sinks=batch.sinks[at],
        ring_start={name: ring_start[at] for name, ring_start in batch.ring_start.items()},
    )
    return Part(tokens, part)
