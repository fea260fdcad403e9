"""Models with several kinds of cache inside vLLM: layers with a sliding window beside full ones, and layers that are not attention. Pages
and attention are those of a plain run over the same keys and values."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.plan import plan
from kvant.shape import ModelShape
from tests.engines.vllm import device
from tests.engines.vllm.engines import (
    block_of,
    close,
    engine,
    falcon_h1_like,
    gemma_like,
    lfm2_like,
    made_up_artifacts,
    needs_vllm,
    ngrams_apart,
    prompt,
    qwen3_next_like,
    release,
    run,
    tiny_model,
)

pytestmark = needs_vllm
RECIPES = device.recipes("kvant-2", "kvant-4", "saw-int4")
HYBRIDS = {  # layers, those with attention, head_dim; how many blocks hold a request of 1,024 tokens, but not several
    qwen3_next_like: (8, (3, 7), 256, 16),
    lfm2_like: (6, (2, 5), 64, 22),
    falcon_h1_like: (3, (0, 1, 2), 64, 16),
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("gemma")
    return gemma_like(root / "model"), made_up_artifacts(root, 12, names=RECIPES)


@pytest.fixture
def start() -> Iterator[Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    made: list[Any] = []

    def begin(model: tuple[Path, list[str]], kvant: dict[str, Any], **options: Any) -> Any:
        try:
            made.append(engine(model[0], {"artifact": model[1], **kvant}, **options))
        except ValueError:
            cleanup_dist_env_and_memory()
            raise
        made[0].collective_rpc("record")
        return made[0]

    yield begin
    for llm in made:
        close(llm)


def compared(llm: Any) -> dict[str, int]:
    """What was compared, and found equal."""
    (seen,) = llm.collective_rpc("compare")
    assert seen["decodes"] and seen["pages"], seen
    assert not seen["short of sinks"], seen
    return seen  # type: ignore[no-any-return]


@pytest.mark.cell("sliding windows (Gemma 3)")
@pytest.mark.runner_v2(1)
@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sliding_windows(start: Any, gemma: Any, recipe: str) -> None:
    """Five layers to one; chunks, prefix hits inside and beyond the window, and pages that are given back: without that, a request of
    1,024 tokens would take 6 * 16 blocks."""
    size = block_of(recipe)
    llm = start(gemma, {"recipe": recipe}, blocks=64, block_size=size, max_num_batched_tokens=150)
    long, short = prompt(0, 330), prompt(1, 140)
    run(llm, [long + prompt(2, 30), short, prompt(3, 20)], 5)
    found = run(llm, [long + prompt(4, 60), short + prompt(5, 20), prompt(6, 90)], 70)
    assert [request.num_cached_tokens for request in found] == [330 // size * size, 128, 0]
    seen = compared(llm)
    assert seen["prefills"] and seen["given back"] and bool(seen["behind a prefix"]) == (recipe != "saw-int4"), seen


@pytest.mark.parametrize("recipe", ["kvant-2", "oscar", "saw-int4"])
@pytest.mark.parametrize("sliding", [5, 0, 6])
def test_sink_rows_are_those_of_the_plan(recipe: str, sliding: int) -> None:
    """Layers with a sliding window have none, in the engine as in `kvant plan`."""
    from kvant.engines.vllm.bind import _sink_rows
    from kvant.engines.vllm.options import Options

    memory, windows = 3 << 20, [100] * sliding + [None] * (6 - sliding)
    cache = SimpleNamespace(enable_prefix_caching=True, num_gpu_blocks_override=None, kv_cache_memory_bytes=memory)
    config = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=torch.bfloat16))
    chosen = Options.of({"kvant": {"recipe": recipe, "unfit_anyway": True}}, 6)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer, window in enumerate(windows):
        groups.setdefault((chosen.layers[layer], 8, 64, window), []).append(str(layer))
    found = _sink_rows(config, chosen, groups, 2, torch.device("cpu"))
    planned = plan(ModelShape(tuple(windows), 2, 64, "bfloat16"), recipe, memory).recipe
    assert found == planned.sink_rows and (found > 0) == (recipe != "saw-int4" and sliding < 6)


@pytest.mark.runner_v2(0)
@pytest.mark.slow
def test_groups_of_tokens_with_sliding_windows(start: Any, gemma: Any) -> None:
    """Keys of 128 tokens are coded together; a window of 100 leaves blocks of 128."""
    llm = start(gemma, {"recipe": "kivi-k2v2-sink"}, blocks=64, block_size=128, max_num_batched_tokens=150)
    long = prompt(0, 330)
    run(llm, [long + prompt(1, 30), prompt(2, 20)], 5)
    found = run(llm, [long + prompt(3, 60), prompt(4, 90)], 140)
    assert [request.num_cached_tokens for request in found] == [256, 0]
    seen = compared(llm)
    assert seen["prefills"] and seen["given back"] and seen["behind a prefix"] and seen["overwritten"], seen


@pytest.mark.runner_v2(0)
@pytest.mark.slow
def test_drafts_with_sliding_windows(start: Any, gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ngrams_apart(monkeypatch)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = start(gemma, {"recipe": "kvant-2"}, speculative_config=drafts)
    run(llm, [prompt(0, 7) * 25, prompt(1, 11) * 12, prompt(2, 40)], 60)
    seen = compared(llm)
    assert seen["taken back"] and seen["verified"] and seen["given back"] and not seen["prefills"], seen


def test_a_draft_in_16_bits_beside_sliding_windows(start: Any, gemma: Any, tmp_path: Path) -> None:
    """vLLM would pad all pages to the draft's, which is said before a request comes."""
    drafts = {"method": "draft_model", "model": str(tiny_model(tmp_path, layers=1)), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="vLLM pads the pages of recipe saw-int4 from 9216 to 65536 bytes"):
        start(gemma, {"recipe": "saw-int4"}, blocks=400, speculative_config=drafts)


