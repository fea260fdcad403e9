"""Every recipe that needs no settings of its own, each behind a layer of one vLLM engine."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.artifact import Artifact
from kvant.engines.vllm.options import refusal
from kvant.layouts import Layouts
from kvant.recipe import MixedRecipe
from tests.engines.vllm.engines import DIM, KV_HEADS, close, engine, needs_vllm, prompt, release, run, tiny_model
from tests.fitted import made_up_tensors

pytestmark = needs_vllm
SERVED = [
    name for name in recipes.names() if refusal(recipes.get(name)) is None and recipes.get(name).not_prefix_safe is None
]


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_all_recipes(plain: bool, tmp_path: Path) -> None:
    """Pages and attention of every recipe are those of a plain run, by the kernels that serve and by the reference; and its page
    is as large as its layout says."""
    model = tiny_model(tmp_path / "model", layers=len(SERVED))
    artifacts = []
    for place, name in enumerate(SERVED):
        recipe = recipes.get(name)
        if recipe.calibrated:
            torch.manual_seed(place)
            # an artifact may serve several recipes, as kvant-2's does
            tensors = {layer: made_up_tensors(recipe, KV_HEADS, DIM) for layer in range(len(SERVED))}
            Artifact(recipe, KV_HEADS, DIM, len(SERVED), tensors).save(tmp_path / name)
            artifacts.append(str(tmp_path / name))
    chosen: dict[str, Any] = {"layers": {str(place): name for place, name in enumerate(SERVED)}, "artifact": artifacts}
    if plain:
        chosen["implementation"] = "reference"
    llm = engine(model, chosen, max_num_batched_tokens=256, block_size=128)
    try:
        assert llm.collective_rpc("record") == [len(SERVED)]
        run(llm, [prompt(0, 400), prompt(1, 65)], 4)
        (seen,) = llm.collective_rpc("compare")
        assert seen["decodes"] >= 6 * len(SERVED) and seen["prefills"] and not seen["short of sinks"], seen
        (pages,) = llm.collective_rpc("page_bytes")
        for name, (mine, predicted) in zip(SERVED, pages, strict=True):
            assert mine == predicted, name
    finally:
        close(llm)


def test_an_artifact_with_a_recipe_for_every_layer(tmp_path: Path) -> None:
    """What kvant tune writes: layers have pages of different sizes, and vLLM pads none of them."""
    model = tiny_model(tmp_path / "model")
    names = ("kvant-2:k.bits=4,v.bits=4", "kvant-2", "kvant-2:k.bits=4/4/0,v.bits=4", "kvant-2")
    mixed = MixedRecipe.of("tuned", recipes.get("kvant-2"), [recipes.get(name) for name in names])
    torch.manual_seed(0)
    tensors = {layer: made_up_tensors(recipe, KV_HEADS, DIM) for layer, recipe in enumerate(mixed)}
    Artifact(mixed, KV_HEADS, DIM, 4, tensors).save(tmp_path / "tuned")
    llm = engine(model, {"artifact": str(tmp_path / "tuned")}, max_num_batched_tokens=256)
    try:
        assert llm.collective_rpc("record") == [4]
        shared = prompt(0, 200)
        run(llm, [shared + prompt(1, 100), prompt(2, 65)], 4)
        found = run(llm, [shared + prompt(3, 20)], 8)
        assert found[0].num_cached_tokens == 192
        (seen,) = llm.collective_rpc("compare")
        assert seen["decodes"] >= 4 * 6 and seen["prefills"] and not seen["short of sinks"], seen
        (pages,) = llm.collective_rpc("page_bytes")
        layouts = Layouts.of(mixed, 4, KV_HEADS, DIM, dtype="float32")
        assert pages == [(layout.page_bytes, layout.page_bytes) for layout in layouts.layers]
        assert len({mine for mine, _ in pages}) == 3
    finally:
        close(llm)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kvant", "options", "message"),
    [
        (
            {"recipe": "kivi-k2v2:k.recent=9"},
            {},
            "cannot be served inside vLLM: its keys are coded in groups, and the last 9",
        ),
        ({"recipe": "kitty-pro"}, {}, "block_size must be a multiple of 128, got 64"),
        (
            {"recipe": "squat"},
            {},
            "recipe squat cannot share blocks between requests: .* enable_prefix_caching must be false",
        ),
        (
            {"recipe": "squat"},
            {"enable_prefix_caching": False},
            "recipe squat needs prompts as a whole: .* enable_chunked_prefill must be false",
        ),
        ({"recipe": "oscar"}, {}, "recipe oscar is fitted offline: it needs an artifact"),
        ({"recipe": "saw-int5"}, {}, "unknown recipe 'saw-int5'"),
        ({"layers": {"0-7": "int4"}}, {}, "'0-7' is not a range of the model's layers 0 to 3"),
        ({"recipe": "int4"}, {"block_size": 32}, "block_size must be a multiple of 64, got 32"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(
    kvant: dict[str, Any], options: dict[str, Any], message: str, small: Path
) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.raises(ValueError, match=message):
        engine(small, kvant, **options)
    cleanup_dist_env_and_memory()


def test_overlays_that_do_not_fit_name_the_option(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default of max_num_seqs may be 1024, and every sequence has an overlay row."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from kvant.engines.vllm import bind

    def allocate(*args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bind, "layered_overlay", allocate)
    # 4 layers of 2 * 2 heads, 12 rows of 20 tokens
    with pytest.raises(ValueError, match="for 12 sequences, 480 KiB in 4 layers, .* max_num_seqs must be less, got 8"):
        engine(small, {"recipe": "int4:sink=4,recent=16"})
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def declares_an_fp8_cache(directory: Path) -> Path:
    """A small model with random weights whose checkpoint says that its cache is fp8."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": []}
    file = tiny_model(directory) / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": declared | {"kv_cache_scheme": scheme}})
    )
    return directory


