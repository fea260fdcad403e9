"""What kvant refuses of vLLM's configuration and of a model while the engine starts, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend

from kvant.engines.vllm import options, versions
from kvant.engines.vllm.options import CONNECTOR, PAGE_TOKENS, SPEC
from kvant.recipe import Recipe

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")  # of speculation
WRAPPED = "KvantOffloadingSpec"  # of offload.py


def check_block(size: int, block_tokens: int = PAGE_TOKENS) -> None:
    if size % block_tokens:
        raise ValueError(f"block_size must be a multiple of {block_tokens}, got {size}")


def check_groups(config: Any, recipe: Recipe, drafts: int) -> None:
    """Refuses a vLLM configuration with which a recipe that codes groups of tokens would not be exact."""
    if not any(stream.groupwise for stream in recipe.streams.values()):
        return
    if getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1:
        raise ValueError(
            f"recipe {recipe.name} is not served with pipeline_parallel_size > 1: it codes groups of tokens, and a sequence that is "
            "left out of a step could lose its unfinished group"
        )
    unit = getattr(config.cache_config, "prefix_match_unit", None)
    if unit is not None and unit % options.block_tokens(recipe):
        raise ValueError(
            f"recipe {recipe.name} is not served with prefix_match_unit={unit}: a prefix hit must end at a multiple of "
            f"{options.block_tokens(recipe)} tokens, which are coded together"
        )
    if recipe.wants_queries and drafts:
        raise ValueError(
            f"recipe {recipe.name} is not served with speculation: it learns from queries, and cannot forget those of rejected drafts"
        )
    reason, scheduler = recipe.not_prefix_safe, config.scheduler_config
    if reason is None:
        return
    if config.cache_config.enable_prefix_caching:
        raise ValueError(
            f"recipe {recipe.name} cannot share blocks between requests: {reason}; enable_prefix_caching must be false"
        )
    if scheduler.enable_chunked_prefill or getattr(scheduler, "long_prefill_token_threshold", 0):
        raise ValueError(
            f"recipe {recipe.name} needs prompts as a whole: {reason}, and how a prompt is cut depends on the server's load; "
            "enable_chunked_prefill must be false, and long_prefill_token_threshold 0"
        )


def check_hits(config: Any, recipe: Recipe, hybrid: bool) -> None:
    """Refuses prefix hits that end inside a block, which vLLM finds in models with layers that are not attention (`hybrid`). It
    copies such a block for the new sequence and tells no backend: what is recorded of the copy is still the last sequence's."""
    unit = getattr(config.cache_config, "prefix_match_unit", None)
    if unit is None or not hybrid or not config.cache_config.enable_prefix_caching:
        return
    if any(stream.window.sink or stream.window.ring for stream in recipe.streams.values()):
        raise ValueError(
            f"recipe {recipe.name} keeps tokens in full precision, and is not served with prefix_match_unit={unit} in a model with "
            "layers that are not attention: a prefix hit inside a block copies its pages without these tokens; leave it out"
        )


def check_drafting(drafting: Any, recipe: Recipe | None = None, v2: bool = False) -> None:
    """Refuses ways of speculation that kvant cannot serve. `recipe`: that of the draft's layers, where they are kvant's. `v2`: vLLM's
    model runner is V2, which gives the draft its model's attention backend unless another is named; to a `draft_model` always."""
    if drafting.method not in METHODS:
        raise ValueError(
            f"kvant does not serve speculation by {drafting.method}: method must be one of {', '.join(METHODS)}"
        )
    if drafting.method == "ngram":
        if recipe is not None:
            raise ValueError(f"draft={recipe.name!r}: speculation by ngram has no draft with layers")
        return
    if not hasattr(AttentionBackend, "customize_spec"):
        raise ValueError(
            f"kvant does not serve speculation by {drafting.method} inside vLLM 0.26, whose cache it has not been tried with: the "
            "draft's layers have other pages than kvant's; method must be ngram"
        )
    if getattr(drafting, "parallel_drafting", False):
        raise ValueError(
            "kvant does not serve parallel_drafting: drafts that are masked are written beside those of a step"
        )
    own = getattr(drafting.attention_backend, "name", drafting.attention_backend) == "CUSTOM"
    if own and recipe is None:
        raise ValueError(
            "kvant does not serve the layers of a draft unless they have a recipe: leave attention_backend of speculative_config "
            'out for one of vLLM\'s own, or give them one, as additional_config={"kvant": {..., "draft": NAME}}'
        )
    if v2 and recipe is None and (drafting.attention_backend is None or drafting.method == "draft_model"):
        other = (
            ""
            if drafting.method == "draft_model"
            else "name one of vLLM's own as attention_backend of speculative_config, or "
        )
        raise ValueError(
            f"vLLM's model runner V2 gives the draft ({drafting.method}) the attention backend of its model, which is kvant: {other}"
            'give its layers a recipe, as additional_config={"kvant": {..., "draft": "full"}} with "attention_backend": "CUSTOM" in '
            "speculative_config, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if recipe is not None and not own:
        raise ValueError(
            f"draft={recipe.name!r}: attention_backend of speculative_config must be CUSTOM, got {drafting.attention_backend}"
        )


def check_config(config: Any, draft: Recipe | None = None) -> int:
    """Refuses a vLLM configuration that kvant cannot serve; returns the largest number of draft tokens of a step. `draft`: the recipe
    of a draft's layers, where they are kvant's."""
    parallel, drafting = config.parallel_config, config.speculative_config
    if (reason := options.cache_dtype_refusal(config.cache_config.cache_dtype)) is not None:
        raise ValueError(reason)
    if config.cache_config.user_specified_block_size:  # otherwise vLLM chooses one later, with the backend's help
        check_block(config.cache_config.block_size)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"kvant does not serve {name} > 1: the overlay of a sequence is on one rank")
    for name, most in (("enable_dbo", False), ("ubatch_size", 1)):
        if getattr(parallel, name, most) > most:
            raise ValueError(
                f"kvant does not serve {name}: the parts of a batch would be matched to overlay rows separately"
            )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise ValueError(
            "kvant does not serve enable_sleep_mode: its overlays and calibrated tensors would not be restored"
        )
    if drafting is None:
        if draft is not None:
            raise ValueError(f"draft={draft.name!r}: there is no speculative_config")
        return 0
    check_drafting(drafting, draft, getattr(config, "use_v2_model_runner", False))
    if drafting.num_speculative_tokens > PAGE_TOKENS:
        raise ValueError(f"num_speculative_tokens must be at most {PAGE_TOKENS}, got {drafting.num_speculative_tokens}")
    return int(drafting.num_speculative_tokens)


