"""Models with attention sinks of their own (gpt-oss and relatives), through the transformers engine: tiny and random, with sliding and
full layers. Their own attention, in eager mode, is what a cache is compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvant
from kvant import recipes
from kvant.calibrate import exact_attention, gatherer
from kvant.calibrate.run import calibrate
from kvant.engines.attention import eager_attention
from kvant.eval import Segments, evaluate, teacher
from kvant.recipe import MixedRecipe, Window
from kvant.tune.sensitivity import Choice, measure
from tests.conftest import relative_error
from tests.engines.test_hf import BASE, make_model, prompt
from tests.ops.scores import extra_logit, head_errors, some_sinks
from tests.ops.scores import with_sinks as softmax_with_one_more

FAMILIES: dict[str, dict[str, Any]] = {
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "GraniteSWA": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_multiplier": 0.125,
    },
    "Flint": {"sliding_window": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def with_sinks(family: str, **changes: Any) -> Any:
    """A random model whose sinks have about the size of the logits, and differ by head."""
    torch.manual_seed(1)
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = getattr(transformers, f"{family}Config")(**{**BASE, **FAMILIES[family], **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id = 0
    layers = [module for module in model.modules() if isinstance(getattr(module, "sinks", None), torch.Tensor)]
    assert len(layers) == config.num_hidden_layers
    for layer in layers:
        with torch.no_grad():
            layer.sinks.copy_(torch.randn(layer.sinks.shape) * 2 + 1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_full_gives_the_logits_of_transformers_own_cache(family: str) -> None:
    """Prefill, chunks and decode, past the sliding window."""
    model, ids = with_sinks(family), prompt(2, 90)
    steps = ((0, 50), (50, 51), (51, 83), (83, 84), (84, 90))
    with torch.inference_mode():
        theirs = DynamicCache(config=model.config)
        expected = [model(ids[:, a:b], past_key_values=theirs).logits for a, b in steps]
        assert model.config._attn_implementation == "eager"
        ours = kvant.Cache(model, "full")
        for (a, b), logits in zip(steps, expected, strict=True):
            torch.testing.assert_close(model(ids[:, a:b], past_key_values=ours).logits, logits, rtol=1e-4, atol=1e-4)
        plain = DynamicCache(config=model.config)  # while the model's attention is "kvant"
        for (a, b), logits in zip(steps, expected, strict=True):
            torch.testing.assert_close(model(ids[:, a:b], past_key_values=plain).logits, logits, rtol=1e-4, atol=1e-4)
        assert model.config._attn_implementation == "kvant"
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(float("-inf"))
        without = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    assert relative_error(without[:, -6:], expected[-1].double()) > 0.01, "sinks matter in this model"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["greedy", "beams", "padded"])
def test_generate_from_the_full_cache_is_generate(family: str, mode: str) -> None:
    model, ids = with_sinks(family), prompt(2, 40)
    mask = torch.ones_like(ids)
    if mode == "padded":
        mask[1, :13] = 0
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "attention_mask": mask}
    options |= {"num_beams": 3} if mode == "beams" else {}
    expected = model.generate(ids, **options)
    cache = kvant.Cache(model, "full")
    assert model.generate(ids, past_key_values=cache, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("recipe", ["saw-int4", "kivi-k4v4", "int4:sink=3,recent=10", "quarot-int2-win"])
def test_packed_caches(recipe: str) -> None:
    """Every layer's output of a decode step, sliding and full, from the keys and values that its pages hold: against a float64 softmax
    with one more logit."""
    model, ids, seen = with_sinks("GptOss"), prompt(2, 70), []
    cache = kvant.Cache(model, recipe)
    layers = [layer.self_attn for layer in model.model.layers]

    def compare(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        if query.shape[2] > 1:
            return
        store, batch = cache.store_of(layer)
        options = {"scale": layers[layer].scaling, "sliding_window": cache.shape.layers[layer]}
        expected, _ = softmax_with_one_more(store, query[:, :, 0], batch, layers[layer].sinks.detach(), **options)
        assert max(head_errors(out[:, 0], expected)) < 2e-3
        seen.append(layer)

    cache.on_attend = compare
    with torch.inference_mode():
        for first, last in ((0, 60), (60, 61), (61, 66), (66, 67)):
            model(ids[:, first:last], past_key_values=cache)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_sixteen_bits() -> None:
    """Sinks come in the model's type; sums are in float32."""
    model, ids = with_sinks("GptOss").bfloat16(), prompt(1, 60)
    with torch.inference_mode():
        ours = kvant.Cache(model, "full")
        found = [model(ids[:, :50], past_key_values=ours).logits, model(ids[:, 50:51], past_key_values=ours).logits]
        assert model.model.layers[0].self_attn.sinks.dtype == torch.bfloat16
        exact = model.float()(ids, past_key_values=DynamicCache(config=model.config)).logits
    assert relative_error(torch.cat(found, 1), exact[:, :51].double()) < 0.1


