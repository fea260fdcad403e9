"""The vLLM engine: an attention backend that vLLM finds by its entry points, with no patch and no fork.

    LLM(model, attention_backend="CUSTOM", additional_config={"kvant": {"recipe": "saw-int4"}})

vLLM calls the two entry points below in each of its processes while it starts, so they import little. An unknown version of vLLM
is refused when the backend is first used, so that engines that do not use kvant still start.
"""

from __future__ import annotations

import sys
from typing import Any

BACKEND = "kvant.engines.vllm.backend.KvantBackend"
ATTENTION = "vllm.model_executor.layers.attention.attention"  # the module of vLLM's Attention
_watching: list[Any] = []  # the handle of the hook, once it is there


def register() -> None:
    """Entry point of `vllm.general_plugins`: offers kvant as the backend called CUSTOM."""
    from torch.nn.modules.module import register_module_module_registration_hook
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if not _watching:
        _watching.append(register_module_module_registration_hook(watch_layer))


def watch_layer(parent: Any, name: str, layer: Any) -> None:
    """Hook that torch calls with every module that becomes part of another. A model may name an attention backend for its layers,
    whatever was asked for. Where it does so for all of them, vLLM calls nothing else of kvant's, and would serve without it."""
    kind = getattr(sys.modules.get(ATTENTION), "Attention", None)
    if kind is None or not isinstance(layer, kind):
        return
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or getattr(config.attention_config.backend, "name", None) != "CUSTOM":
        return
    from kvant.engines.vllm.checks import check_backend

    check_backend(layer.layer_name, layer)


def platform() -> str | None:
    """Entry point of `vllm.platform_plugins`. vLLM's CPU platform ignores attention_backend and uses its own backend; kvant's
    platform uses the backend that was requested. None where vLLM does not run on a CPU."""
    from vllm.platforms import cpu_platform_plugin

    found = cpu_platform_plugin()
    return "kvant.engines.vllm.cpu.KvantCpuPlatform" if found == "vllm.platforms.cpu.CpuPlatform" else None
