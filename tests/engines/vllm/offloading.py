"""vLLM's offloading connector without a GPU: its own scheduler and manager, with a worker that copies blocks at once.
vLLM's own worker needs CUDA; on a GPU it is that one which copies, and it is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _ignore(loads: bool, chunk: int, tokens: range) -> None:
    """Nobody asked."""


told: Callable[[bool, int, range], None] = _ignore  # called with every block that is moved

CONFIG = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}


def use_copies(monkeypatch: Any) -> None:
    """Makes the spec CPUOffloadingSpec one that works on a CPU."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    class Copies(OffloadingWorker):
        def __init__(self, kv_caches: Any, tokens: int) -> None:
            self.caches, self.tokens = kv_caches, tokens
            self.chunks: dict[tuple[int, int], list[Any]] = {}  # group and chunk -> bytes of every layer
            self.done: list[int] = []

        def _move(self, job_id: int, device: Any, host: Any, loads: bool) -> bool:
            blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
            for group, size in enumerate(device.group_sizes):
                tensors = [self.caches.tensors[ref.tensor_idx].tensor for ref in self.caches.group_data_refs[group]]
                for _ in range(size):
                    block, chunk = next(blocks), next(chunks)
                    if loads:
                        for x, kept in zip(tensors, self.chunks[group, chunk], strict=True):
                            x[block] = kept
                    else:
                        self.chunks[group, chunk] = [x[block].clone() for x in tensors]
                    told(loads, chunk, range(block * self.tokens, (block + 1) * self.tokens))
            self.done.append(job_id)
            return True

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._move(job_id, src_spec, dst_spec, False)

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._move(job_id, dst_spec, src_spec, True)

        def get_finished(self) -> list[Any]:
            found, self.done = self.done, []
            return [TransferResult(job_id, True) for job_id in found]

        def wait(self, job_ids: set[int]) -> None:
            pass

    class CopyingSpec(CPUOffloadingSpec):
        def get_worker(self, kv_caches: Any) -> OffloadingWorker:
            return Copies(kv_caches, self.tokens_per_block[0])

    monkeypatch.setitem(OffloadingSpecFactory._registry, "CPUOffloadingSpec", lambda: CopyingSpec)


def watch_copies(monkeypatch: Any) -> None:
    """Makes the spec CPUOffloadingSpec tell what its worker copies. On a GPU."""
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    def telling(submit: Callable[..., bool], loads: bool, tokens: int) -> Callable[..., bool]:
        def run(job_id: int, src_spec: Any, dst_spec: Any, **expedited: bool) -> bool:
            blocks, chunks = (dst_spec, src_spec) if loads else (src_spec, dst_spec)
            for block, chunk in zip(blocks.block_ids.tolist(), chunks.block_ids.tolist(), strict=True):
                told(loads, chunk, range(block * tokens, (block + 1) * tokens))
            return submit(job_id, src_spec, dst_spec, **expedited)

        return run

    class WatchedSpec(CPUOffloadingSpec):
        def create_worker(self, kv_caches: Any) -> Any:
            worker, tokens = super().create_worker(kv_caches), self.tokens_per_block[0]
            worker.submit_store = telling(worker.submit_store, False, tokens)
            worker.submit_load = telling(worker.submit_load, True, tokens)
            return worker

    monkeypatch.setitem(OffloadingSpecFactory._registry, "CPUOffloadingSpec", lambda: WatchedSpec)