def check_connector(config: Any, recipes: Iterable[Recipe], plain: bool = True) -> bool:
    """Refuses a KV connector that kvant cannot serve; returns whether the connector has to move sinks, too. `plain`: all layers are
    attention without a sliding window."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return False
    name = transfer.kv_connector
    if name != CONNECTOR:
        raise ValueError(
            f"kvant does not serve the KV connector {name}: it is not known to move pages as opaque bytes. {CONNECTOR} is served"
        )
    if not plain:
        raise ValueError(
            f"kvant does not serve {CONNECTOR} for a model that has layers with a sliding window, or that are not attention: that "
            "was not tried"
        )
    if config.speculative_config is not None and config.speculative_config.method != "ngram":
        raise ValueError(
            f"kvant does not serve {CONNECTOR} with a draft model, whose pages are vLLM's own: that was not tried"
        )
    if not hasattr(AttentionBackend, "customize_spec"):
        raise ValueError(
            f"kvant serves {CONNECTOR} inside vLLM 0.29 and later, whose workers are told which pages they move"
        )
    if transfer.kv_connector_extra_config.get("canonical_layout"):
        raise ValueError(
            f"kvant does not serve {CONNECTOR} with canonical_layout: it would cut pages into tokens and heads"
        )
    windows = None
    for recipe in recipes:
        if recipe.not_prefix_safe is not None:
            raise ValueError(
                f"recipe {recipe.name} is not served with {CONNECTOR}, which shares blocks between requests: {recipe.not_prefix_safe}"
            )
        if any(stream.window.sink or stream.window.ring for stream in recipe.streams.values()):
            windows = recipe.name
    spec = transfer.kv_connector_extra_config.get("spec_name", SPEC)
    if windows and spec not in (SPEC, WRAPPED):
        raise ValueError(
            f"recipe {windows} keeps tokens in full precision, and is not served with {spec} of {CONNECTOR}: pages that come from "
            f"elsewhere than this engine's CPU memory would come without their exact sinks. {SPEC} is served"
        )
    if windows and config.use_v2_model_runner:
        raise ValueError(
            f"recipe {windows} keeps tokens in full precision, and is not served with {CONNECTOR} by vLLM's model runner V2: it "
            "stores pages after kvant has prepared the step that overwrites them. Set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return windows is not None


def other_layers(config: Any, attention: dict[str, Any]) -> list[str]:
    """Names of the layers with a cache that is not kvant's."""
    context = config.compilation_config.static_forward_context
    return [name for name, layer in context.items() if isinstance(layer, AttentionLayerBase) and name not in attention]


def check_backend(name: str, layer: Any) -> None:
    """Refuses an attention layer that has another backend than kvant's."""
    own = layer.attn_backend.get_name()
    if own != "CUSTOM":
        raise ValueError(
            f"kvant cannot serve this model inside vLLM: it gives layer {name} an attention backend of its own, {own}"
        )


def check_layers(config: Any, attention: dict[str, Any], count: int) -> int:
    """Refuses attention layers that kvant cannot serve; returns how many kinds of cache the model has: of layers without a sliding
    window, of those with windows of each size, of layers that are not kvant's."""
    for name, layer in attention.items():
        if extract_layer_index(name) >= count:
            raise ValueError(f"kvant cannot serve layer {name}: the model has {count} layers")
        if type(layer) is not Attention:
            raise ValueError(f"kvant cannot serve layer {name} inside vLLM: it is a {type(layer).__name__}")
    if getattr(config.model_config, "is_mm_prefix_lm", False):
        raise ValueError(
            "kvant cannot serve this model inside vLLM: tokens of an image attend to each other in both directions; without images "
            'it is served (limit_mm_per_prompt={"image": 0})'
        )
    others = other_layers(config, attention)
    context = config.compilation_config.static_forward_context
    for name in others:
        if isinstance(context[name], Attention):
            check_backend(name, context[name])
    windows = {layer.sliding_window for layer in attention.values()}
    for found, what, least in (
        (bool(others), f"layers of other kinds, such as {', '.join(others[:1])}", versions.HYBRID),
        (windows != {None}, "layers with a sliding window", versions.SLIDING),
    ):
        if found and versions.older(vllm.__version__, least):
            raise ValueError(
                f"kvant cannot serve a model with {what} inside vLLM {vllm.__version__}: it was tested from vLLM {least} on"
            )
    return len(windows) + bool(others)
