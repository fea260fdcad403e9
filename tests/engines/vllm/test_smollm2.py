"""A real model inside vLLM: how much its cache holds, and whether it says what the transformers engine says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import models, recipes
from kvant.artifact import Artifact
from kvant.layout import Layout
from tests.engines.vllm.engines import close, engine, needs_vllm, run
from tests.fitted import made_up_tensors

pytestmark = [needs_vllm, pytest.mark.model]
HEADS, DIM, LAYERS = 3, 64, 30
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of random tensors: what they code is of poor quality, and the same in both engines."""
    root, out = tmp_path_factory.mktemp("artifacts"), {}
    for name in ("oscar", "kvant-2"):
        recipe = recipes.get(name)
        torch.manual_seed(0)
        tensors = {layer: made_up_tensors(recipe, HEADS, DIM) for layer in range(LAYERS)}
        Artifact(recipe, HEADS, DIM, LAYERS, tensors).save(root / name)
        out[name] = root / name
    return out


def options(name: str, artifacts: dict[str, Path]) -> dict[str, Any]:
    plain = name.split(":")[0]
    return {"recipe": name, **({"artifact": str(artifacts[plain])} if plain in artifacts else {})}


def tokens(llm: Any) -> int:
    config = llm.llm_engine.vllm_config.cache_config
    return int(config.num_gpu_blocks * config.block_size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("saw-int4", 3.5), ("oscar", 6.0), ("kvant-2", 6.5)])
def test_tokens_in_the_same_memory(
    name: str, factor: float, artifacts: dict[str, Path], smollm2: tuple[Any, Any]
) -> None:
    """Counted by vLLM, against its own 16-bit cache in as much memory as kvant's pages and windows take together."""
    memory, sequences = 1 << 30, 4
    layout = Layout.of(recipes.get(name), HEADS, DIM, dtype="float32")
    windows = LAYERS * (sequences + 1) * layout.overlay_bytes  # one more for padding
    model = models.smollm2_directory()
    same: dict[str, Any] = {"max_num_seqs": sequences, "num_gpu_blocks_override": None}
    mine = {**options(name, artifacts), "spare_overlay_rows": 0, "sink_rows": 0}
    llm = engine(model, mine, kv_cache_memory_bytes=memory - windows, **same)
    found = tokens(llm)
    held = llm.collective_rpc("window_bytes")[0]
    close(llm)
    assert held == windows
    plain = {"attention_backend": None, "additional_config": {}, "kv_cache_memory_bytes": memory // 2}
    llm = engine(model, {}, **same, **plain)
    full = 4 * tokens(llm)  # half the memory, and 32 bits
    close(llm)
    print(f"{name}: {found} tokens, {full} with 16 bits: {found / full:.2f} times")
    assert found >= factor * full, (found, full)


@pytest.mark.slow
def test_speculation_does_not_change_what_a_model_says(smollm2: tuple[Any, Any]) -> None:
    """20 prompts, greedy, by recipe `full`, with the model as its own draft: the tokens of a run without speculation."""
    _, tokenizer = smollm2
    text = "\n".join((DOCS / page).read_text() for page in ("design.md", "methods.md"))
    ids = tokenizer(text, verbose=False)["input_ids"]
    prompts = [ids[i * 150 : i * 150 + 24 + 2 * i] for i in range(20)]
    model = models.smollm2_directory()
    told = {}
    for drafts in (0, 3):
        config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": drafts}
        llm = engine(model, {"recipe": "full"}, **({"speculative_config": config} if drafts else {}))
        told[drafts] = [list(request.outputs[0].token_ids) for request in run(llm, prompts, 24)]
        close(llm)
    assert told[0] == told[3]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["saw-int4", "oscar:sink=4,recent=16", "kvant-2:recent=16"])
def test_log_probabilities_are_those_of_the_transformers_engine(
    name: str, artifacts: dict[str, Path], smollm2: tuple[Any, Any]
) -> None:
    """20 prompts, 6 tokens each, read from the same recipe with the same artifact: within 0.05 nats on average."""
    model, tokenizer = smollm2
    text = "\n".join((DOCS / page).read_text() for page in ("design.md", "methods.md"))
    ids = tokenizer(text, verbose=False)["input_ids"]
    prompts = [ids[i * 150 : i * 150 + 24 + 2 * i] for i in range(20)]
    llm = engine(models.smollm2_directory(), options(name, artifacts), max_num_seqs=20, max_num_batched_tokens=4096)
    answers = run(llm, prompts, 6, logprobs=0)
    close(llm)
    apart = []
    for asked, answer in zip(prompts, answers, strict=True):
        found = answer.outputs[0]
        cache = kvant.Cache(model, name, artifact=artifacts.get(name.split(":")[0]))
        expected = spoken(model, cache, asked, found.token_ids)
        mine = [step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)]
        apart += [abs(a - b) for a, b in zip(mine, expected, strict=True)]
    print(f"{name}: mean {sum(apart) / len(apart):.2e} nats, at most {max(apart):.2e}")
    assert sum(apart) / len(apart) < 0.05, (sum(apart) / len(apart), max(apart))


def spoken(model: Any, cache: Any, asked: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of an answer's tokens, one forward pass each."""
    out = []
    with torch.inference_mode():
        logits = model(torch.tensor([asked]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
        for token in answer:
            out.append(float(logits.log_softmax(-1)[token]))
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return out
