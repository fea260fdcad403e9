"""Puts kvant's storage behind a vLLM model's attention layers: layouts, calibrated tensors, overlays, operations."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from kvant import models
from kvant.artifact import Artifact
from kvant.engines import fold
from kvant.engines.config_ropes import ropes_from
from kvant.engines.fingerprint import fingerprint_of_files
from kvant.engines.vllm import flash, folding, options, pages, versions
from kvant.engines.vllm.checks import (
    check_block,
    check_config,
    check_connector,
    check_groups,
    check_hits,
    check_layers,
    other_layers,
)
from kvant.engines.vllm.options import PAGE_TOKENS, Options
from kvant.layout import Layout, human_bytes
from kvant.ops import OPS, Implementation, LayerStore, choose
from kvant.ops.registry import Op
from kvant.plan import SPARE_ROWS, sink_rows
from kvant.recipe import Recipe
from kvant.serving.layer_group import (
    LayerGroup,
    copied_rows,
    layered_overlay,
    layered_sinks,
    layered_states,
    pages_only,
    with_rows,
)
from kvant.serving.overlay import from_first_token, with_rollback
from kvant.serving.step import decode_queries
from kvant.serving.tp_shard import shard_heads, shard_tensors
from kvant.serving.warmup import LargestStep, warm_up

Tensor = torch.Tensor
logger = init_logger("vllm.kvant")


def bind(config: Any, attention: dict[str, Any]) -> list[LayerGroup]:
    """Allocates overlays and chooses operations for a model's attention layers, which are named as in vLLM. Called once, after the
    weights are loaded and before vLLM measures the free memory, so that overlays are counted."""
    model = config.model_config
    total, count = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    fingerprint = functools.cache(lambda: _fingerprint(config))
    chosen = Options.of(config.additional_config, count, lambda: fingerprint()[0])
    drafts = check_config(config, chosen.draft)
    kinds = check_layers(config, attention, count)
    if kinds > 1 and chosen.draft is not None:
        raise ValueError(
            f"draft={chosen.draft.name!r}: in a model with several kinds of cache vLLM's blocks have one size, which the pages of a "
            "draft do not have; speculation by ngram is served"
        )
    asked = {
        name: chosen.recipe_of(extract_layer_index(name), layer.sliding_window) for name, layer in attention.items()
    }
    hybrid = bool(other_layers(config, attention))
    for recipe in dict.fromkeys(asked.values()):
        options.check(recipe)
        check_groups(config, recipe, drafts)
        check_hits(config, recipe, hybrid)
    plain = kinds == 1 and all(layer.sliding_window is None for layer in attention.values())
    windows_travel = check_connector(config, dict.fromkeys(asked.values()), plain)
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
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in attention.items():
        if layer.num_kv_heads != len(heads):
            raise ValueError(
                f"kvant cannot serve layer {name}: it has {layer.num_kv_heads} KV heads on this rank, the model has {len(heads)}"
            )
        groups.setdefault((asked[name], layer.num_heads, layer.head_size, layer.sliding_window), []).append(name)
    _tell_version(vllm.__version__, device, rank)
    first_pages = _sink_rows(config, chosen, groups, len(heads), device)
    rows = config.scheduler_config.max_num_seqs + _spare_rows(config, chosen, groups, first_pages)
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
    for ((*_, window), names), (layout, block_tokens), (_, artifact) in zip(groups.items(), sized, found, strict=True):
        recipe, groupwise = layout.recipe, any(stream.groupwise for stream in layout.recipe.streams.values())
        ropes = ropes_from(model.hf_text_config, count) if recipe.wants_rope else None
        try:
            overlays = {name: layered_overlay(layout, name, len(names), rows + 1, device) for name in recipe.streams}
            states = layered_states(layout, len(names), rows + 1, device)
        except torch.OutOfMemoryError as error:
            size = human_bytes(layout.overlay_bytes * len(names) * rows)
            raise ValueError(
                f"the overlays of recipe {recipe.name} for {rows} sequences, {size} in {len(names)} layers, do not fit into memory: "
                f"max_num_seqs must be less, got {config.scheduler_config.max_num_seqs}"
            ) from error
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
        # a sliding window leaves the first page, and its sinks with it
        group.sinks = layered_sinks(layout, len(names), first_pages if window is None else 0, device)
        _tell(group, artifact, rows, rank)
        _warm(config, group, {name: attention[name] for name in names}, rank, device)
        out.append(group)
    if windows_travel:
        from kvant.engines.vllm import offload  # of vLLM 0.29 and later

        offload.use(config.kv_transfer_config.kv_connector_extra_config, out)
    return out


def bind_draft(config: Any, attention: dict[str, Any], target: LayerGroup) -> list[LayerGroup]:
    """As `bind`, for the layers of a draft, which are loaded after the model's; `target` has some of these. They have one recipe,
    which keeps everything in pages. `config` is the model's or the draft's, by the way of speculation."""
    given, drafting = config.additional_config["kvant"], config.speculative_config
    model, device = drafting.draft_model_config, torch.device(config.device_config.device)
    recipe, rank = options.draft_recipe(given), get_tensor_model_parallel_rank()
    assert recipe is not None, "check_drafting refuses it"
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in attention.items():
        if type(layer) is not Attention or layer.sliding_window is not None:
            raise ValueError(
                f"kvant cannot serve layer {name} of the draft: it has a sliding window, or another attention"
            )
        groups.setdefault((layer.num_heads, layer.num_kv_heads, layer.head_size), []).append(name)
    out = []
    for (_, heads, head_dim), names in groups.items():
        dtype = str(model.dtype).removeprefix("torch.")
        layout = Layout.of(recipe, heads, head_dim, target.layout.page_tokens, dtype=dtype, device=device)
        layout = dataclasses.replace(layout, align=layout.page_tokens)
        stores = [LayerStore.allocate(layout, 0, 0, device, {}, None) for _ in names]
        overlays = {name: layered_overlay(layout, name, len(names), 1, device) for name in recipe.streams}
        for place, store in enumerate(stores):
            store.overlays = {stream: overlay[place] for stream, overlay in overlays.items()}
            if device.type == "cuda" and (fused := flash.with_lse()) is not None:
                store.flash = fused
        ops: dict[Op, Implementation] = {op: choose(op, layout, device, given.get("implementation")) for op in OPS}
        others = [pages_only(store) for store in stores]
        drafts = int(drafting.num_speculative_tokens)
        group = LayerGroup(layout, names, stores, others, overlays, ops, drafts, target.block_tokens)
        _tell(group, None, 0, rank)
        _warm(config, group, {name: attention[name] for name in names}, rank, device)
        out.append(group)
    return out


def _warm(config: Any, group: LayerGroup, attention: dict[str, Any], rank: int, device: torch.device) -> None:
    """Compiles and runs the operations of a group once, and notes how much they allocate."""
    if device.type != "cuda":
        return
    begin, scheduler, model = time.perf_counter(), config.scheduler_config, config.model_config
    largest = LargestStep(scheduler.max_num_seqs, model.max_model_len, scheduler.max_num_batched_tokens)
    layers, ops = list(attention.values()), group.ops
    query_heads, softcap = layers[0].num_heads, layers[0].impl.softcap
    with_sinks = {layer.impl.sinks is not None for layer in layers}  # their kernels are others
    warm: dict[str, Any] = {"queries": decode_queries(group.drafts), "sliding_window": group.sliding_window}
    group.workspace = max(
        warm_up(ops, group.stores[0], query_heads, model.dtype, largest, softcap, sink_logits=each, **warm)
        for each in with_sinks
    )
    if group.ring and not group.groupwise:  # prefills with a history first append without overlays
        warm_up(ops, group.pages_only[0], query_heads, model.dtype, largest, softcap, reads=False)
    seconds = time.perf_counter() - begin
    if not rank:
        logger.info(
            "kvant compiled and warmed up its kernels in %.1f s; they need %s of workspace",
            seconds,
            human_bytes(group.workspace),
        )


def _sink_rows(
    config: Any, chosen: Options, groups: dict[tuple[Any, ...], list[str]], heads: int, device: torch.device
) -> int:
    """Sink rows of every layer: as many as are asked for, or as the memory for pages is worth."""
    cache = config.cache_config
    if chosen.sink_rows is not None:
        return chosen.sink_rows
    if not cache.enable_prefix_caching:
        return 0
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    page = sinks = 0
    for (recipe, _, head_dim, window), names in groups.items():
        layout = Layout.of(from_first_token(recipe), heads, head_dim, chosen.page_tokens, dtype=dtype, device=device)
        page += len(names) * layout.page_bytes
        sinks += len(names) * layout.sink_bytes if window is None else 0
    if cache.num_gpu_blocks_override:
        memory = cache.num_gpu_blocks_override * page * -(-(cache.block_size or PAGE_TOKENS) // chosen.page_tokens)
    elif cache.kv_cache_memory_bytes:
        memory = cache.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = max(0, int(cache.gpu_memory_utilization * total) - (total - free))
    else:
        memory = int(cache.gpu_memory_utilization * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return sink_rows(memory, page, sinks)


def _spare_rows(config: Any, chosen: Options, groups: dict[tuple[Any, ...], list[str]], sink_rows: int) -> int:
    """Overlay rows beyond one for each sequence that may run: those that are asked for, or a few. A prefix hit needs the sinks of
    ended sequences, which sink rows hold. In layers without these, ended sequences keep their rows for longer."""
    if chosen.spare_overlay_rows is not None:
        return chosen.spare_overlay_rows
    without = [recipe for recipe, *_, window in groups if window is not None or not sink_rows]
    if config.cache_config.enable_prefix_caching and any(recipe.key.window.sink for recipe in without):
        return max(SPARE_ROWS, config.scheduler_config.max_num_seqs // 4)
    return SPARE_ROWS


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


def _tell_version(version: str, device: torch.device, rank: int) -> None:
    if device.type == "cuda" and versions.on_gpu(version) is None and not rank:
        logger.warning_once(
            "kvant was tested inside vLLM %s on a CPU, and has not been run on a GPU inside this version", version
        )


def _tell(group: LayerGroup, artifact: Artifact | None, rows: int, rank: int) -> None:
    if rank:
        return
    layout = group.layout
    windows = sum(owned.nbytes for store in group.stores for owned in store.owned)
    sinks = sum(x.nbytes for x in group.sinks.values())
    logger.info(
        "kvant serves %d layers with recipe %s: %.3f bits per element, artifact %s, kernels %s, pages of %d tokens in %s order, "
        "overlays of %d sequences %s, sinks of %d cached prefixes %s",
        len(group.names),
        layout.recipe.name,
        layout.bits_per_element(),
        "none" if artifact is None else artifact.digest[:16],
        ", ".join(f"{op} {found.name}" for op, found in group.ops.items()),
        layout.page_tokens,
        layout.order,
        rows if group.has_overlay else 0,
        human_bytes(windows if group.has_overlay else 0),
        next((x.shape[1] for x in group.sinks.values()), 0),
        human_bytes(sinks),
    )