def test_attention_without_a_cache_of_kvant() -> None:
    """Blocks of queries, masks of both kinds, grouped heads: against a float64 softmax with one more logit."""
    q, (k, v) = torch.randn(1, 6, 9, 64), torch.randn(2, 1, 2, 30, 64)
    keep = (torch.rand(9, 30) < 0.5) | (torch.arange(30) == 21)
    sinks = some_sinks(6)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    expected, _ = extra_logit(*rows, sinks, 0.125, None, keep)
    added = torch.zeros(9, 30).masked_fill(~keep, float("-inf"))
    for mask in (keep, added):
        found = eager_attention(q, k, v, mask[None, None], 0.125, sinks)[0]
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    causal, _ = extra_logit(*rows, sinks, 0.125, None, torch.ones(9, 30, dtype=torch.bool).tril(21))
    torch.testing.assert_close(eager_attention(q, k, v, None, 0.125, sinks)[0].double(), causal, rtol=1e-5, atol=1e-5)


def test_sinks_that_a_model_keeps_to_itself_are_refused() -> None:
    model, ids = make_model("llama"), prompt(1, 5)
    cache = kvant.Cache(model, "full")
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(6))
    for past in (cache, DynamicCache(config=model.config)):
        with (
            pytest.raises(ValueError, match="LlamaAttention has attention sinks and does not pass them on"),
            torch.no_grad(),
        ):
            model(ids, past_key_values=past)


