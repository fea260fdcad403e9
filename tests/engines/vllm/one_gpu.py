"""Ranks of tensor parallelism that share a GPU. NCCL refuses two ranks on one device, so they talk through the host, by
Gloo: vLLM's worker with another communicator. Nothing here can be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.v1.worker.gpu_worker import Worker

Tensor = torch.Tensor


class HostCommunicator(DeviceCommunicatorBase):
    """Collective operations of tensors that are copied to the host and back."""

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        mine = x.contiguous().cpu()
        bits = mine.view(torch.uint8) if mine.dim() else mine
        found = [torch.empty_like(bits) for _ in range(self.world_size)]
        dist.all_gather(found, bits, group=self.cpu_group)
        return [each.view(mine.dtype).to(x.device) for each in found]

    def all_reduce(self, input_: Tensor) -> Tensor:
        return torch.stack([each.float() for each in self._gathered(input_)]).sum(0).to(input_.dtype)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._gathered(input_), dim)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        found = self.all_gather(input_, dim)
        return found if self.rank_in_group == dst else None

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        return self.all_reduce(input_).chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor.copy_(self._gathered(tensor)[src])


class OneGpuWorker(Worker):
    """vLLM's worker, every rank on the first GPU."""

    def init_device(self) -> Any:
        from vllm.platforms import current_platform

        self.parallel_config.assigned_physical_gpu_ids = [0] * self.parallel_config.world_size
        current_platform.dist_backend = "gloo"
        current_platform.get_device_communicator_cls = lambda: f"{__name__}.{HostCommunicator.__name__}"
        return super().init_device()
