"""Hybrid models in transformers: layers with attention are packed, the others keep transformers' states."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvant
from kvant import recipes
from kvant.artifact import Artifact
from kvant.calibrate.run import calibrate_all
from kvant.cli import main
from kvant.engines.hybrid import HybridCache
from kvant.eval.loglikelihood import Continuation, in_order, score
from kvant.eval.segments import Segments
from kvant.eval.teacher import evaluate
from kvant.plan import plan
from tests.cli.test_cli import save_tokenizer
from tests.engines.vllm.engines import lfm2_like, prompt, qwen3_5_like, qwen3_next_like

SIZES = {  # layers, those with attention, head_dim
    qwen3_next_like: (8, (3, 7), 256),
    lfm2_like: (6, (2, 5), 64),
    qwen3_5_like: (8, (3, 7), 256),
}


@pytest.fixture(scope="module", params=list(SIZES), ids=lambda make: make.__name__)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path: Path = request.param(tmp_path_factory.mktemp("hybrid"))
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), SIZES[request.param]


def padded(rows: int = 2, columns: int = 40) -> dict[str, Any]:
    ids = torch.tensor([prompt(row, columns) for row in range(rows)])
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 30}


@pytest.mark.parametrize("beams", [1, 3])
def test_the_unquantized_recipe_answers_as_transformers_own_cache(hybrid: tuple[Any, Any], beams: int) -> None:
    model, (layers, attention, head_dim) = hybrid
    wanted = model.generate(**padded(), num_beams=beams)
    cache = HybridCache(model, "full")
    assert torch.equal(model.generate(**padded(), num_beams=beams, past_key_values=cache), wanted)
    assert len(cache.layers) == layers and tuple(cache.place) == attention
    assert cache.packed.shape.head_dim == head_dim
    cache.reset()
    assert torch.equal(model.generate(**padded(), num_beams=beams, past_key_values=cache), wanted)


def test_after_a_reset_the_batch_may_have_another_size(hybrid: tuple[Any, Any]) -> None:
    model, _ = hybrid
    cache = HybridCache(model, "full")
    for rows in (2, 3, 1):
        ids = torch.tensor([prompt(row, 40) for row in range(rows)])
        with torch.no_grad():
            found = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(found, model(ids, use_cache=False).logits, atol=1e-3, rtol=1e-3)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_a_first_pass_that_failed_has_to_be_forgotten(hybrid: tuple[Any, Any]) -> None:
    """States of the layers before the first one with attention have seen its tokens, wherever it broke off."""
    model, (_, attention, _) = hybrid
    ids = torch.tensor([prompt(0, 40)])
    with torch.no_grad():
        wanted = model(ids, past_key_values=HybridCache(model, "full")).logits

    def fail(*args: Any) -> None:
        raise LookupError

    for layer in (None, attention[0] - 1, attention[0]):
        cache = HybridCache(model, "full")
        hook = None if layer is None else model.model.layers[layer].register_forward_hook(fail)
        model.train(layer is None)  # refused by the first layer with attention
        with torch.set_grad_enabled(layer is None), pytest.raises(ValueError if layer is None else LookupError):
            model(ids, past_key_values=cache)
        model.eval()
        if hook is not None:
            hook.remove()
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="cannot be taken back: reset"):
                model(ids, past_key_values=cache)
            cache.reset()
            assert torch.equal(model(ids, past_key_values=cache).logits, wanted)


@pytest.mark.parametrize("recipe", ["saw-int4", "kivi-k4v4", "int2:sink=4,recent=16"])
@torch.no_grad()
def test_layers_store_and_read_what_a_plain_cache_does(hybrid: tuple[Any, Any], recipe: str) -> None:
    """The attention layers alone, in a `PagedCache` of their own: the same bytes and the same outputs."""
    model, (_, attention, _) = hybrid
    cache = HybridCache(model, recipe)
    calls: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    cache.packed.on_attend = lambda layer, *tensors: calls.append((layer, *(x.clone() for x in tensors)))
    ids = torch.tensor([prompt(0, 150)])
    for first, last in ((0, 70), (70, 140), *((i, i + 1) for i in range(140, 150))):
        model(ids[:, first:last], past_key_values=cache)
    (group,) = cache.packed.groups
    plain = kvant.PagedCache(group.paged.layouts, len(attention), 4)
    seq = plain.new()
    for at in range(0, len(calls), len(attention)):
        batch = plain.extend([seq], [calls[at][1].shape[2]])
        host = batch._replace(seq_lens=batch.seq_lens.cpu(), query_start_loc=batch.query_start_loc.cpu())
        for layer, query, key, value, out in calls[at : at + len(attention)]:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            options = {"scale": model.model.layers[attention[layer]].self_attn.scaling}
            if len(q) > 1:
                found = plain.prefill(layer, q, k, v, host, **options)
                plain.append(layer, k, v, batch, q)
            else:
                plain.append(layer, k, v, batch, q)
                found = plain.decode(layer, q, batch, **options)
            torch.testing.assert_close(out[0], found, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(group.paged.stores, plain.stores, strict=True):
        assert torch.equal(mine.pages[group.sequences[0].pages], theirs.pages[seq.pages])


def test_what_cannot_be_taken_back_is_refused(hybrid: tuple[Any, Any]) -> None:
    model, _ = hybrid
    with pytest.raises(
        ValueError, match=r"it has layers of type (linear_attention|conv); .*kvant.HybridCache holds them, too"
    ):
        kvant.Cache(model, "int4")
    with pytest.raises(ValueError, match="share is not served for hybrid models"):
        HybridCache(model, "int4", share=True)
    cache = HybridCache(model, "int4", max_tokens=64)
    with torch.no_grad():
        model(torch.tensor([prompt(0, 60)]), past_key_values=cache)
        with pytest.raises(kvant.PoolFull):
            model(torch.tensor([prompt(1, 60)]), past_key_values=cache)
        with pytest.raises(RuntimeError, match="cannot be taken back: reset"):
            model(torch.tensor([prompt(2, 1)]), past_key_values=cache)
        cache.reset()
        model(torch.tensor([prompt(0, 60)]), past_key_values=cache)


@pytest.mark.parametrize("name", ["kvant-2", "oscar"])
def test_layers_with_attention_are_fitted_and_scored(hybrid: tuple[Any, Any], name: str) -> None:
    """Fitted by the model's own numbers of layers. In one forward pass a recipe is scored as it is token by token."""
    model, (layers, attention, _) = hybrid
    recipe = recipes.get(f"{name}:sink=4,recent=16")
    text = torch.tensor(prompt(0, 400) + prompt(1, 400))
    (artifact,) = calibrate_all(model, None, [recipe], text, max_position=400, excerpt_tokens=200)
    assert tuple(artifact.tensors) == attention and artifact.layers == layers
    segments = Segments(torch.tensor([prompt(2, 120), prompt(3, 120)]), 60)

    def score(stepwise: bool) -> float:
        (found,) = evaluate(
            model,
            [recipe],
            segments,
            stepwise=stepwise,
            make_cache=lambda recipe: HybridCache(model, recipe, artifact=artifact),
        )
        assert len(found.layers) == len(attention) and all(0 < error < 1 for error in found.layers)
        return found.kl

    at_once, by_steps = score(False), score(True)
    assert at_once == pytest.approx(by_steps, rel=0.02)
    (full,) = evaluate(model, [recipes.get("full")], segments)
    assert full.kl < 1e-6 < at_once


