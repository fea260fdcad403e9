"""Converts vLLM's attention metadata of a step to kvant's Step. A block of vLLM is a page of kvant."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from kvant.engines.vllm.bind import check_block
from kvant.ops import PagedBatch
from kvant.ops.types import COUNTERS
from kvant.serving.layer_group import LayerGroup
from kvant.serving.overlay import OverlayMatch, OverlayRows
from kvant.serving.step import Part, Step

Tensor = torch.Tensor


@dataclasses.dataclass
class KvantMetadata(Step, AttentionMetadata):
    """A Step, as the metadata that vLLM passes to every layer."""


class KvantBuilder(AttentionMetadataBuilder[KvantMetadata]):
    """Makes a Step from vLLM's metadata, without waiting for the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_block(kv_cache_spec.block_size)
        context = vllm_config.compilation_config.static_forward_context
        self.attention = [context[name] for name in layer_names]
        layers: LayerGroup = self.attention[0].impl.layers
        assert sorted(layers.names) == sorted(layer_names), (layers.names, layer_names)
        self.layers, self.device = layers, torch.device(device)
        for store in (
            *layers.stores,
            *layers.pages_only,
        ):  # drop the pages with which vLLM profiled memory
            store.pages = store.pages.new_empty(0, *store.pages.shape[1:])
        self.overlay: OverlayRows | None = None
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
        kernels = [group.ops[op] for group in found for op in ("append", "decode")]
        capturable = bool(kernels) and all(kernel.capturable for kernel in kernels)
        return cls._cudagraph_support if capturable else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KvantMetadata:
        m = common_attn_metadata
        host = m.query_start_loc_cpu[: m.num_reqs + 1].long()
        several = (host.diff() > 1).nonzero()
        count, tokens = m.num_reqs, int(host[-1])
        decodes = count if not len(several) else int(several[0])
        captured = self.graphs and decodes == count  # this step may replay a graph, with padding up to the graph's size
        if captured:
            tokens = m.num_actual_tokens
        table = m.block_table_tensor[:count]
        if self.device.type == "cpu":  # kernels on a GPU stop at seq_lens; plain torch reads every page of the table
            table = table[:, : max(1, -(-int(m.max_seq_len) // self.layers.layout.page_tokens))]
        table = self._stay("table", table)
        seq_lens = self._stay("seq_lens", m.seq_lens[:count])
        query_start_loc = self._stay("query_start_loc", m.query_start_loc[: count + 1])
        slot_mapping = self._stay("slot_mapping", m.slot_mapping[:tokens])
        match = self._rows(table, seq_lens, query_start_loc, slot_mapping, not captured)
        nothing = torch.zeros(count, dtype=torch.int64, device=self.device)
        overlay_rows, sinks, ring_start = (nothing,) * 3 if match is None else match[:3]
        batch = PagedBatch(
            table,
            seq_lens,
            slot_mapping,
            query_start_loc,
            self._stay("overlay_rows", overlay_rows),
            self._stay("sinks", sinks),
            dict.fromkeys(("key", "value"), self._stay("ring_start", ring_start)),  # type: ignore[arg-type]
        )
        step = KvantMetadata(tokens, batch, [Part(slice(0, tokens), batch)], decodes, match, self.overlay)
        if decodes < count:
            self._split(step, host, m)
        return step

    def _split(self, step: Step, host: Tensor, m: Any) -> None:
        """Adds the prefills' part of a step."""
        lens = getattr(m, "seq_lens_cpu_upper_bound", None)
        if self.device.type == "cpu" or lens is None or self.layers.drafts:  # drafts make the bound inexact
            lens = m.seq_lens.cpu()
        step.split(host, lens[step.decodes : m.num_reqs].long(), self.layers.ring)

    def _rows(
        self, table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor, late: bool
    ) -> OverlayMatch | None:
        if not self.layers.has_overlay:
            return None
        if self.overlay is None:
            pages = self.attention[0].kv_cache
            self.overlay = OverlayRows(self.layers.layout, pages.shape[0], self.layers.overlays, self.layers.drafts)
        return self.overlay.step(table, seq_lens, query_start_loc, slot_mapping, late)

    def _stay(self, name: str, x: Tensor) -> Tensor:
        """A tensor as int64; on a GPU at a fixed address, for graphs that have been captured."""
        if self.device.type == "cpu":
            return x.long()
        if name not in self._kept:
            self._kept[name] = torch.zeros(self._room(name), dtype=torch.int64, device=self.device)
        kept = self._kept[name]
        if name == "table":  # pages beyond the longest sequence are never read
            x = x[:, : kept.shape[1]]
            kept[: len(x), : x.shape[1]] = x
            return kept[: len(x)]
        kept[: len(x)] = x
        # A graph reads as many sequences and tokens as it was captured with: the padding must have no effect.
        rest = kept[len(x) :]
        rest.copy_(x[-1]) if name == "query_start_loc" else rest.fill_(-1 if name == "slot_mapping" else 0)
        return kept[: len(x)]

    def _room(self, name: str) -> tuple[int, ...]:
        """Shape of this tensor in the largest step."""
        config = self.vllm_config
        largest = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
        sequences = max(config.scheduler_config.max_num_seqs, largest) + 1
        if name == "slot_mapping":
            return (max(config.scheduler_config.max_num_batched_tokens, largest) + 1,)
        pages = -(-config.model_config.max_model_len // self.layers.layout.page_tokens) + 2
        return (sequences, pages) if name == "table" else (sequences,)