def test_a_checkpoint_that_declares_a_quantized_cache_is_refused(tmp_path: Path) -> None:
    """Its cache_dtype becomes fp8 without the user's doing."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from kvant.engines.vllm.backend import KvantBackend

    message = (
        "kv_cache_dtype must be auto, got fp8; if that comes from the checkpoint, name float16 or bfloat16 instead"
    )
    with pytest.raises(ValueError, match=message):
        engine(declares_an_fp8_cache(tmp_path), {"recipe": "saw-int4"})
    cleanup_dist_env_and_memory()
    assert (
        KvantBackend.supports_combination(64, torch.bfloat16, "fp8", None, False, False, False, False, None) is not None
    )


def test_who_names_a_16_bit_cache_is_served_such_a_checkpoint(tmp_path: Path) -> None:
    if release() == "0.33":
        pytest.skip("vLLM 0.33 takes a type of the cache only where the model computes in it, here in float32")
    llm = engine(declares_an_fp8_cache(tmp_path), {"recipe": "saw-int4"}, kv_cache_dtype="bfloat16")
    try:
        assert llm.collective_rpc("record") == [4]
        run(llm, [prompt(0, 100)], 5)
        assert llm.collective_rpc("compare")[0]["decodes"]
    finally:
        close(llm)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("cache_config.cache_dtype", "fp8", "kv_cache_dtype must be auto, got fp8"),
        ("cache_config.block_size", 96, "block_size must be a multiple of 64, got 96"),
        ("parallel_config.decode_context_parallel_size", 2, "does not serve decode_context_parallel_size > 1"),
        ("parallel_config.enable_dbo", True, "does not serve enable_dbo"),
        ("parallel_config.ubatch_size", 2, "does not serve ubatch_size"),
        ("model_config.enable_sleep_mode", True, "does not serve enable_sleep_mode"),
        (
            "speculative_config",
            SimpleNamespace(method="medusa", num_speculative_tokens=3),
            "does not serve speculation by medusa: method must be one of ngram, draft_model, eagle, eagle3, mtp",
        ),
        (
            "speculative_config",
            SimpleNamespace(
                method="draft_model", num_speculative_tokens=3, attention_backend=None, parallel_drafting=True
            ),
            "does not serve parallel_drafting",
        ),
        (
            "speculative_config",
            SimpleNamespace(method="eagle", num_speculative_tokens=3, attention_backend="CUSTOM"),
            "does not serve the layers of a draft unless they have a recipe",
        ),
        ("speculative_config", SimpleNamespace(method="ngram", num_speculative_tokens=65), "at most 64, got 65"),
    ],
)
def test_configurations_that_are_refused(place: str, value: Any, message: str) -> None:
    from kvant.engines.vllm.checks import check_config

    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=128, user_specified_block_size=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, enable_dbo=False),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        speculative_config=None,
    )
    assert check_config(config) == 0
    *path, last = place.split(".")
    target: Any = config
    for part in path:
        target = getattr(target, part)
    setattr(target, last, value)
    with pytest.raises(ValueError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("drafting", "message"),
    [
        (None, "draft='int4': there is no speculative_config"),
        (SimpleNamespace(method="ngram", num_speculative_tokens=3), "by ngram has no draft with layers"),
        (
            SimpleNamespace(method="eagle", num_speculative_tokens=3, attention_backend=None),
            "attention_backend of speculative_config must be CUSTOM, got None",
        ),
    ],
)
def test_a_recipe_for_a_draft_needs_a_draft(drafting: Any, message: str) -> None:
    from kvant.engines.vllm.checks import check_config

    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=128, user_specified_block_size=True),
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        speculative_config=drafting,
    )
    with pytest.raises(ValueError, match=message):
        check_config(config, recipes.get("int4"))


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_a_draft_that_inherits_the_backend_needs_a_recipe(method: str) -> None:
    """vLLM's model runner V2, the default on a GPU, loads a draft with the attention backend of its model."""
    from kvant.engines.vllm.checks import check_drafting

    drafting = SimpleNamespace(method=method, num_speculative_tokens=3, attention_backend=None)
    check_drafting(drafting)
    with pytest.raises(
        ValueError, match=r"V2 gives the draft \(.*\) the attention backend of its model, .* VLLM_USE_V2_MODEL_RUNNER=0"
    ):
        check_drafting(drafting, v2=True)
    drafting.attention_backend = "FLASH_ATTN"
    if method == "draft_model":  # which that runner ignores for a draft model
        with pytest.raises(ValueError, match="give its layers a recipe"):
            check_drafting(drafting, v2=True)
    else:
        check_drafting(drafting, v2=True)
    drafting.attention_backend = "CUSTOM"
    check_drafting(drafting, recipes.get("full"), v2=True)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        (
            "kitty-pro",
            "parallel_config.pipeline_parallel_size",
            2,
            "recipe kitty-pro is not served with pipeline_parallel_size > 1",
        ),
        ("kivi-k2v2", "cache_config.prefix_match_unit", 64, "hit must end at a multiple of 128 tokens"),
        ("squat", "cache_config.enable_prefix_caching", True, "squat cannot share blocks between requests"),
        ("squat", "scheduler_config.enable_chunked_prefill", True, "squat needs prompts as a whole"),
        ("squat", "scheduler_config.long_prefill_token_threshold", 512, "squat needs prompts as a whole"),
        ("squat", "drafts", 3, "squat is not served with speculation: it learns from queries"),
        ("zipcache", "drafts", 3, "zipcache is not served with speculation: it learns from queries"),
    ],
)
def test_configurations_that_groups_refuse(name: str, place: str, value: Any, message: str) -> None:
    from kvant.engines.vllm.checks import check_groups

    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False, prefix_match_unit=None),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False, long_prefill_token_threshold=0),
    )
    recipe = recipes.get(name)
    check_groups(config, recipe, 0)
    if place == "drafts":
        with pytest.raises(ValueError, match=message):
            check_groups(config, recipe, value)
        check_groups(config, recipes.get("kitty-pro"), value)
        return
    part, field = place.split(".")
    setattr(getattr(config, part), field, value)
    with pytest.raises(ValueError, match=message):
        check_groups(config, recipe, 0)
    check_groups(config, recipes.get("int4"), 3)


