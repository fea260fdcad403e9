"""The vLLM engine: an attention backend that vLLM finds by its entry points, with no patch and no fork.

    LLM(model, attention_backend="CUSTOM", additional_config={"kvant": {"recipe": "saw-int4"}})

vLLM calls the two entry points below in each of its processes while it starts, so they import little. An unknown version of vLLM
is refused when the backend is first used, so that engines that do not use kvant still start.
"""

from __future__ import annotations

BACKEND = "kvant.engines.vllm.backend.KvantBackend"


def register() -> None:
    """Entry point of `vllm.general_plugins`: offers kvant as the backend called CUSTOM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def platform() -> str | None:
    """Entry point of `vllm.platform_plugins`. vLLM's CPU platform ignores attention_backend and uses its own backend; kvant's
    platform uses the backend that was requested. None where vLLM does not run on a CPU."""
    from vllm.platforms import cpu_platform_plugin

    found = cpu_platform_plugin()
    return "kvant.engines.vllm.cpu.KvantCpuPlatform" if found == "vllm.platforms.cpu.CpuPlatform" else None
