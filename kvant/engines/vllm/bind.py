"""Puts kvant's storage behind a vLLM model's attention layers: layouts, calibrated tensors, overlays, operations."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend

from kvant import models
from kvant.artifact import Artifact
from kvant.engines import fold
from kvant.engines.config_ropes import ropes_from
from kvant.engines.fingerprint import fingerprint_of_files
from kvant.engines.vllm import flash, folding, options, pages
from kvant.engines.vllm.options import PAGE_TOKENS, Options
from kvant.layout import Layout, human_bytes
from kvant.ops import OPS, Implementation, LayerStore, choose
from kvant.ops.registry import Op
from kvant.recipe import Recipe
from kvant.serving.layer_group import LayerGroup, copied_rows, layered_overlay, layered_states, pages_only, with_rows
from kvant.serving.overlay import from_first_token, with_rollback
from kvant.serving.tp_shard import shard_heads, shard_tensors
from kvant.serving.warmup import LargestStep, warm_up

Tensor = torch.Tensor
logger = init_logger("vllm.kvant")


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


def check_config(config: Any) -> int:
    """Refuses a vLLM configuration that kvant cannot serve; returns the largest number of draft tokens of a step."""
    parallel, drafting = config.parallel_config, config.speculative_config
    if config.cache_config.cache_dtype != "auto":
        raise ValueError(
            f"kvant packs the cache itself: kv_cache_dtype must be auto, got {config.cache_config.cache_dtype}"
        )
    if config.cache_config.user_specified_block_size:  # otherwise vLLM chooses one later, with the backend's help
        check_block(config.cache_config.block_size)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"kvant does not serve {name} > 1: the overlay of a sequence is on one rank")
    if getattr(parallel, "enable_dbo", False):
        raise ValueError(
            "kvant does not serve enable_dbo: the two halves of a batch would be matched to overlay rows separately"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise ValueError(
            "kvant does not serve enable_sleep_mode: its overlays and calibrated tensors would not be restored"
        )
    if config.kv_transfer_config is not None:
        raise ValueError(
            "kvant does not serve KV connectors: they would transfer the pages of a sequence without its overlay"
        )
    if drafting is None:
        return 0
    if drafting.method != "ngram":
        raise ValueError(f"kvant serves n-gram speculation: method must be ngram, got {drafting.method}")
    if drafting.num_speculative_tokens > PAGE_TOKENS:
        raise ValueError(f"num_speculative_tokens must be at most {PAGE_TOKENS}, got {drafting.num_speculative_tokens}")
    return int(drafting.num_speculative_tokens)


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
    context = config.compilation_config.static_forward_context
    others = [
        name for name, layer in context.items() if isinstance(layer, AttentionLayerBase) and name not in attention
    ]
    windows = {layer.sliding_window for layer in attention.values()}
    if (others or windows != {None}) and not hasattr(AttentionBackend, "customize_spec"):
        what = f"layers of other kinds, such as {others[0]}" if others else "layers with a sliding window"
        raise ValueError(f"kvant cannot serve a model with {what} inside vLLM 0.26: use vLLM 0.32")
    return len(windows) + bool(others)


def bind(config: Any, attention: dict[str, Any]) -> list[LayerGroup]:
    """Allocates overlays and chooses operations for a model's attention layers, which are named as in vLLM. Called once, after the
    weights are loaded and before vLLM measures the free memory, so that overlays are counted."""
    drafts = check_config(config)
    model = config.model_config
    total, count = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    fingerprint = functools.cache(lambda: _fingerprint(config))
    chosen = Options.of(config.additional_config, count, lambda: fingerprint()[0])
    kinds = check_layers(config, attention, count)
    asked = {
        name: chosen.recipe_of(extract_layer_index(name), layer.sliding_window) for name, layer in attention.items()
    }
    for recipe in dict.fromkeys(asked.values()):
        options.check(recipe)
        check_groups(config, recipe, drafts)
    if config.cache_config.user_specified_block_size:
        check_block(config.cache_config.block_size, chosen.block_tokens)
    named, reason = fingerprint()
    if named is None and any("fingerprint" in each.source for each in chosen.artifacts):
        logger.warning_once(
            "kvant cannot verify that the artifact was fitted to the model %s: %s. It is used unverified.",
            model.model,
            reason,
        )
    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    heads = shard_heads(total, world, rank)
    device = torch.device(config.device_config.device)
    rows = config.scheduler_config.max_num_seqs
    rows += max(4, rows // 4) if chosen.spare_overlay_rows is None else chosen.spare_overlay_rows
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in attention.items():
        if layer.num_kv_heads != len(heads):
            raise ValueError(
                f"kvant cannot serve layer {name}: it has {layer.num_kv_heads} KV heads on this rank, the model has {len(heads)}"
            )
        groups.setdefault((asked[name], layer.num_heads, layer.head_size, layer.sliding_window), []).append(name)
    found = []
    for (recipe, _, head_dim, _), names in groups.items():
        artifact = chosen.artifact(recipe, count, total, head_dim, named)
        options.judge(chosen, recipe, artifact, named, logger.warning_once)
        recipe = _served(config, chosen, recipe, artifact, {name: attention[name] for name in names}, total, heads)
        dtype = str(model.dtype).removeprefix("torch.")
        groupwise = any(stream.groupwise for stream in recipe.streams.values())
        recipe = with_rollback(from_first_token(recipe), drafts + 1 if groupwise and drafts else drafts)
        layout = Layout.of(recipe, len(heads), head_dim, chosen.page_tokens, dtype=dtype, device=device)
        found.append(
            (dataclasses.replace(layout, align=layout.page_tokens), artifact)
        )  # vLLM counts the bytes of a token
    windows = [window for *_, window in groups]
    sized = [pages.Sized(layout, chosen.block_tokens) for layout, _ in found]
    if kinds > 1:
        sized = pages.same_pages([layout for layout, _ in found], windows, chosen.block_tokens)
    out = []
    for ((_, query_heads, _, window), names), (layout, block_tokens), (_, artifact) in zip(
        groups.items(), sized, found, strict=True
    ):
        recipe, groupwise = layout.recipe, any(stream.groupwise for stream in layout.recipe.streams.values())
        ropes = ropes_from(model.hf_text_config, count) if recipe.wants_rope else None
        overlays = {name: layered_overlay(layout, name, len(names), rows + 1, device) for name in recipe.streams}
        states = layered_states(layout, len(names), rows + 1, device)
        stores = []
        for place, name in enumerate(names):
            index = extract_layer_index(name)
            tensors = {} if artifact is None else shard_tensors(artifact.tensors[index], total, heads)
            store = LayerStore.allocate(layout, 0, 0, device, tensors, None if ropes is None else ropes[index])
            store.overlays = {stream: overlay[place] for stream, overlay in overlays.items()}
            store.states = {stream: state[place] for stream, state in states.items()}
            if device.type == "cuda" and (fused := flash.with_lse()) is not None:
                store.flash = fused
            stores.append(store)
        ops: dict[Op, Implementation] = {op: choose(op, layout, device, chosen.implementation) for op in OPS}
        if groupwise:
            own = copied_rows(layout, config.scheduler_config.max_num_seqs, device)
            others = [with_rows(store, *own) for store in stores]
        else:
            others = [pages_only(store) for store in stores]
        group = LayerGroup(layout, names, stores, others, overlays, ops, drafts, block_tokens, sliding_window=window)
        _tell(group, artifact, rows, rank)
        if device.type == "cuda":
            begin, scheduler = time.perf_counter(), config.scheduler_config
            largest = LargestStep(scheduler.max_num_seqs, model.max_model_len, scheduler.max_num_batched_tokens)
            softcap = attention[names[0]].impl.softcap
            group.workspace = warm_up(ops, stores[0], query_heads, model.dtype, largest, softcap, sliding_window=window)
            if group.ring and not group.groupwise:  # prefills with a history first append without overlays
                warm_up(ops, group.pages_only[0], query_heads, model.dtype, largest, softcap, reads=False)
            seconds = time.perf_counter() - begin
            if not rank:
                logger.info(
                    "kvant compiled and warmed up its kernels in %.1f s; they need %s of workspace",
                    seconds,
                    human_bytes(group.workspace),
                )
        out.append(group)
    return out


def _served(
    config: Any,
    chosen: Options,
    recipe: Recipe,
    artifact: Artifact | None,
    layers: dict[str, Any],
    total: int,
    heads: range,
) -> Recipe:
    """The recipe that is left to apply where the model's weights hold the value transforms: the checkpoint's do, or they are folded
    in now."""
    marked = fold.folded(config.model_config.hf_config) is not None
    left = fold.served(recipe, artifact, config.model_config.hf_config)
    if marked or chosen.fold is False or not recipe.value.transforms:
        return left
    numbered = {extract_layer_index(name): layer for name, layer in layers.items()}
    reason = folding.fold_layers(config, numbered, recipe, artifact, total, heads)
    if reason is None:
        logger.info_once("kvant folded the value transforms of recipe %s into %d layers", recipe.name, len(layers))
        return fold.without_transforms(recipe)
    if chosen.fold:
        raise ValueError(f"fold: the value transforms of recipe {recipe.name} cannot be folded: {reason}")
    logger.info_once("kvant applies the value transforms of recipe %s at every step: %s", recipe.name, reason)
    return recipe


def _fingerprint(config: Any) -> tuple[str | None, str]:
    """Fingerprint of the model that vLLM has loaded, from its files. Where they do not give one: None, and the reason."""
    model = config.model_config
    if config.load_config.load_format == "dummy":
        return None, "its weights are not loaded from files"
    directory = models.directory_of(model.model, model.revision)
    if directory is None:
        return None, "its files were not found"
    return fingerprint_of_files(directory), f"the files in {directory} do not determine it"


def _tell(group: LayerGroup, artifact: Artifact | None, rows: int, rank: int) -> None:
    if rank:
        return
    layout = group.layout
    windows = sum(owned.nbytes for store in group.stores for owned in store.owned)
    logger.info(
        "kvant serves %d layers with recipe %s: %.3f bits per element, artifact %s, kernels %s, pages of %d tokens in %s order, "
        "overlays of %d sequences %s",
        len(group.names),
        layout.recipe.name,
        layout.bits_per_element(),
        "none" if artifact is None else artifact.digest[:16],
        ", ".join(f"{op} {found.name}" for op, found in group.ops.items()),
        layout.page_tokens,
        layout.order,
        rows if group.has_overlay else 0,
        human_bytes(windows if group.has_overlay else 0),
    )
