"""The shape of a model that a cache needs, read from its config."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

SERVED_LAYERS = ("full_attention", "sliding_attention")
REFUSED = {  # model types whose attention is another one, which their config does not show everywhere
    "deepseek_v4": "it attends to compressed tokens",
    "hy_v4": "an indexer chooses the tokens that a query attends to",
    "mimo_v2_flash": "its sliding layers have other KV heads than the full ones, and values are narrower than keys",
    "openai_privacy_filter": "its attention is not causal",
}
# of hybrid models: transformers keeps a state of fixed size for them, and no keys
STATE_LAYERS = ("linear_attention", "conv")


LARGEST = {  # sizes in a config: above them there is no model, and computing with them might not end
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 10_000,
    "hidden_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
}
ZERO = ("sliding_window",)  # those that may be 0, which is none


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Refuses sizes that no model has, by name: of a config.json, and of the language model in that of a larger one. `where` begins
    the message."""
    for name, largest in LARGEST.items():
        value, least = config.get(name), int(name not in ZERO)
        if value is not None and not (type(value) is int and least <= value <= largest):
            raise ValueError(
                f"{where}: {name} in its config must be an integer from {least} to {largest:,}, got {value!r:.40}"
            )
    for name in ("text_config", "decoder", "generator"):
        if isinstance(config.get(name), Mapping):
            check_sizes(config[name], where)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Layers, KV heads and head dim of a model, as a cache needs them."""

    layers: tuple[int | None, ...]  # sliding window of every layer, or None for full attention
    heads: int  # KV heads
    head_dim: int
    dtype: str
    attention: tuple[int, ...] = ()  # of a hybrid model: the layers with attention

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention: all of them, or some of a hybrid model's."""
        return self.attention or tuple(range(len(self.layers)))

    @property
    def hybrid(self) -> bool:
        """Whether some of the layers are not attention."""
        return len(self.attention_layers) < len(self.layers)

    @property
    def packed(self) -> ModelShape:
        """The shape of the layers with attention, without the others."""
        return dataclasses.replace(self, layers=tuple(self.layers[i] for i in self.attention_layers), attention=())

    @staticmethod
    def of(model_or_config: Any, *, hybrid: bool = False) -> ModelShape:
        """Reads a model or its config; refuses with the reason what the cache cannot serve. With `hybrid`, some of the layers may be
        no attention; `attention` then says which are."""
        config = getattr(model_or_config, "config", model_or_config)
        name = getattr(config, "model_type", type(config).__name__)
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"expected a transformers model or config, got {type(model_or_config).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"cannot serve {name}: encoder-decoder models have a second cache")
        config = config.get_text_config(decoder=True)
        reason = REFUSED.get(getattr(config, "model_type", ""))
        if reason is not None:
            raise ValueError(f"cannot serve {name}: {reason}")
        if getattr(config, "kv_lora_rank", None):
            raise ValueError(
                f"cannot serve {name}: latent attention (MLA) caches one compressed vector, not keys and values"
            )
        if getattr(config, "num_kv_shared_layers", 0):
            raise ValueError(f"cannot serve {name}: some of its layers read other layers' cache")
        sizes = {size: getattr(config, size, None) for size in LARGEST}
        check_sizes(sizes, f"cannot serve {name}")
        queries, count = sizes["num_attention_heads"], sizes["num_hidden_layers"]
        heads = sizes["num_key_value_heads"] or queries
        if not heads or not count:
            raise ValueError(f"cannot serve {name}: its config names no attention heads or layers")
        if queries and queries % heads:
            raise ValueError(f"cannot serve {name}: its {heads} KV heads do not divide its {queries} attention heads")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
        kinds = SERVED_LAYERS + (STATE_LAYERS if hybrid else ())
        odd = sorted(set(types) - set(kinds))
        if odd:
            served = "kvant.HybridCache holds them, too, and so do kvant generate, check, eval and serve"
            other = f"; {served}" if set(odd) <= set(STATE_LAYERS) else ""
            raise ValueError(
                f"cannot serve {name}: it has layers of type {', '.join(odd)}; served: {', '.join(kinds)}{other}"
            )
        if hasattr(model_or_config, "config") and not attends_by_interface(type(model_or_config), hybrid):
            raise ValueError(f"cannot serve {name}: its attention does not go through transformers' AttentionInterface")
        dtype = getattr(model_or_config, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)
        attention = tuple(i for i, kind in enumerate(types) if kind in SERVED_LAYERS) if hybrid else ()
        if hybrid and not attention:
            raise ValueError(f"cannot serve {name}: none of its layers has attention")
        return ModelShape(windows, heads, head_dim, str(dtype).removeprefix("torch."), attention)


def context_of(config: Any) -> int | None:
    """Tokens that a model's context holds, if its config says so: its positions, and those that RoPE scaling adds. The other kinds of
    scaling are in max_position_embeddings."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if positions is None or kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, (int, float)):
        return positions
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(positions, int((original or positions) * factor))


def attends_by_interface(model_class: type, hybrid: bool = False) -> bool:
    """Whether attention of a model class goes through transformers' AttentionInterface."""
    served = bool(getattr(model_class, "_supports_attention_backend", True))
    if hybrid:  # most hybrid models do not claim it, for the sake of their other layers
        served |= hasattr(sys.modules.get(model_class.__module__), "ALL_ATTENTION_FUNCTIONS")
    return served


def conv_states(config: Any) -> int:
    """States of a layer that is not attention, as transformers counts them for a hybrid model's config."""
    return int(getattr(config.get_text_config(decoder=True), "number_of_conv_states", 1))
