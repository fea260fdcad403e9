"""Models with attention sinks of their own inside vLLM, on the CPU: Granite with sinks, which is dense, and gpt-oss. Pages and attention
are those of a plain run over the same keys and values, and answers those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.vllm.device import recipes
from tests.engines.vllm.engines import (
    DIM,
    GROUPS,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    block_of,
    close,
    engine,
    made_up_artifacts,
    needs_vllm,
    prompt,
    run,
)
from tests.engines.vllm.test_matrix import compared
from tests.engines.vllm.test_smollm2 import spoken

pytestmark = needs_vllm
OPTIONS: dict[str, dict[str, Any]] = {
    "GraniteSWA": {"attention_multiplier": 0.125, "layer_types": ["full_attention"] * 4},
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 96,  # of every other layer
    },
}


def tiny(family: str, directory: Path) -> Path:
    """A random model whose sinks have about the size of its logits."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=HEADS * DIM,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=2048,
        initializer_range=0.08,
        tie_word_embeddings=False,
        **OPTIONS[family],
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.randn(HEADS) * 2 + 2)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("GraniteSWA", tmp_path_factory.mktemp("granite"))


@pytest.mark.cell("sinks of the model")
@pytest.mark.parametrize("size", [64, 128])
def test_pages_and_attention(granite: Path, size: int, tmp_path: Path) -> None:
    """Recipes that code tokens one by one, and recipes that code groups: prompts without and with a history, prefix hits, decodes."""
    kvant = {"layers": LAYERS, "artifact": made_up_artifacts(tmp_path)} if size == 64 else {"layers": GROUPS}
    llm = engine(granite, kvant, block_size=size, max_num_batched_tokens=256)
    try:
        assert llm.collective_rpc("record") == [4]
        shared = prompt(0, 150)
        run(llm, [shared + prompt(1, 30)], 5)
        found = run(llm, [shared + prompt(2, 60), shared + prompt(3, 200), prompt(4, 9)], 20)
        assert found[0].num_cached_tokens == 128
        seen = compared(llm)
        assert seen["prefills"] and seen["fresh"] and seen["decodes"] > 4 * 50 and seen["behind a prefix"], seen
    finally:
        close(llm)


@pytest.mark.cell("sinks of the model and sliding windows (gpt-oss)")
@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", recipes("saw-int4", "kvant-2", "kvant-4"))
def test_sinks_and_sliding_windows(recipe: str, tmp_path: Path) -> None:
    """gpt-oss, whose layers have a sliding window by turns: chunks, a prefix hit, pages that are given back."""
    path = tiny("GptOss", tmp_path / "model")
    artifacts = made_up_artifacts(tmp_path, names=[recipe])
    size = block_of(recipe)
    llm = engine(path, {"recipe": recipe, "artifact": artifacts}, block_size=size, max_num_batched_tokens=150)
    try:
        llm.collective_rpc("record")
        long = prompt(0, 330)
        run(llm, [long + prompt(2, 30), prompt(3, 20)], 5)
        found = run(llm, [long + prompt(4, 60), prompt(6, 90)], 40)
        assert found[0].num_cached_tokens == 330 // size * size
        seen = compared(llm)
        assert seen["prefills"] and seen["given back"] and seen["fresh"], seen
    finally:
        close(llm)


def answers(path: Path, recipe: str) -> list[tuple[list[int], list[float]]]:
    llm = engine(path, {"recipe": recipe})
    try:
        found = run(llm, [prompt(0, 90), prompt(1, 150)], 8, logprobs=0)
    finally:
        close(llm)
    outputs = [request.outputs[0] for request in found]
    return [(list(o.token_ids), [s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in outputs]


@pytest.mark.parametrize("family", OPTIONS)
def test_full_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Its own attention, in eager mode, with its own cache. Without their sinks the models would answer otherwise."""
    import transformers

    path = tiny(family, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    bare = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for layer in bare.model.layers:
            layer.self_attn.sinks.fill_(-1e30)
    for place, (tokens, found) in enumerate(answers(path, "full")):
        asked = prompt(place, (90, 150)[place])
        expected, without = (
            torch.tensor(spoken(each, transformers.DynamicCache(config=each.config), asked, tokens))
            for each in (model, bare)
        )
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-3)
        assert float((without - expected).abs().max()) > 0.05


def test_sinks_of_another_shape_are_refused() -> None:
    from kvant.engines.vllm.backend import KvantBackend, KvantImpl

    assert KvantBackend.supports_sink()
    with pytest.raises(ValueError, match=r"sinks must be \[4 query heads\], got \[3\]"):
        KvantImpl(4, 64, 0.125, sinks=torch.zeros(3))