@pytest.mark.cell("sliding windows in 16 bits", setups=("v2-piecewise",))
@pytest.mark.runner_v2(0)
def test_sliding_layers_in_16_bits(start: Any, gemma: Any) -> None:
    """Pages of fewer tokens, in blocks of the same bytes."""
    llm = start(gemma, {"recipe": "kvant-2", "sliding": "full"}, block_size=256, max_num_batched_tokens=150)
    found = llm.collective_rpc("page_bytes")[0]
    assert all(given == predicted for given, predicted in found) and len(set(found)) == 2, found
    # 16 tokens as they are, of four bytes a number on a CPU and two on a GPU, and 64 packed ones, a quarter of a block
    assert max(found)[0] == (2 if device.on_gpu() else 4) * min(found)[0], found
    long = prompt(0, 330)
    run(llm, [long + prompt(1, 30), prompt(2, 20)], 5)
    hit = run(llm, [long + prompt(3, 60)], 30)
    assert hit[0].num_cached_tokens >= 256
    seen = compared(llm)
    assert seen["prefills"] and seen["given back"] and seen["behind a prefix"], seen


# On a GPU Falcon-H1 is left out: the recipes of the matrix, twice.
MADE = (lfm2_like, qwen3_next_like) if device.on_gpu() else (lfm2_like, qwen3_next_like, falcon_h1_like)


@pytest.fixture(scope="module", params=MADE, ids=lambda make: make.__name__)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], int]:
    if release() in ("0.29", "0.30", "0.31"):
        pytest.skip(
            "vLLM before 0.32 has convolutions on a CPU in 16 bits and of width 4 alone, and kvant refuses hybrid models there"
        )
    root, (layers, attention, dim, blocks) = tmp_path_factory.mktemp("hybrid"), HYBRIDS[request.param]
    artifacts = made_up_artifacts(root, layers, dim=dim, names=RECIPES, attention=attention)
    return request.param(root / "model"), artifacts, blocks


