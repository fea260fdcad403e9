"""From a model and a budget to an artifact that caches take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.layouts import Layouts
from kvant.recipe import MixedRecipe, Window
from kvant.shape import ModelShape
from kvant.tune import run
from kvant.tune.candidates import BASE, CANDIDATES, parse
from kvant.tune.run import Tuned, check, limits, tune, windows_of
from tests.engines.test_hf import make_model

RECENT = (8, 24)
SHAPE = ModelShape((None,) * 3, 2, 64, "float32")


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose second layer attends to keys and values that hardly reach its output."""
    made = make_model("llama", initializer_range=0.1)
    with torch.no_grad():
        made.model.layers[1].self_attn.o_proj.weight.mul_(1e-3)
    return made


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(2, 200, (800,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tuned(model: Any, text: torch.Tensor) -> Tuned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "EXCERPT_TOKENS", 150)
        return tune(model, None, 2.7, text, context=1024, recent=RECENT)


def test_the_budget_is_kept_and_used(tuned: Tuned) -> None:
    recipe = tuned.artifact.recipe
    assert isinstance(recipe, MixedRecipe) and recipe.name == "tuned-2.7"
    counted = Layouts.of(recipe, 3, 2, 64, dtype="float32").bits_per_element(1024)
    assert tuned.bits == counted <= 2.7
    assert sum(layer.bits for layer in tuned.layers) / 3 == pytest.approx(counted)
    assert counted > 2.4, "a step of one stream of one layer is smaller"
    assert tuned.window in windows_of(RECENT) and recipe.key.window == tuned.window


def test_an_interrupted_run_goes_on(
    tuned: Tuned, model: Any, text: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Interrupted while it measures the result, it has kept the sensitivities."""
    monkeypatch.setattr(run, "EXCERPT_TOKENS", 150)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: set[str] = set()

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "measuring the result":
            raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt, match=r"kept \d+ measured sensitivities; the same command goes on from there"
    ):
        tune(model, None, 2.7, text, context=1024, recent=RECENT, progress=interrupt)
    assert len(list((tmp_path / "kvant" / "unfinished").iterdir())) == 1
    found = tune(model, None, 2.7, text, context=1024, recent=RECENT, progress=lambda stage, *at: seen.add(stage))
    assert "measuring the result" in seen and "sensitivity" not in seen
    assert found.artifact.digest == tuned.artifact.digest
    assert not list((tmp_path / "kvant" / "unfinished").iterdir())


def test_bits_go_where_the_output_depends_on_them(tuned: Tuned) -> None:
    assert tuned.layers[1].bits == min(layer.bits for layer in tuned.layers) < max(layer.bits for layer in tuned.layers)
    assert tuned.layers[1].key_kl + tuned.layers[1].value_kl < 0.1 * tuned.predicted


def test_it_says_what_it_predicts_and_measures(tuned: Tuned) -> None:
    assert tuned.predicted == pytest.approx(sum(layer.key_kl + layer.value_kl for layer in tuned.layers))
    assert [result.recipe for result in tuned.results] == ["tuned-2.7", BASE]
    assert tuned.results[0].kl > 0.0
    assert tuned.base_bits == Layouts.of(recipes.get(BASE), 3, 2, 64, dtype="float32").bits_per_element(1024)
    assert tuned.artifact.source["tuned"] == {"bits": 2.7, "context": 1024}


def test_the_artifact_serves(tuned: Tuned, model: Any, text: torch.Tensor, tmp_path: Any) -> None:
    tuned.artifact.save(tmp_path)
    cache = kvant.Cache(model, artifact=tmp_path)
    assert cache.recipe == tuned.artifact.recipe
    out = cache.generate(model, text[None, :120].long(), max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 124) and cache.nbytes == cache.predicted_nbytes
    for recipe in tuned.artifact.recipe.recipes:  # type: ignore[attr-defined]
        assert recipes.get(recipe.name) == recipe, "the name of a layer's recipe is one that can be asked for"


def test_the_same_seed_chooses_the_same(tuned: Tuned, model: Any, text: torch.Tensor, monkeypatch: Any) -> None:
    monkeypatch.setattr(run, "EXCERPT_TOKENS", 150)
    again = tune(model, None, 2.7, text, context=1024, recent=RECENT)
    assert again.layers == tuned.layers and again.artifact.digest == tuned.artifact.digest


def test_layers_have_few_recipes(model: Any, text: torch.Tensor, monkeypatch: Any) -> None:
    monkeypatch.setattr(run, "EXCERPT_TOKENS", 150)
    studied = run.study(model, None, text, recent=RECENT)
    found = [studied.tune(2.7, 1024, most) for most in (1, 2, 6)]
    for each, most in zip(found, (1, 2, 6), strict=True):
        assert len({layer.recipe for layer in each.layers}) <= most and each.bits <= 2.7
    assert found[0].predicted >= found[1].predicted >= found[2].predicted


def test_more_recent_tokens_are_counted() -> None:
    named = parse(CANDIDATES)
    small, large = (limits(SHAPE, named, [Window(4, recent)], 1024) for recent in (8, 256))
    assert small[0] < large[0] and small[1] < large[1]


@pytest.mark.parametrize(
    ("bits", "context", "message"),
    [
        (1.0, 32768, "bits must be at least .*, which the smallest candidates take at 32768 tokens, got 1"),
        (9.0, 32768, "bits must be at most .*, which the largest candidates take"),
        (float("nan"), 32768, "bits must be at least"),
        (2.5, 0, "context must be positive"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(bits: float, context: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(SHAPE, bits, context, parse(CANDIDATES), windows_of((64,)))


def test_a_text_that_is_too_short_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="the text has 100 tokens, too few"):
        tune(model, None, 2.7, torch.arange(2, 102), context=1024, recent=RECENT)


def test_the_built_in_text_is_read_where_none_is_given() -> None:
    tokenizer = ByBytes()
    found = run.texts_of(tokenizer, None, None)
    assert found.fit is None and len(found.excerpts) == run.EXCERPTS
    assert all(400 < len(ids) <= run.EXCERPT_TOKENS for ids in found.excerpts)
    held = bytes(found.held_out.ids.flatten().tolist()).decode(errors="replace")
    for ids in found.excerpts:  # nothing is measured on what was chosen on
        assert bytes(ids.tolist())[:200].decode(errors="replace") not in held
    starts = [bytes(ids.tolist())[:40] for ids in found.excerpts]
    assert len(set(starts)) == run.EXCERPTS


@pytest.mark.parametrize("given", [False, True])
def test_held_out_segments_begin_as_the_text_does(given: bool) -> None:
    """As those of kvant eval: a model that was trained with a token at the beginning predicts otherwise without it."""
    text = "".join(f"Line {i} of a text that is held out in part.\n" for i in range(400)) if given else None
    found, plain = (run.texts_of(tokenizer, text, 300).held_out for tokenizer in (Begins(), ByBytes()))
    assert len(found.ids) > 1 and found.prompt == plain.prompt
    assert (found.ids[:, 0] == Begins.bos_token_id).all() and (found.ids[:, 1:] != Begins.bos_token_id).all()
    assert found.ids[0, 1:].tolist() == plain.ids[0, :-1].tolist()


class ByBytes:
    """A tokenizer of bytes, without a chat template."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


class Begins(ByBytes):
    """One that begins a text with a token of its own."""

    bos_token_id = 256

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [*([self.bos_token_id] if add_special_tokens else []), *text.encode()]}


def test_the_fit_on_the_built_in_text_is_the_one_that_is_cached(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvant.artifact_for` and a second study take it up; a study with another seed does not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "EXCERPT_TOKENS", 150)
    monkeypatch.setattr(run, "EXCERPTS", 1)
    monkeypatch.setattr("kvant.calibrate.builtin.TOKENS", 600)
    model, tokenizer = make_model("llama", vocab_size=260, initializer_range=0.1), ByBytes()
    first = run.study(model, tokenizer, recent=RECENT).tune(2.7, 1024)
    calls: list[Any] = []
    fitting = run.calibrate_all
    monkeypatch.setattr(run, "calibrate_all", lambda *args, **options: calls.append(args) or fitting(*args, **options))
    again = run.study(model, tokenizer, recent=RECENT).tune(2.7, 1024)
    assert not calls and again.artifact.digest == first.artifact.digest and again.layers == first.layers
    found = kvant.artifact_for(model, tokenizer, BASE)
    assert found is not None
    for layer, tensors in first.artifact.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found.tensors[layer][name])
    run.study(model, tokenizer, recent=RECENT, seed=1)
    assert len(calls) == 1
