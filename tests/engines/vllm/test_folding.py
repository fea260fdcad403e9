"""Value transforms that kvant folds into the weights that vLLM has loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.engines import fold
from kvant.serving.tp_shard import shard_heads
from tests.engines.vllm.engines import DIM, HEADS, KV_HEADS, close, engine, needs_vllm, prompt, run, tiny_model
from tests.engines.vllm.test_model import RECIPE, made_up

pytestmark = needs_vllm
PROMPTS = [(0, 90), (1, 150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves weights as they are loaded, as on a GPU; on a CPU it packs them."""
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)


def state(worker: Any) -> list[tuple[bool, int]]:
    """Of every layer, whether it is folded, and the number of value transforms that it applies."""
    found = []
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        impl = layer.impl
        found.append((impl.folded, len(impl.layers.stores[impl.place].value.transforms)))
    return found


def served(model: Path, options: dict[str, Any]) -> tuple[list[tuple[bool, int]], list[tuple[list[int], list[float]]]]:
    llm = engine(model, options)
    try:
        (seen,) = llm.collective_rpc(state)
        found = run(llm, [prompt(*each) for each in PROMPTS], 8, logprobs=0)
    finally:
        close(llm)
    outputs = [request.outputs[0] for request in found]
    said = [(list(o.token_ids), [s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in outputs]
    return seen, said


def test_transforms_are_folded_while_the_engine_starts_unless_told_otherwise(
    model: Path, tmp_path: Path, plain: None
) -> None:
    options = {"recipe": RECIPE, "artifact": str(made_up(model).save(tmp_path).parent)}
    seen, found = served(model, options)
    assert seen == [(True, 0)] * 2
    unfolded, wanted = served(model, {**options, "fold": False})
    assert unfolded == [(False, 1)] * 2
    for (tokens, expected), (same, numbers) in zip(wanted, found, strict=True):
        assert tokens == same
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected), rtol=0, atol=0.02)


def test_where_weights_are_packed_transforms_are_applied_and_that_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import utils

    from kvant.engines.vllm import bind

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def packed(layer: Any, remove_weight: bool) -> None:  # on every CPU
        dispatch(layer, remove_weight)
        weight = layer.weight
        if remove_weight and weight.numel():
            layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packed)
    monkeypatch.setattr(bind.logger, "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.kvant"):
        seen, _ = served(model, {"recipe": "quarot-int2"})
    assert seen == [(False, 1)] * 2
    assert "at every step: vLLM has packed the weights of qkv_proj" in caplog.text
    with pytest.raises(ValueError, match="fold: .* cannot be folded: vLLM has packed the weights of qkv_proj"):
        engine(model, {"recipe": "quarot-int2", "fold": True})
    cleanup_dist_env_and_memory()
    with pytest.raises(ValueError, match="fold must be true or false, got 1"):
        engine(model, {"recipe": "quarot-int2", "fold": 1})
    cleanup_dist_env_and_memory()


# --- without an engine --------------------------------------------------------------------------------------------------