def test_continuations_are_scored_as_by_a_plain_forward_pass(hybrid: tuple[Any, Any]) -> None:
    """Contexts of several lengths, two that are shared, one empty prompt; longer continuations than are read at a time."""
    model, _ = hybrid
    drawn = [prompt(seed, 200) for seed in (0, 0, 1, 2, 3, 3)]
    sizes = [(40, 5), (40, 90), (61, 1), (7, 70), (30, 3), (30, 2)]
    whole = [Continuation.of(ids[:a], ids[a : a + b], 512) for ids, (a, b) in zip(drawn, sizes, strict=True)]
    alone = Continuation.of(drawn[0][:1], drawn[0][1:4], 512)

    def plain(one: Continuation) -> float:
        ids = torch.tensor([[*one.prompt, *one.decoded]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(one.prompt) :]
        return float(logits.log_softmax(-1)[range(len(one.targets)), list(one.targets)].sum())

    cache = HybridCache(model, "full")
    for some in ([whole[i] for i in in_order(whole)], [alone]):
        found = [value for value, _ in score(model, cache, some)]
        assert found == pytest.approx([plain(one) for one in some], abs=1e-3)
    packed = HybridCache(model, "int2")
    whole = whole[:1]
    assert abs(score(model, packed, whole)[0][0] - plain(whole[0])) > 1e-3, "read from packed pages"


def test_a_plan_counts_the_layers_with_attention(
    hybrid: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, (_, attention, _) = hybrid
    found = plan(model, recipes.get("saw-int4"), context=1000)
    cache = HybridCache(model, "saw-int4", max_tokens=1000, max_sequences=1)
    with torch.no_grad():
        model(torch.tensor([prompt(0, 3)]), past_key_values=cache)  # allocates
    assert found.recipe.request_bytes == cache.nbytes and len(cache.packed.shape.layers) == len(attention)
    model.config.save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--recipe", "saw-int4", "--context", "1000"]) == 0
    assert "saw-int4" in capsys.readouterr().out


def test_commands_take_a_hybrid_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """calibrate, check, generate and eval; the model's own numbers of layers are printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, text, fitted = lfm2_like(tmp_path / "model"), tmp_path / "text.txt", tmp_path / "fitted"
    save_tokenizer(path)
    text.write_text("To be fitted on, and to be scored. " * 40)
    model, recipe = ("--model", str(path), "--device", "cpu"), ("--recipe", "kvant-2:sink=4,recent=16")
    assert main(["calibrate", *model, *recipe, "--text", str(text), "--out", str(fitted)]) == 0
    assert tuple(Artifact.load(fitted).tensors) == (2, 5)
    given = (*model, *recipe, "--artifact", str(fitted))
    capsys.readouterr()
    assert main(["check", *given, "--tokens", "200", "--json"]) in (0, 1)  # of a random model, it may be unfit
    (found,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert found["verdict"] == "good" or re.search("layer (2|5)", found["why"]), found
    generate = ("--prompt", "Once upon a time " * 4, "--max-new-tokens", "8", "--json", "--unfit-anyway")
    assert main(["generate", *given, *generate]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["results"]
    assert answer["packed_tokens"] > 20 and answer["times_smaller"] > 1
    assert main(["eval", *given, "--text", str(text), "--context", "200", "--tokens", "100", "--profile"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = [
        row for row in rows if len(row) == 6 and all(re.fullmatch(r"[\d.e+-]+", x) for x in row)
    ]  # no title that is wrapped
    assert [row[0] for row in numbers][:2] == ["2", "5"]


def test_tasks_are_answered(hybrid: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unquantized recipe answers as transformers' own cache, alone and in batches with padding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, _ = hybrid
    path, questions, report = tmp_path / "model", tmp_path / "own.jsonl", tmp_path / "report.json"
    model.save_pretrained(path)
    save_tokenizer(path)
    rows = [{"prompt": f"{'x ' * n}What comes after {n}?", "answer": str(n + 1)} for n in range(0, 50, 10)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    given = ("--model", str(path), "--device", "cpu", "--dtype", "float32", "--task", f"{questions}:new_tokens=8")
    assert main(["eval", *given, "--recipe", "full,int2", "--batch", "3", "--json", str(report)]) == 0
    own, again, full, packed = json.loads(report.read_text())["scores"]
    texts = [[answer["text"] for answer in each["answers"]] for each in (own, again, full, packed)]
    assert texts[0] == texts[1] == texts[2] != texts[3] and len(texts[0]) == 5
    assert packed["bits"] < 8 < full["bits"]
