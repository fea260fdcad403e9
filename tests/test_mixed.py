"""A recipe for every layer: one artifact, layers with pages of different sizes, one set of block tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import recipes
from kvant.artifact import Artifact
from kvant.eval import Segments, evaluate
from kvant.layouts import Layouts
from kvant.recipe import MixedRecipe, Recipe
from kvant.shape import ModelShape
from tests.engines.test_hf import make_model, prompt
from tests.fitted import made_up_tensors

WINDOW = "sink=3,recent=8"  # values of kvant-2 in fp8, those of kvant-4-fast in 16 bits
BASE = f"kvant-2:{WINDOW}"
LAYERS = (f"kvant-2:k.bits=4,v.bits=3,{WINDOW}", BASE, f"kvant-4-fast:{WINDOW}")


def mixed(names: tuple[str, ...] = LAYERS) -> MixedRecipe:
    return MixedRecipe.of("mixed-test", recipes.get(BASE), [recipes.get(name) for name in names])


def artifact_of(recipe: Recipe, layers: int = 3, heads: int = 2, dim: int = 64) -> Artifact:
    """Random tensors; those of a layer depend on its number and on its recipe alone."""
    tensors = {}
    for layer in range(layers):
        torch.manual_seed(layer)
        tensors[layer] = made_up_tensors(recipe.at(layer), heads, dim)
    return Artifact(recipe, heads, dim, layers, tensors)


def test_it_is_read_back_from_json_and_from_an_artifact(tmp_path: Path) -> None:
    recipe = mixed((*LAYERS, LAYERS[0]))
    assert recipe.layers == (0, 1, 2, 0) and len(recipe.recipes) == 3
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe and again.digest == recipe.digest and hash(again) == hash(recipe)
    assert [each.name for each in recipe] == [*LAYERS, LAYERS[0]]
    artifact = artifact_of(recipe, 4)
    artifact.save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert loaded.recipe == recipe and loaded.digest == artifact.digest
    loaded.check(recipe, 4, 2, 64)
    with pytest.raises(ValueError, match="not for kvant-2"):
        loaded.check(recipes.get("kvant-2"), 4, 2, 64)
    with pytest.raises(ValueError, match="its recipe is for 4 layers, it has 5"):
        Artifact(recipe, 2, 64, 5, artifact.tensors).save(tmp_path / "other")


def test_the_digest_says_which_layer_has_which_recipe() -> None:
    assert mixed().digest != mixed(tuple(reversed(LAYERS))).digest
    assert mixed().fits != mixed(tuple(reversed(LAYERS))).fits


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((BASE, "kvant-2:sink=3,recent=9"), "must have the same windows"),
        ((BASE, "kivi-k2v2"), "must have the same windows"),
        ((), "names one of its recipes for every layer"),
    ],
)
def test_layers_that_cannot_share_block_tables_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixed(names)


def test_bits_are_the_mean_over_layers() -> None:
    recipe = mixed()
    found = Layouts.of(recipe, 3, 2, 64)
    each = [Layouts.of(own, 1, 2, 64) for own in recipe]
    for tokens in (None, 100, 32768):
        mean = sum(layout.bits_per_element(tokens) for layout in each) / 3
        assert found.bits_per_element(tokens) == pytest.approx(mean)
    assert found.page_bytes == sum(layout.page_bytes for layout in each)
    assert len({layout.page_bytes for layout in found.layers}) == 3
    planned = kvant.plan(ModelShape((None,) * 3, 2, 64, "float32"), recipe, "1GiB", 4096).recipe
    assert planned.bits == found.bits_per_element() and planned.recipe == "mixed-test"
    with pytest.raises(ValueError, match="for 3 layers, the model has 4"):
        Layouts.of(recipe, 4, 2, 64)
    with pytest.raises(ValueError, match="have different layouts"):
        kvant.Layout.of(recipe, 2, 64)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_every_layer_stores_what_its_recipe_stores(family: str) -> None:
    """The pages of a layer are those of a cache whose layers all have its recipe, over the same keys and values."""
    model, ids = make_model(family), prompt(2, 90)
    recipe = mixed()
    random = torch.Generator().manual_seed(0)
    states = [tuple(torch.randn(2, 2, 90, 64, generator=random) for _ in range(2)) for _ in range(3)]
    cache = kvant.Cache(model, artifact=artifact_of(recipe))
    cache.fill(ids, None, states)  # type: ignore[arg-type]
    assert cache.nbytes == cache.predicted_nbytes > 0
    sizes = set()
    for layer, own in enumerate(recipe):
        alone = kvant.Cache(model, own, artifact=artifact_of(own))
        alone.fill(ids, None, states)  # type: ignore[arg-type]
        mine, theirs = cache.store_of(layer)[0], alone.store_of(layer)[0]
        assert mine.layout == theirs.layout
        for name in ("key", "value"):
            stored = [store.layout.unpack(name, store.pages[:1]) for store in (mine, theirs)]
            for part in stored[0]:
                assert torch.equal(stored[0][part][:64], stored[1][part][:64]), (layer, name, part)
        sizes.add(mine.layout.page_bytes)
    assert len(sizes) == 3


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_a_generation_goes_on_after_saving_swapping_and_sharing(family: str, tmp_path: Path) -> None:
    model, ids = make_model(family), prompt(2, 70)
    artifact = artifact_of(mixed())
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = kvant.Cache(model, artifact=artifact).generate(model, ids, **options)
    cache = kvant.Cache(model, artifact=artifact, share=True)
    assert torch.equal(cache.generate(model, ids, **{**options, "max_new_tokens": 6}), expected[:, :76])
    cache.swap_in(cache.swap_out())
    path = cache.save(tmp_path / "saved")
    again = kvant.Cache.load(path, model, artifact=artifact)
    assert again.recipe == mixed() and again.digest == cache.digest
    assert torch.equal(again.generate(model, expected[:, :76], **{**options, "max_new_tokens": 6}), expected)
    assert again.reused == 75
    with pytest.raises(ValueError, match="is of another cache|was fitted for"):
        kvant.Cache.load(path, model, artifact=artifact_of(mixed(tuple(reversed(LAYERS)))))


def test_fixed_steps_write_what_generate_writes() -> None:
    from kvant.engines import graphs

    model, ids = make_model("llama"), prompt(2, 50)
    artifact = artifact_of(mixed())
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, past_key_values=kvant.Cache(model, artifact=artifact), **options)

    def sample(*args: Any, **kwargs: Any) -> Any:
        return graphs.sample(*args, capture=False, **kwargs)

    cache = kvant.Cache(model, artifact=artifact)
    found = model.generate(ids, past_key_values=cache, custom_generate=sample, **options)
    assert torch.equal(found, expected)


def test_evaluation_is_the_same_at_once_and_step_by_step() -> None:
    """By the reference: kernels round queries and weights, which moves a code of the next layer now and then, and with it the KL."""
    model, recipe = make_model("llama"), mixed()
    artifact = artifact_of(recipe)
    segments = Segments(prompt(2, 60), 30)

    def make_cache(recipe: MixedRecipe) -> kvant.Cache:
        return kvant.Cache(model, recipe, artifact=artifact, implementation="reference")

    both = [evaluate(model, [recipe], segments, make_cache=make_cache, stepwise=one) for one in (False, True)]
    assert both[0][0].kl == pytest.approx(both[1][0].kl, rel=1e-3)
    assert both[0][0].bpe == Layouts.of(recipe, 3, 2, 64, dtype="float32", device="cpu").bits_per_element(
        segments.length
    )
    assert both[0][0].recipe == "mixed-test"


def test_a_cache_names_the_implementations_of_all_layers() -> None:
    model = make_model("llama")
    cache = kvant.Cache(model, artifact=artifact_of(mixed()))
    cpu = torch.device("cpu")
    names = {kvant.Cache(model, own, artifact=artifact_of(own)).implementation("decode", cpu) for own in mixed()}
    assert set(cache.implementation("decode", cpu).split(", ")) == names
    with pytest.raises(ValueError, match="layers have different recipes"):
        _ = cache.layout


def test_windows_of_all_layers_change_together() -> None:
    wider = mixed().with_fields({"recent": "16"})
    assert isinstance(wider, MixedRecipe)
    assert {own.key.window.recent for own in wider} == {wider.key.window.recent} == {16}
    assert artifact_of(mixed()).serving(wider).recipe == wider


def test_what_is_for_one_recipe_refuses_it() -> None:
    from kvant.calibrate.run import calibrate
    from kvant.engines.fold import fold

    model = make_model("llama")
    with pytest.raises(ValueError, match="which kvant tune chooses"):
        calibrate(model, None, mixed(), torch.arange(50))
    with pytest.raises(ValueError, match="its layers have different recipes"):
        fold(model, mixed(), artifact_of(mixed()))
