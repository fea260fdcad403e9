"""vLLM's CPU platform with a selectable attention backend."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class KvantCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, except that attention_backend="CUSTOM" selects kvant."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not None and selected_backend.name == "CUSTOM":
            return str(selected_backend.get_path())
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
