"""Converts vLLM's attention metadata of a step to kvant's Step. A block of vLLM is a page of kvant."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from kvant.engines.vllm.checks import check_block
from kvant.engines.vllm.metrics import MissedSinks
from kvant.ops import PagedBatch
from kvant.ops.cuda.overlay_step import Inputs
from kvant.ops.types import COUNTERS
from kvant.serving.layer_group import LayerGroup
from kvant.serving.overlay import OverlayMatch, OverlayRows
from kvant.serving.step import Part, Step, decode_queries
from kvant.serving.step_tensors import STREAMS, StepTensors, left_pages

Tensor = torch.Tensor


@dataclasses.dataclass
class KvantMetadata(Step, AttentionMetadata):
    """A Step, as the metadata that vLLM passes to every layer."""


class KvantBuilder(AttentionMetadataBuilder[KvantMetadata]):
    """Makes a Step from vLLM's metadata, without waiting for the device.

    vLLM calls `build` on the host before every forward pass, whether the pass then replays a graph or not. So what a step needs is
    computed before the graph: on a GPU by one kernel, which reads vLLM's tensors and writes kvant's at fixed addresses, where a graph
    reads them. Nothing that the host decides depends on lengths, except how prompts are split off (`_split`).

    Sequences with at most `queries` new tokens are decodes, whether these are drafts or the end of a prompt: vLLM replays the
    same graph for both.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1
    queries: int = 1  # new tokens of a sequence that is a decode, at most

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self.attention = [context[name] for name in layer_names]
        layers: LayerGroup = self.attention[0].impl.layers.part(layer_names)
        for layer, name in zip(self.attention, layer_names, strict=True):
            layer.impl.layers, layer.impl.place = layers, layers.names.index(name)
        check_block(kv_cache_spec.block_size, layers.layout.page_tokens)  # of the blocks that the kernels see
        if not hasattr(
            AttentionBackend, "customize_spec"
        ):  # 0.26; later versions ask with the size that a group's blocks have
            check_block(vllm_config.cache_config.block_size, layers.block_tokens)
        padded, bare = (getattr(kv_cache_spec, name, None) for name in ("page_size_padded", "unpadded_page_size_bytes"))
        if padded is not None and padded != bare:
            raise ValueError(
                f"vLLM pads the pages of recipe {layers.layout.recipe.name} from {bare} to {padded} bytes, since another kind of "
                "cache has larger blocks, and kvant reads no padded pages. A draft in 16 bits does that where there are sliding "
                "windows or layers that are not attention: speculation by ngram is served there"
            )
        self.layers, self.device = layers, torch.device(device)
        self.queries = self.reorder_batch_threshold = decode_queries(layers.drafts)
        # pages of a block that vLLM has not split; 1 on a GPU
        self.split = kv_cache_spec.block_size // layers.layout.page_tokens
        assert self.split == 1 or self.device.type == "cpu"
        for store in (
            *layers.stores,
            *layers.pages_only,
        ):  # drop the pages with which vLLM profiled memory
            store.pages = store.pages.new_empty(0, *store.pages.shape[1:])
        self.overlay: OverlayRows | None = None
        self.missed = MissedSinks()
        self.graphs = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER
        self.tensors: StepTensors | None = None
        if self.graphs and self.device.type == "cuda":
            heads = max(layer.impl.num_heads for layer in self.attention)
            layers.counters = torch.zeros(
                (self._room()[0] + 1) * heads * self.queries * COUNTERS, dtype=torch.int32, device=self.device
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        context = vllm_config.compilation_config.static_forward_context.values()
        found = [layer.impl.layers for layer in context if getattr(getattr(layer, "impl", None), "layers", None)]
        kernels = [group.ops[op] for group in found for op in ("append", "decode")]
        capturable = bool(kernels) and all(kernel.capturable for kernel in kernels)
        if capturable and all(decode_queries(group.drafts) > 1 for group in found):
            return AttentionCGSupport.UNIFORM_BATCH
        return cls._cudagraph_support if capturable else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KvantMetadata:
        m = common_attn_metadata
        host = m.query_start_loc_cpu[: m.num_reqs + 1].long()
        counts = host.diff()
        several = (counts > self.queries).nonzero()
        count, tokens = m.num_reqs, int(host[-1])
        decodes = count if not len(several) else int(several[0])
        counts, decoded = counts[:decodes], int(host[decodes])
        most = max(1, int(counts.max())) if decodes else 1
        # this step may replay a graph, with padding up to the graph's size: sequences without tokens
        captured = self.graphs and decodes == count and bool(((counts == most) | (counts == 0)).all())
        captured = captured and (most == 1 or m.num_actual_tokens == count * most)
        if captured:
            tokens, decoded = m.num_actual_tokens, count * most
        inputs = Inputs(
            m.block_table_tensor[:count], m.seq_lens[:count], m.query_start_loc[: count + 1], m.slot_mapping[:tokens]
        )
        batch, match = self._prepared(inputs, int(m.max_seq_len), not captured)
        if self.overlay is not None:
            self.missed.report(self.overlay)
        step = KvantMetadata(
            tokens, batch, [Part(slice(0, tokens), batch)], decodes, match, self.overlay, decoded=decoded
        )
        if decoded != decodes * most:
            step.counts = counts
        if decodes < count:
            self._split(step, host, m)
        return step

    def _split(self, step: Step, host: Tensor, m: Any) -> None:
        """Adds the prefills' part of a step."""
        lens = getattr(m, "seq_lens_cpu_upper_bound", None)
        if self.device.type == "cpu" or lens is None or self.layers.drafts:  # drafts make the bound inexact
            lens = m.seq_lens.cpu()
        own = self.layers
        sink = self.overlay.sink if self.overlay is not None and self.overlay.early else 0
        step.split(host, lens[step.decodes : m.num_reqs].long(), own.ring, own.groupwise, own.room, sink)

    def _prepared(self, inputs: Inputs, longest: int, late: bool) -> tuple[PagedBatch, OverlayMatch | None]:
        """The batch of a step with its overlay rows, on a GPU at fixed addresses."""
        if self.layers.has_overlay and self.overlay is None:
            pages, own = len(self.attention[0].kv_cache) * self.split, self.layers
            self.overlay = own.rows = OverlayRows(
                own.layout, pages, own.overlays, own.drafts, own.sinks, own.sliding_window
            )
        if self.device.type != "cpu":
            if self.tensors is None:
                size, window = self.layers.layout.page_tokens, self.layers.sliding_window
                self.tensors = StepTensors(*self._room(), size, self.device, sliding_window=window)
            return self.tensors.prepare(inputs, self.overlay, late)
        # kernels on a GPU stop at seq_lens; plain torch reads every page of the table
        width = max(1, -(-longest // self.layers.layout.page_tokens))
        table, seq_lens, query_start_loc, slot_mapping = (x.long() for x in inputs)
        if self.split > 1:
            table = (table[:, :, None] * self.split + torch.arange(self.split)).flatten(1)
        table = table[:, :width].contiguous()
        match = None
        rows = sinks = ring_start = torch.zeros_like(seq_lens)
        if self.overlay is not None:
            match = self.overlay.step(table, seq_lens, query_start_loc, slot_mapping, late)
            rows, sinks, ring_start = match[:3]
        if (window := self.layers.sliding_window) is not None:
            left = left_pages(width, seq_lens, query_start_loc, window, self.layers.layout.page_tokens)
            table = table.masked_fill(left, -1)
        starts = dict.fromkeys(STREAMS, ring_start)
        return PagedBatch(table, seq_lens, slot_mapping, query_start_loc, rows, sinks, starts), match

    def _room(self) -> tuple[int, int, int]:
        """Sequences, pages of a sequence and new tokens of the largest step."""
        config = self.vllm_config
        largest = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
        sequences = max(config.scheduler_config.max_num_seqs, largest)
        pages = -(-config.model_config.max_model_len // self.layers.layout.page_tokens) + 2
        return sequences, pages, max(config.scheduler_config.max_num_batched_tokens, largest) + 1
