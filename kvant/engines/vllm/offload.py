"""vLLM's offloading connector, which moves pages to CPU memory and back, beside kvant's overlay rows.

Pages are moved as they are. Where a recipe keeps no token in full precision that is all. Otherwise two things are left to do in the
worker, when vLLM asks its `OffloadingWorker` for a transfer:

1. The sinks of a sequence's first page are copied to CPU memory with the page, and back into a sink row.
2. What is recorded of a page, such as the sequence that wrote it last, is void once other bytes are loaded into it.

`bind` makes vLLM use `KvantOffloadingSpec`, which wraps the spec that was asked for. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvant.engines.vllm.options import SPEC
from kvant.serving.layer_group import LayerGroup
from kvant.serving.overlay import SavedSinks

ASKED = "kvant_spec_name"  # key of kv_connector_extra_config: the spec that was asked for

_bound: list[LayerGroup] = []  # of this process's model


def use(extra_config: dict[str, Any], groups: list[LayerGroup]) -> None:
    """Makes the offloading connector of this process keep the sinks of these layers."""
    _bound[:] = groups
    extra_config.setdefault(ASKED, extra_config.get("spec_name", SPEC))
    extra_config["spec_name"], extra_config["spec_module_path"] = KvantOffloadingSpec.__name__, __name__


def _spec_class(extra_config: Mapping[str, Any]) -> type[OffloadingSpec]:
    """The class that was asked for."""
    found: type[OffloadingSpec] = OffloadingSpecFactory.get_spec_cls({**extra_config, "spec_name": extra_config[ASKED]})
    return found


class KvantOffloadingSpec(OffloadingSpec):
    """The spec that was asked for, with a worker that moves sinks, too."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = _spec_class(extra_config).build_metric_definitions(extra_config)
        return found

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # vLLM 0.33 asks
        found: tuple[str, ...] = _spec_class(extra_config).config_info_keys(extra_config)
        return found

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = _spec_class(config.extra_config)(config)
        self.replicated_layout = self.inner.replicated_layout
        self._wrapped: SinkOffloadingWorker | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def get_manager(self) -> OffloadingManager:
        return self.inner.get_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._wrapped is None:
            groups = [[g for g in _bound if set(g.names) & set(each.layer_names)] for each in self.config.groups]
            pages = [each.tokens_per_block for each in self.config.groups]
            self._wrapped = SinkOffloadingWorker(self.inner.get_worker(kv_caches), groups, pages, self.blocks_per_chunk)
        return self._wrapped


class SinkOffloadingWorker(OffloadingWorker):
    """A worker that moves the sinks of first pages with them.

    groups            of every group of vLLM's allocator: the layers that kvant serves alike.
    tokens_per_block  of the same groups.
    blocks_per_chunk  blocks of vLLM that are stored under one number in CPU memory.
    """

    def __init__(
        self,
        inner: OffloadingWorker,
        groups: list[list[LayerGroup]],
        tokens_per_block: list[int],
        blocks_per_chunk: int,
    ) -> None:
        self.inner, self.groups = inner, groups
        self.tokens_per_block, self.blocks_per_chunk = tokens_per_block, blocks_per_chunk
        self.saved: dict[
            tuple[int, int], list[SavedSinks | None]
        ] = {}  # by group and chunk: of each of its groups of layers

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for group, first, blocks, chunks in self._transfers(src_spec, dst_spec):
            for chunk in chunks[1 if first % self.blocks_per_chunk else 0 :]:
                self.saved.pop((group, chunk), None)
            if not first:
                saved = [
                    None if layers.rows is None else layers.rows.save_sinks(self._pages(group, layers, blocks[:1])[0])
                    for layers in self.groups[group]
                ]
                self.saved[group, chunks[0]] = saved
        return self.inner.submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **expedited: bool) -> bool:
        """`expedited`, which vLLM has since 0.33: a load that the step waits for."""
        for group, first, blocks, chunks in self._transfers(dst_spec, src_spec):
            saved = self.saved.get((group, chunks[0])) if not first else None
            for i, layers in enumerate(self.groups[group]):
                if layers.rows is None:
                    continue
                pages = self._pages(group, layers, blocks)
                layers.rows.forget(pages)
                sinks = None if saved is None else saved[i]
                if sinks is not None:
                    layers.rows.restore_sinks(pages[0], sinks)
        return self.inner.submit_load(job_id, src_spec, dst_spec, **expedited)

    def _transfers(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> list[tuple[int, int, list[int], list[int]]]:
        """Of every group that a job moves: its number, the place of its first block in the sequence, its blocks, its chunks."""
        assert isinstance(host, BlockIDsLoadStoreSpec), type(host)
        out, block, chunk = [], 0, 0
        for group, (size, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            if not size:
                continue
            count = -(-(first % self.blocks_per_chunk + size) // self.blocks_per_chunk)
            blocks, chunks = (x.block_ids.tolist() for x in (device, host))
            out.append((group, first, blocks[block : block + size], chunks[chunk : chunk + count]))
            block, chunk = block + size, chunk + count
        return out

    def _pages(self, group: int, layers: LayerGroup, blocks: list[int]) -> list[int]:
        """Pages of blocks; a block is one page or several."""
        count = self.tokens_per_block[group] // layers.layout.page_tokens
        return [block * count + i for block in blocks for i in range(count)]

    def get_finished(self) -> list[TransferResult]:
        return self.inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        self.inner.wait(job_ids)

    def shutdown(self) -> None:
        self.saved.clear()
        self.inner.shutdown()