def test_calibration_attends_as_the_model_does() -> None:
    """The attention of an excerpt with sinks, and the weights of its tokens, written out."""
    q, (k, v) = torch.randn(1, 6, 40, 64), torch.randn(2, 1, 2, 40, 64)
    sinks = some_sinks(6)
    position = torch.arange(40)
    keep = (position <= position[:, None]) & (position > position[:, None] - 16)
    expected, sums = extra_logit(*(x[0].transpose(0, 1) for x in (q, k, v)), sinks, 0.125, None, keep)
    found = exact_attention.exact_attention(q, k, v, 0.125, 16, None, sinks)[0].transpose(0, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    grouped = [x[0].unflatten(0, (2, -1)).permute(2, 0, 1, 3) for x in (q, found.transpose(0, 1)[None])]
    weights = gatherer.token_weights(
        grouped[0], k[0].transpose(0, 1), v[0].transpose(0, 1), grouped[1], 0.125, 16, None, 0, sinks
    )
    logits = torch.einsum("qhgd,nhd->hgqn", grouped[0].double(), k[0].transpose(0, 1).double()) * 0.125
    p = (logits - sums.double().T.view(2, 3, 40, 1)).exp().masked_fill(~keep, 0.0)
    squares = p.square().sum((1, 2)).T  # [tokens, heads]
    torch.testing.assert_close(weights.values[16:].double(), squares[16:], rtol=1e-4, atol=1e-6)


def test_evaluation_and_sensitivity_attend_as_the_model_does() -> None:
    """The full cache has no error; one stream of one layer is coded, and the measured KL is the predicted one."""
    model = with_sinks("GraniteSWA", initializer_range=0.1)
    assert [x.shape for x in teacher.sink_logits_of(model) if x is not None] == [(6,)] * 3
    assert teacher.sink_logits_of(make_model("llama")) == [None] * 3
    fine, coarse, window = recipes.get("int8:sink=3,recent=8"), recipes.get("int3:sink=3,recent=8"), Window(3, 8)
    ids = prompt(4, 161)
    choices = [Choice("key", coarse), Choice("value", coarse)]
    table = measure(model, list(ids[:, :160]), choices, {coarse: {}}, [window], draws=8, queries=120)
    mixed = []
    for choice in choices:
        one = kvant.Recipe("one", choice.spec, fine.value) if choice.stream == "key" else None
        one = one or kvant.Recipe("one", fine.key, choice.spec)
        mixed.append(MixedRecipe.of(f"{choice.stream}", fine, [fine, one, fine]))
    full, *found = evaluate(model, [recipes.get("full"), *mixed], Segments(ids, 40))
    assert abs(full.kl) < 1e-6 and full.top1 == 1.0 and full.attn_rel_mse < 1e-9
    for choice, result in zip(choices, found, strict=True):
        assert table.kl[window, 1, choice] == pytest.approx(result.kl, rel=0.5), choice.stream


def test_a_recipe_is_fitted() -> None:
    model, ids = with_sinks("GraniteSWA"), prompt(1, 600)[0]
    artifact = calibrate(model, None, "oscar", ids, excerpt_tokens=128, max_position=1024)
    cache = kvant.Cache(model, "oscar", artifact=artifact)
    with torch.inference_mode():
        found = model(ids[None, :80], past_key_values=cache).logits
        exact = model(ids[None, :80], past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)  # a prompt attends to itself in full precision


def steps_of_a_decoder(model: Any, recipe: str, graph: bool) -> None:
    """Steps with their bookkeeping on the device are the engine's steps; past the sliding window of 24 and a page."""
    ids = prompt(2, 100).to(model.device)
    with torch.no_grad():
        plain, fixed = kvant.Cache(model, recipe), kvant.Cache(model, recipe)
        for cache in (plain, fixed):
            model(ids[:, :50], past_key_values=cache)
        expected = [model(ids[:, i : i + 1], past_key_values=plain).logits[:, -1] for i in range(50, 70)]
        with fixed.decoder(model, 20, graph=graph) as decode:
            for i, logits in zip(range(50, 70), expected, strict=True):
                torch.testing.assert_close(decode(ids[:, i]), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", ["full", "saw-int4"])
def test_steps_of_a_decoder(recipe: str) -> None:
    steps_of_a_decoder(with_sinks("GraniteSWA"), recipe, graph=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["saw-int4", "quarot-int2-win"])
def test_a_graph_on_a_gpu(recipe: str) -> None:
    steps_of_a_decoder(with_sinks("GraniteSWA").cuda(), recipe, graph=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("recipe", "limit"), [("int8", 5e-3), ("saw-int4", 2e-2)])
def test_kernels_on_a_gpu_are_the_reference(family: str, recipe: str, limit: float) -> None:
    """As test_gpu's steps, with sinks and sliding layers."""
    changes = (
        {"initializer_range": 0.02, "num_experts_per_tok": 4} if family != "GraniteSWA" else {"initializer_range": 0.02}
    )
    model, ids = with_sinks(family, **changes).cuda(), prompt(2, 300).cuda()
    found = []
    for implementation in (None, "reference"):
        cache = kvant.Cache(model, recipe, implementation=implementation)
        with torch.no_grad():
            steps = [(0, 200), (200, 290), *((i, i + 1) for i in range(290, 300))]
            logits = [model(ids[:, a:b], past_key_values=cache).logits[:, -1] for a, b in steps]
        assert cache.implementation("decode", model.device) == ("cuda" if implementation is None else "reference")
        found.append(torch.stack(logits))
    assert relative_error(found[0], found[1]) < limit