def test_hits_inside_a_block_are_refused() -> None:
    """vLLM copies a block for them, and the copy would have the sinks of the block's last sequence."""
    from kvant.engines.vllm.checks import check_hits

    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_match_unit=64))
    for name in ("kvant-2", "int4:sink=4", "int4:recent=16", "kivi-k2v2"):
        with pytest.raises(ValueError, match="is not served with prefix_match_unit=64"):
            check_hits(config, recipes.get(name), hybrid=True)
        check_hits(config, recipes.get(name), hybrid=False)  # vLLM's hits end at blocks there
    check_hits(config, recipes.get("saw-int4"), hybrid=True)
    for field, value in (("prefix_match_unit", None), ("enable_prefix_caching", False)):
        cache = SimpleNamespace(**{**vars(config.cache_config), field: value})
        check_hits(SimpleNamespace(cache_config=cache), recipes.get("kvant-2"), hybrid=True)


def test_layers_with_a_backend_of_their_own_are_refused() -> None:
    """Models with values of another size than keys (MiMo-V2) name a backend for some of their layers."""
    from vllm.model_executor.layers.attention.attention import Attention

    from kvant.engines.vllm.checks import check_layers

    def layer(name: str) -> Any:
        made = object.__new__(Attention)
        made.__dict__ |= {"sliding_window": None, "attn_backend": SimpleNamespace(get_name=lambda: name)}
        return made

    mine, other = {"model.layers.0.attn": layer("CUSTOM")}, {"model.layers.1.attn": layer("FLASH_ATTN_DIFFKV")}
    context = SimpleNamespace(static_forward_context=mine | other)
    config = SimpleNamespace(model_config=SimpleNamespace(), compilation_config=context)
    with pytest.raises(
        ValueError, match=r"gives layer model.layers.1.attn an attention backend of its own, FLASH_ATTN_DIFFKV"
    ):
        check_layers(config, mine, 2)
    context.static_forward_context = mine
    assert check_layers(config, mine, 2) == 1


def test_a_model_whose_layers_all_have_a_backend_of_their_own_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls nothing of kvant's backend then, and would serve without it."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import llama
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = AttentionBackendEnum.CPU_ATTN.get_class()
    monkeypatch.setattr(llama, "Attention", functools.partial(llama.Attention, attn_backend=own))
    message = r"gives layer model.layers.0.self_attn.attn an attention backend of its own, CPU_ATTN"
    with pytest.raises(ValueError, match=message):
        engine(small, {"recipe": "int4"})
    cleanup_dist_env_and_memory()
    llm = engine(small, {"recipe": "int4"}, attention_backend=None)  # who does not ask for kvant gets the model's own
    close(llm)
