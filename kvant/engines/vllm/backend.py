"""The attention backend that vLLM calls: kvant's operations on pages that vLLM allocates."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import torch
import vllm
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from kvant.engines.vllm import flash, folding, versions
from kvant.engines.vllm.bind import bind, bind_draft
from kvant.engines.vllm.builder import KvantBuilder, KvantMetadata
from kvant.engines.vllm.checks import check_block
from kvant.engines.vllm.options import PAGE_TOKENS, UNPACKED, cache_dtype_refusal
from kvant.ops import LayerStore
from kvant.serving.layer_group import LayerGroup
from kvant.serving.varlen_prefill import varlen_prefill

Tensor = torch.Tensor
versions.check(vllm.__version__)


class KvantBackend(AttentionBackend):
    """The interface that vLLM calls. Each group of layers with the same recipe and layout has a subclass, which has its page size."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True  # whether append or attention runs first depends on the step
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*UNPACKED]
    token_bytes: ClassVar[int | None] = None  # bytes of one token and head
    page_tokens: ClassVar[int] = PAGE_TOKENS  # tokens of a page, which vLLM calls a kernel block
    block_tokens: ClassVar[int] = PAGE_TOKENS  # vLLM's own blocks have a multiple of so many tokens

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM accepts only names of its own list

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return KvantImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return KvantBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        # where vLLM looks for a size of its own blocks, it has no spec yet (from 0.29 on), or one with a block of a token for layers
        # with a sliding window; 0.26 asks get_preferred_block_size
        unknown = kv_cache_spec is None or kv_cache_spec.block_size == 1
        known = hasattr(AttentionBackend, "customize_spec")
        own = unknown and known
        if known and not own and current_platform.is_cpu():
            from vllm.v1.attention.backend import MultipleOf

            # vLLM on a CPU clears new blocks of hybrid models by their numbers, as if they were not split: the builder splits them
            return [MultipleOf(cls.page_tokens)]
        return [cls.block_tokens if own else cls.page_tokens]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return cls.block_tokens if default_block_size % cls.block_tokens else default_block_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True  # Layout.of refuses a head size that does not fit, with the reason

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True  # the model's own: a logit per query head in the softmax's denominator

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True  # `bind` refuses those that kvant does not serve, with the reason

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return True  # `supports_combination` refuses others, with the reason

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, *rest: Any, **more: Any
    ) -> str | None:
        return None if kv_cache_dtype is None else cache_dtype_refusal(kv_cache_dtype)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    # --- vLLM 0.29 and later -----------------------------------------------------------------------------------------

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)  # the bytes of one block and head are contiguous

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        assert cls.token_bytes is not None, "asked for a page before the weights were loaded"
        if spec.block_size != 1:  # with blocks of one token, vLLM asks for the bytes of a token
            check_block(spec.block_size, cls.block_tokens)
        return dataclasses.replace(spec, dtype=torch.uint8, state_content_bytes=cls.token_bytes)

    # --- vLLM 0.26 -------------------------------------------------------------------------------------------------

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        assert cls.token_bytes is not None, "asked for a page before the weights were loaded"
        return num_blocks, num_kv_heads, block_size, cls.token_bytes


def backend_for(layers: LayerGroup) -> type[KvantBackend]:
    """The backend class of a group of layers. vLLM distinguishes backends by their names."""
    recipe = layers.layout.recipe
    name = f"Kvant_{re.sub(r'[^0-9a-zA-Z]+', '_', recipe.name)}_{recipe.digest[:12]}_{layers.layout.head_dim}"
    if layers.sliding_window is not None:
        name += f"_window_{layers.sliding_window}"
    members: dict[str, Any] = {"token_bytes": layers.token_bytes, "page_tokens": layers.layout.page_tokens}
    members |= {"block_tokens": layers.block_tokens, "__module__": __name__, "__qualname__": name}
    return type(name, (KvantBackend,), members)


def spec_of_0_26(layer: Any, token_bytes: int, vllm_config: Any) -> Any:
    """The KV cache spec of a layer for vLLM 0.26, which asks the layer and not the backend; it counts bytes per token and head."""
    from vllm.v1.kv_cache_interface import TQFullAttentionSpec

    return TQFullAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size,
        dtype=torch.uint8,
        tq_slot_size=token_bytes,
    )


