"""vLLM's hooks as kvant uses them: what a release must still look like to be known."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from typing import Any

import pytest
import torch

from tests.engines.vllm.engines import needs_vllm, release

pytestmark = needs_vllm


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_known() -> None:
    from kvant.engines.vllm.versions import KNOWN

    assert release() in KNOWN


def test_backend() -> None:
    from vllm.v1.attention.backend import AttentionBackend, AttentionType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    assert parameters(register_backend)[:2] == ["backend", "class_path"]
    assert AttentionBackendEnum.CUSTOM.name == "CUSTOM"
    assert AttentionType.DECODER == "decoder"
    assert AttentionBackend.forward_includes_kv_cache_update is True
    for name in ("get_name", "get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes"):
        assert callable(getattr(AttentionBackend, name))
    if release() == "0.26":
        assert parameters(AttentionBackend.get_kv_cache_shape) == [
            "num_blocks",
            "block_size",
            "num_kv_heads",
            "head_size",
            "cache_dtype_str",
        ]
        assert not hasattr(AttentionBackend, "customize_spec")
    else:
        assert parameters(AttentionBackend.customize_spec) == ["spec"]
        assert parameters(AttentionBackend.supported_kv_cache_layouts) == []


def test_implementation() -> None:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backend import AttentionImpl

    from kvant.engines.vllm.backend import KvantImpl

    made = [
        "self",
        "num_heads",
        "head_size",
        "scale",
        "num_kv_heads",
        "alibi_slopes",
        "sliding_window",
        "kv_cache_dtype",
    ]
    made += ["logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"]
    assert parameters(AttentionImpl.__init__) == made
    assert parameters(KvantImpl.__init__) == [*made, "sinks", "rest"]
    called = [
        "self",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ]
    assert parameters(AttentionImpl.forward) == parameters(KvantImpl.forward) == called
    assert parameters(AttentionImpl.process_weights_after_loading) == ["self", "act_dtype"]
    assert parameters(Attention.get_kv_cache_spec) == ["self", "vllm_config"]
    assert "get_attn_backend" in vars(Attention)


def test_builder() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

    from kvant.engines.vllm.builder import KvantBuilder

    for builder in (AttentionMetadataBuilder, KvantBuilder):
        assert parameters(builder.__init__) == ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]
        assert parameters(builder.build) == ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
        assert parameters(builder.get_cudagraph_support) == ["vllm_config", "kv_cache_spec"]
    assert {"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"} <= set(AttentionCGSupport.__members__)
    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    used = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs", "max_seq_len"}
    assert used | {"num_actual_tokens", "block_table_tensor", "slot_mapping"} <= fields


@pytest.mark.parametrize("token_bytes", [20, 34, 72])
def test_pages_are_as_large_as_kvants(token_bytes: int) -> None:
    """Each release's way to say how many bytes a token and head have, down to the tensor that a layer is given."""
    from vllm.v1 import kv_cache_interface

    heads, blocks = 3, 5
    if release() == "0.26":
        from types import SimpleNamespace

        from kvant.engines.vllm.backend import KvantBackend, spec_of_0_26

        layer = SimpleNamespace(num_kv_heads=heads, head_size=64)
        config = SimpleNamespace(cache_config=SimpleNamespace(block_size=64))
        spec = spec_of_0_26(layer, token_bytes, config)
        made = type("Made", (KvantBackend,), {"token_bytes": token_bytes})
        assert made.get_kv_cache_shape(blocks, 64, heads, 64) == (blocks, heads, 64, token_bytes)
    else:
        from kvant.engines.vllm.backend import KvantBackend

        made = type("Made", (KvantBackend,), {"token_bytes": token_bytes})
        full = kv_cache_interface.FullAttentionSpec(
            block_size=64, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16
        )
        spec = made.customize_spec(full)
        assert spec.state_content_bytes == token_bytes
    assert spec.dtype == torch.uint8
    assert spec.page_size_bytes == 64 * heads * token_bytes
    assert type(spec).merge([spec, spec]) == spec


def test_offloading() -> None:
    """What kvant/engines/vllm/offload.py wraps, and that the model runner stores pages before a step is prepared."""
    if release() == "0.26":
        pytest.skip("the offloading connector of vLLM 0.26 is refused")
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert OffloadingWorker.__abstractmethods__ == {"submit_store", "submit_load", "get_finished", "wait"}
    assert parameters(OffloadingWorker.submit_store) == ["self", "job_id", "src_spec", "dst_spec"]
    assert parameters(OffloadingWorker.submit_load)[:4] == ["self", "job_id", "src_spec", "dst_spec"]
    assert parameters(OffloadingWorker.submit_load)[4:] in ([], ["expedited"])  # the latter since 0.33
    spec = GPULoadStoreSpec([5, 6, 7], group_sizes=[2, 1], block_indices=[0, 3])
    assert spec.block_ids.tolist() == [5, 6, 7] and list(spec.group_sizes) == [2, 1]
    assert parameters(OffloadingSpecFactory.get_spec_cls) == ["extra_config"]
    assert hasattr(VllmConfig, "use_v2_model_runner")
    steps = inspect.getsource(GPUModelRunner.execute_model)
    assert 0 < steps.index("handle_preemptions(") < steps.index("_build_attention_metadata(")


def test_entry_points() -> None:
    """vLLM finds kvant where it is installed."""
    found = {
        (group, point.value)
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for point in importlib.metadata.entry_points(group=group)
    }
    assert ("vllm.general_plugins", "kvant.engines.vllm:register") in found
    assert ("vllm.platform_plugins", "kvant.engines.vllm:platform") in found