def layer_of(heads: int, kv_heads: int, weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
    """An attention layer in a module as vLLM's Llama has it, with these weights: qkv, its bias, o."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.models.llama import LlamaAttention

    from kvant.engines.vllm import folding

    method = object.__new__(UnquantizedLinearMethod)

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.impl, self.num_heads = SimpleNamespace(parent=None, folded=False), heads
            self.num_kv_heads, self.head_size = kv_heads, DIM
            folding.note_parent(self.impl)

    class Projection(torch.nn.Module):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            super().__init__()
            self.weight, self.bias, self.quant_method = weight, bias, method

    parent = LlamaAttention.__new__(LlamaAttention)
    torch.nn.Module.__init__(parent)
    parent.qkv_proj, parent.o_proj = Projection(weights[0], weights[1]), Projection(weights[2])
    other = torch.nn.Module()
    other.attn = Attention()  # not its own
    parent.attn = Attention()
    parent.attn.owner = [parent]  # who has the layer keeps the module, as a model does
    return parent.attn


def drawn(hidden: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    rows = (HEADS + 2 * KV_HEADS) * DIM
    return torch.randn(rows, hidden), torch.randn(rows), torch.randn(hidden, HEADS * DIM)


def shard(weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor], world: int, rank: int) -> Any:
    """A rank's part of the weights: its query heads, and its KV heads."""
    kv, query = shard_heads(KV_HEADS, world, rank), range(rank * HEADS // world, (rank + 1) * HEADS // world)
    places = [*query, *(HEADS + h for h in kv), *(HEADS + KV_HEADS + h for h in kv)]
    rows = torch.tensor([h * DIM + e for h in places for e in range(DIM)])
    columns = torch.tensor([h * DIM + e for h in query for e in range(DIM)])
    return (weights[0][rows].clone(), weights[1][rows].clone(), weights[2][:, columns].clone()), len(query), len(kv)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_folds_what_is_its_own(world: int) -> None:
    """A part of the folded weights is the folded part, also where ranks share a KV head; and the maps cancel."""
    from kvant.engines.vllm import folding

    recipe = recipes.get("quarot-int2")
    config = SimpleNamespace(lora_config=None)
    whole = drawn()
    layer = layer_of(HEADS, KV_HEADS, tuple(x.clone() for x in whole))  # type: ignore[arg-type]
    assert folding.fold_layers(config, {0: layer}, recipe, None, KV_HEADS, range(KV_HEADS)) is None
    assert layer.impl.folded
    parent = layer.impl.parent()
    folded = parent.qkv_proj.weight, parent.qkv_proj.bias, parent.o_proj.weight
    kept = (HEADS + KV_HEADS) * DIM  # queries and keys
    assert torch.equal(folded[0][:kept], whole[0][:kept]) and torch.equal(folded[1][:kept], whole[1][:kept])
    assert not torch.allclose(folded[0][kept:], whole[0][kept:])

    def output(weights: Any, x: torch.Tensor) -> torch.Tensor:
        """Values through the output projection, as if every query saw one token."""
        values = torch.nn.functional.linear(x, weights[0][kept:], weights[1][kept:]).view(len(x), KV_HEADS, 1, DIM)
        seen = values.expand(-1, -1, HEADS // KV_HEADS, -1).flatten(1)
        return torch.nn.functional.linear(seen, weights[2])

    x = torch.randn(5, 96)
    torch.testing.assert_close(output(folded, x), output(whole, x), rtol=1e-4, atol=1e-3)
    for rank in range(world):
        part, query, kv = shard(whole, world, rank)
        wanted, _, _ = shard(folded, world, rank)
        mine = layer_of(query, kv, part)
        heads = shard_heads(KV_HEADS, world, rank)
        assert folding.fold_layers(config, {0: mine}, recipe, None, KV_HEADS, heads) is None
        own = mine.impl.parent()
        for a, b in zip((own.qkv_proj.weight, own.qkv_proj.bias, own.o_proj.weight), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("lora", "LoRA adapters"),
        ("gated", "Gated is not known to pass"),
        ("quantized", "o_proj is quantized (SimpleNamespace)"),
        ("packed", "vLLM has packed the weights of qkv_proj"),
        ("nothing", "recipe int4 has no value transforms"),
    ],
)
def test_what_is_not_folded_is_left_as_it_was(change: str, reason: str) -> None:
    from vllm.model_executor.models.llama import LlamaAttention

    from kvant.engines.vllm import folding

    class Gated(LlamaAttention):
        pass

    weights = drawn()
    layer = layer_of(HEADS, KV_HEADS, weights)
    parent = layer.impl.parent()
    config = SimpleNamespace(lora_config=SimpleNamespace() if change == "lora" else None)
    if change == "gated":
        parent.__class__ = Gated
    if change == "quantized":
        parent.o_proj.quant_method = SimpleNamespace()
    if change == "packed":
        parent.qkv_proj.weight = torch.empty(0)
    before = [x.clone() for x in weights]
    recipe = recipes.get("int4" if change == "nothing" else "quarot-int2")
    found = folding.fold_layers(config, {0: layer}, recipe, None, KV_HEADS, range(KV_HEADS))
    assert found is not None and reason in found
    assert not layer.impl.folded and all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_weights_that_are_loaded_anew_are_not_taken_for_folded_ones() -> None:
    from kvant.engines.vllm.backend import KvantImpl

    impl = object.__new__(KvantImpl)
    impl.loaded, impl.folded, impl.layers, impl.sinks = False, True, SimpleNamespace(), None  # type: ignore[assignment]
    impl.process_weights_after_loading(torch.float32)
    with pytest.raises(RuntimeError, match='"fold": false'):
        impl.process_weights_after_loading(torch.float32)


def test_the_mark_of_a_checkpoint_wins() -> None:
    """What is folded in the files is not folded once more."""
    from kvant.engines.vllm import bind, folding

    recipe = recipes.get("quarot-int2")
    hf_config = SimpleNamespace(**{fold.MARK: {"transforms": fold.mark(recipe, None)}})
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config), lora_config=None)
    chosen = SimpleNamespace(fold=True)
    layer = layer_of(HEADS, KV_HEADS, drawn())
    left = bind._served(config, chosen, recipe, None, {"layers.0.attn": layer}, KV_HEADS, range(KV_HEADS))  # type: ignore[arg-type]
    assert left.value.transforms == () and not layer.impl.folded
    assert folding.refusal(config, layer) is None