@pytest.fixture
def without_delta_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's gated delta nets need instructions for bfloat16 that not every CPU has: a function of one token takes their place. Their
    states still have blocks."""
    if device.on_gpu():
        return
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    monkeypatch.setattr(QwenGatedDeltaNetAttention, "forward_cpu", lambda self, x: x.tanh())


@pytest.mark.cell("hybrid: {hybrid}")
@pytest.mark.runner_v2(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("without_delta_nets")
@pytest.mark.filterwarnings("default:.* is the plain torch reference:UserWarning")  # on a GPU: it is told, at the end
def test_hybrid_models(start: Any, hybrid: Any, recipe: str) -> None:
    """Chunks, preemption, and blocks that layers of other kinds have used before."""
    *model, blocks = hybrid
    options: dict[str, Any] = {"max_num_batched_tokens": 150, "enable_prefix_caching": False}
    options["block_size"] = block_of(recipe)
    if device.on_gpu():
        options["gdn_prefill_backend"] = "triton"  # on Hopper FlashInfer would compile its own first
    llm = start(model, {"recipe": recipe}, blocks=blocks, **options)
    found = llm.collective_rpc("page_bytes")[0]
    assert all(given == predicted for given, predicted in found), found
    run(llm, [prompt(0, 330), prompt(1, 20), prompt(2, 100)], 40)
    run(llm, [prompt(i, 200) for i in range(3, 7)], 70)
    seen = compared(llm)
    assert seen["prefills"] and seen["fresh"] and seen["overwritten"], seen


@pytest.mark.runner_v2(0)
@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [qwen3_next_like, lfm2_like], indirect=True, ids=lambda make: make.__name__)
@pytest.mark.usefixtures("without_delta_nets")
def test_prefix_hits_of_hybrid_models(start: Any, hybrid: Any) -> None:
    """vLLM finds a hit where it kept the states of the other layers, too: here at the end of the first prompt."""
    *model, _ = hybrid
    llm = start(model, {"recipe": "kvant-2"}, blocks=40)
    first = prompt(0, 700)
    run(llm, [first], 5)
    found = run(llm, [first[:600] + prompt(1, 30), first + prompt(2, 10)], 20)
    assert [request.num_cached_tokens for request in found] == [0, 640]
    seen = compared(llm)
    assert seen["prefills"] and seen["behind a prefix"], seen


@pytest.mark.parametrize("hybrid", [lfm2_like], indirect=True, ids=lambda make: make.__name__)
def test_hits_inside_a_block_of_hybrid_models(start: Any, hybrid: Any) -> None:
    """vLLM copies a block that a hit ends in. Pages alone may be copied; a recipe with sinks would read another request's."""
    *model, _ = hybrid
    with pytest.raises(
        ValueError, match="recipe kvant-2 keeps tokens in full precision, and is not served with prefix_match_unit=64"
    ):
        start(model, {"recipe": "kvant-2"}, block_size=256, prefix_match_unit=64)
    llm = start(model, {"recipe": "saw-int4"}, block_size=256, prefix_match_unit=64)
    first = prompt(0, 200)
    run(llm, [first], 3)
    (found,) = run(llm, [first + prompt(1, 30)], 20)
    assert found.num_cached_tokens == 192


@pytest.mark.parametrize(
    ("make", "version", "message"),
    [
        (gemma_like, "0.26.0", "layers with a sliding window inside vLLM 0.26.0: it was tested from vLLM 0.29 on"),
        (lfm2_like, "0.31.0", "layers of other kinds, such as .* inside vLLM 0.31.0: it was tested from vLLM 0.32 on"),
    ],
)
def test_what_an_older_vllm_was_not_tested_with_is_refused(
    make: Any, version: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    if make is lfm2_like and release() in ("0.29", "0.30", "0.31"):
        pytest.skip("vLLM fails on a CPU while it loads this model")
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ValueError, match=message):
        engine(make(tmp_path), {"recipe": "saw-int4"}, enable_prefix_caching=False)
    cleanup_dist_env_and_memory()


# Of torchvision, names alone: vLLM's module of Qwen3.5 imports it for images, and a model of text uses none of it.
NO_TORCHVISION = """
import importlib.machinery, sys, types
class Names(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), dict.fromkeys(("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "LANCZOS", "BOX", "HAMMING"), 0))
__version__ = "0"
for name in ("transforms", "io", "ops", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    made = sys.modules[f"torchvision.{name}"] = Names(f"torchvision.{name}")
    made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None, is_package=True)
    parent, _, last = made.__name__.rpartition(".")
    setattr(sys.modules[parent], last, made)
"""
QWEN3_5 = """
import sys
from pathlib import Path
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from tests.engines.vllm.engines import engine, made_up_artifacts, prompt, qwen3_5_like, run
QwenGatedDeltaNetAttention.forward_cpu = lambda self, x: x.tanh()
root, recipe = Path(sys.argv[1]), sys.argv[2]
artifacts = made_up_artifacts(root, 8, dim=256, names=[recipe], attention=(3, 7))
llm = engine(
    qwen3_5_like(root / "model"),
    {"recipe": recipe, "artifact": artifacts},
    blocks=16,
    max_num_batched_tokens=150,
    enable_prefix_caching=False,
)
assert llm.collective_rpc("record") == [2]
run(llm, [prompt(0, 330), prompt(1, 20), prompt(2, 100)], 40)
(seen,) = llm.collective_rpc("compare")
assert seen["decodes"] and seen["pages"] and seen["prefills"] and seen["fresh"] and not seen["short of sinks"], seen
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_qwen3_5(recipe: str, tmp_path: Path) -> None:
    """In a process of its own, with a place-holder for torchvision where it is not installed."""
    paths = [str(Path(__file__).parents[3])]
    if importlib.util.find_spec("torchvision") is None:
        (tmp_path / "stub" / "torchvision").mkdir(parents=True)
        (tmp_path / "stub" / "torchvision" / "__init__.py").write_text(NO_TORCHVISION)
        paths.append(str(tmp_path / "stub"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", QWEN3_5, str(tmp_path), recipe]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