class KvantImpl(AttentionImpl[KvantMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **rest: Any,
    ) -> None:
        odd = {
            "ALiBi": alibi_slopes is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that read other layers' cache": kv_sharing_target_layer_name is not None,
            **{f"attention with {name}": value is not None for name, value in rest.items()},
        }
        for what, asked in odd.items():
            if asked:
                raise ValueError(f"kvant cannot serve this model inside vLLM: it has {what}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks must be [{num_heads} query heads], got {list(sinks.shape)}")
        self.sinks = sinks  # the model's parameter, which is loaded later
        self.sink_logits: Tensor | None = None  # float32 [num_heads], as operations take them
        self.sliding_window = sliding_window  # tokens that a query attends to, itself included
        self.config = get_current_vllm_config()
        self.layers: LayerGroup | None = None
        self.place = -1  # index of this layer in its `layers`
        self.loaded = False
        self.folded = False  # whether the weights beside this layer hold the value transforms, by kvant's doing
        self.parent: Any = None  # weak reference to the module that this layer is an attribute of
        folding.note_parent(self)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The first layer whose weights are loaded binds all layers: layouts, overlays, operations."""
        if self.loaded and self.folded:
            raise RuntimeError(
                "weights were loaded anew after kvant had folded value transforms into them: start the engine with "
                'additional_config={"kvant": {..., "fold": false}} to load weights while it runs'
            )
        self.loaded = True
        if self.sinks is not None:
            if self.sink_logits is None:
                self.sink_logits = torch.empty_like(self.sinks, dtype=torch.float32, requires_grad=False)
            self.sink_logits.copy_(
                self.sinks.detach()
            )  # a graph reads this address, also after weights are loaded anew
        if self.layers is None:
            bind_layers(self.config)
        assert self.layers is not None

    def _store(self, kv_cache: Tensor) -> LayerStore:
        """This layer's store, over the pages that vLLM passes."""
        assert self.layers is not None
        store = self.layers.stores[self.place]
        if store.pages.data_ptr() != kv_cache.data_ptr() or store.pages.numel() != kv_cache.numel():
            layout = store.layout
            assert kv_cache.dtype == torch.uint8 and kv_cache.is_contiguous(), (kv_cache.dtype, kv_cache.stride())
            pages = kv_cache.view(-1, layout.heads, layout.page_head_bytes)
            store.pages = self.layers.pages_only[self.place].pages = pages
        return store

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KvantMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM's profile run, which measures the memory of a step
            if self.layers is not None and self.layers.workspace:
                torch.empty(self.layers.workspace, dtype=torch.uint8, device=query.device)
            return output.fill_(0)
        step, layers = attn_metadata, self.layers
        assert layers is not None and output_scale is None and output_block_scale is None
        store = self._store(kv_cache)
        q, k, v, out = (x[: step.tokens] for x in (query, key, value, output))
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        options |= {"sliding_window": self.sliding_window, "sink_logits": self.sink_logits}
        k, v = (
            layers.readable(k),
            layers.readable(v),
        )  # copies live until decode, which may run beside append, is launched
        for part in step.appends:
            layers.append(store, q, k, v, part)
        if step.match is not None and step.overlay is not None:
            step.overlay.finish_sinks(self.place, step.match)
        if step.last is not None:  # after the sinks: rows may be copied, see append_pages
            layers.append_pages(self.place, q, k, v, step.last)
        n = step.decode_tokens
        if step.prefill is None:
            batch = step.batch if step.counts is None else step.decoding
            layers.decode(store, q[:n], batch, out[:n], after_append=step.last is None, **options)
            return output
        if step.history:
            out[n:] = layers.ops["prefill"].run(store, q[n:], k[n:], v[n:], step.prefill, **options)
        else:
            starts = step.prefill.query_start_loc
            out[n:] = varlen_prefill(q[n:], k[n:], v[n:], starts, **options, fused=flash.varlen())
        if n:
            layers.decode(store, q[:n], step.decoding, out[:n], after_append=False, **options)
        if step.last is not None:
            layers.append_overlays(self.place, q, k, v, step.last)
        return output


def bind_layers(config: Any) -> None:
    """Gives every attention layer of a model its store, and the backend with its page size. Layers that come when others have theirs
    are those of a draft."""
    context = config.compilation_config.static_forward_context
    found = {name: layer for name, layer in context.items() if isinstance(getattr(layer, "impl", None), KvantImpl)}
    attention = {name: layer for name, layer in found.items() if layer.impl.layers is None}
    target = next((layer.impl.layers for layer in found.values() if layer.impl.layers is not None), None)
    for layers in bind(config, attention) if target is None else bind_draft(config, attention, target):
        backend = backend_for(layers)
        for place, name in enumerate(layers.names):
            layer = attention[name]
            layer.impl.layers, layer.impl.place = layers, place
            layer.attn_backend = backend
            if not hasattr(AttentionBackend, "customize_spec"):
                layer.get_kv_cache_spec = functools.partial(spec_of_0_26, layer, layers.token_bytes)
