"""What a user may ask for through additional_config, and how the rest is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import recipes, verdicts
from kvant.artifact import Artifact
from kvant.engines.config_ropes import ropes_from
from kvant.engines.vllm import versions
from kvant.engines.vllm.options import Options, block_tokens, judge, page_tokens, per_layer, refusal
from kvant.engines.vllm.pages import same_pages
from kvant.layout import Layout
from kvant.recipe import MixedRecipe
from kvant.rope import ropes_of
from kvant.serving.tp_shard import shard_heads, shard_tensors
from kvant.verdicts import Verdict
from tests.fitted import made_up_tensors


def test_layers_have_the_recipe_of_their_range() -> None:
    found = Options.of({"kvant": {"recipe": "int4", "layers": {"0-1": "int8", "5": "int2", "3-4": "saw-int4"}}}, 7)
    assert [recipe.name for recipe in found.layers] == ["int8", "int8", "int4", "saw-int4", "saw-int4", "int2", "int4"]
    assert [recipe.name for recipe in per_layer(None, {"0": "int8", "1-": "int2:sink=4"}, 3)][1:] == ["int2:sink=4"] * 2
    with pytest.raises(ValueError, match="a recipe is needed"):
        per_layer(None, None, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "it needs additional_config"),
        ({}, "it needs additional_config"),
        ({"kvant": {"recipe": "int5"}}, "unknown recipe 'int5'"),
        (
            {"kvant": {"recipes": "int4"}},
            "has recipes; known: recipe, artifact, layers, spare_overlay_rows, sink_rows, implementation, unfit",
        ),
        ({"kvant": {"layers": {"0-3": "int4"}}}, "layer 4 has no recipe"),
        ({"kvant": {"layers": {"0-9": "int4"}}}, "'0-9' is not a range of the model's layers 0 to 5"),
        ({"kvant": {"layers": {"0-3": "int4", "3-": "int8"}}}, "layer 3 is named twice"),
        ({"kvant": {"layers": {"a": "int4"}}}, "expected a range such as 3, 0-1 or 2-, got 'a'"),
        ({"kvant": {"artifact": "/nowhere"}}, "no such file or directory"),
        ({"kvant": {"spare_overlay_rows": -1}}, "spare_overlay_rows must be a number from 0, got -1"),
        ({"kvant": {"sink_rows": True}}, "sink_rows must be a number from 0, got True"),
        ({"kvant": {"spare_overlay_rows": 1, "spare_windows": 1}}, "its old name spare_windows are both given"),
        ({"kvant": {"recipe": "int4", "unfit_anyway": 1}}, "unfit_anyway must be true or false, got 1"),
        (
            {"kvant": {"spare_overlay_rows": 2}},
            "has no recipe, and none is known to fit this model: .* kvant check --model M",
        ),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.of(given, 6)


@pytest.mark.parametrize(
    ("name", "page", "block", "reason"),
    [
        ("kivi-k2v2-sink", 64, 128, None),
        ("kitty-pro", 128, 128, None),
        ("squat", 64, 64, None),
        ("int2:sink=64,recent=100", 64, 64, None),
        ("kivi-k2v2:k.flush=32", 64, 64, None),
        ("kivi-k2v2:k.recent=3", 64, 128, "the last 3 are in none: a full block, which vLLM may share, would not be"),
        ("kivi-k2v2:k.flush=96", 64, 192, "a block that ends where they do has 192 tokens, more than 128"),
        ("squat:shared=true", 64, 64, "with what the first sequence of a batch asks"),
        ("int2:sink=65", 64, 64, "its 65 sink tokens do not fit into one page of 64 tokens"),
    ],
)
def test_blocks_hold_whole_groups(name: str, page: int, block: int, reason: str | None) -> None:
    recipe = recipes.get(name)
    assert page_tokens(recipe) == page and block_tokens(recipe) == block
    found = refusal(recipe)
    assert found is None if reason is None else reason in str(found)
    options = Options.of({"kvant": {"recipe": "int4", "layers": {"1": name}}}, 2)
    assert options.page_tokens == page and options.block_tokens == block


def test_the_old_name_of_spare_overlay_rows_works_and_warns() -> None:
    assert Options.of({"kvant": {"recipe": "int4", "spare_overlay_rows": 3}}, 2).spare_overlay_rows == 3
    with pytest.warns(DeprecationWarning, match="spare_windows of additional_config is now called spare_overlay_rows"):
        assert Options.of({"kvant": {"recipe": "int4", "spare_windows": 3}}, 2).spare_overlay_rows == 3
    with (
        pytest.warns(DeprecationWarning, match="spare_windows"),
        pytest.raises(ValueError, match="spare_overlay_rows must be a number from 0, got 'a'"),
    ):
        Options.of({"kvant": {"recipe": "int4", "spare_windows": "a"}}, 2)


def test_an_engine_goes_by_kept_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfit is refused, unknown is warned of, good is taken where no recipe is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = "5" * 64

    def keep(name: str, kl: float, top1: float, bpe: float = 4.5, artifact: str = "") -> None:
        digest = recipes.get(name).digest
        verdicts.keep(Verdict(name, model, digest, artifact, kl, 0.0, top1, bpe, 300.0, 600, "bfloat16"))

    said: list[str] = []

    def judged(config: dict[str, Any], named: str | None = model) -> None:
        options = Options.of({"kvant": config}, 2)
        judge(options, options.layers[0], None, named, said.append)

    judged({"recipe": "saw-int4"})
    judged({"recipe": "saw-int4"}, None)
    assert len(said) == 2 and "recipe saw-int4 has not been checked on this model" in said[0]
    keep("saw-int4", 6.2, 0.05)
    with pytest.raises(verdicts.Unfit, match=r"saw-int4 is unfit .*unfit_anyway"):
        judged({"recipe": "saw-int4"})
    judged({"recipe": "saw-int4", "unfit_anyway": True})
    judged({"layers": {"0": "saw-int4", "1": "int8"}})  # the verdict is of all layers
    judged({"recipe": "full"})
    assert len(said) == 2
    with pytest.raises(ValueError, match="none is known to fit this model"):
        Options.of({"kvant": {}}, 2, lambda: model)
    keep("int8", 0.001, 0.99, 8.5)
    keep("squat", 0.001, 0.99, 2.9)  # which vLLM serves with other settings only
    keep("kitty-pro", 0.001, 0.99, 2.6)  # whose groups begin elsewhere in vLLM
    keep("kivi-k4v4:k.recent=8", 0.001, 0.99, 5.0)  # which vLLM cannot serve
    keep("kvant-4-fast", 0.01, 0.95, 4.5, "f" * 64)  # whose artifact is not given
    assert {recipe.name for recipe in Options.of({"kvant": {}}, 2, lambda: model).layers} == {"int8"}
    with pytest.raises(ValueError, match="none is known to fit this model"):
        Options.of({"kvant": {}}, 2, lambda: None)


def test_the_recipe_may_be_the_artifacts(tmp_path: Path) -> None:
    recipe = recipes.get("oscar:sink=4")
    Artifact(recipe, 2, 64, 1, {0: made_up_tensors(recipe, 2, 64)}).save(tmp_path)
    options = Options.of({"kvant": {"artifact": str(tmp_path)}}, 1)
    assert [each.name for each in options.layers] == ["oscar:sink=4"]


def test_a_fitted_recipe_needs_its_artifact(tmp_path: Path) -> None:
    recipe = recipes.get("oscar")
    with pytest.raises(ValueError, match="recipe oscar is fitted offline"):
        Options((recipe,)).artifact(recipe, 1, 2, 64)
    artifact = Artifact(recipe, 2, 64, 1, {0: made_up_tensors(recipe, 2, 64)})
    artifact.save(tmp_path)
    options = Options.of({"kvant": {"recipe": "oscar:sink=4", "artifact": str(tmp_path)}}, 1)
    found = options.artifact(options.layers[0], 1, 2, 64)
    assert found is not None and found.digest == artifact.digest
    with pytest.raises(
        ValueError, match="the artifact was fitted for a model of 1 layers, 2 KV heads of 64; this one has 1, 4"
    ):
        options.artifact(options.layers[0], 1, 4, 64)
    assert options.artifact(recipes.get("int4"), 1, 4, 64) is None


def test_every_recipe_is_served_or_refused_with_its_reason() -> None:
    served = {name for name in recipes.names() if refusal(recipes.get(name)) is None}
    wanted = (
        "int8",
        "int4",
        "int3",
        "int2",
        "kvant-4-fast",
        "kvant-2",
        "oscar",
        "saw-int4",
        "quarot-int2",
        "vecinfer-2",
    )
    assert served.issuperset(wanted)
    assert served.issuperset(
        n for n in recipes.names() if n.startswith(("saw", "quarot", "vecinfer", "million", "turbo"))
    )
    for name in set(recipes.names()) - served:
        reason = refusal(recipes.get(name))
        assert reason is not None and "groups of" in reason, (name, reason)
    assert "sink tokens do not fit into one page" in str(refusal(recipes.get("int4:sink=65")))


def test_versions() -> None:
    for version in ("0.26.0", "0.29.0", "0.32.1+cpu", "0.33.0"):
        versions.check(version)
    for version in ("0.28.0", "0.34.0"):
        with pytest.raises(ValueError, match=rf"inside vLLM 0.26.x and 0.29.x to 0.33.x, this is vLLM {version}"):
            versions.check(version)


@pytest.mark.parametrize(("total", "world"), [(8, 1), (8, 2), (6, 3), (2, 4), (1, 2)])
def test_ranks_have_their_heads(total: int, world: int) -> None:
    found = [shard_heads(total, world, rank) for rank in range(world)]
    assert sorted({head for heads in found for head in heads}) == list(range(total))
    assert len({len(heads) for heads in found}) == 1
    with pytest.raises(ValueError, match="cannot"):
        shard_heads(3, 2, 0)


@pytest.mark.parametrize(
    "name", ["oscar", "oscar:per_head=true", "kvant-2", "vecinfer-2", "saw-int4-kmeans", "kvant-4-fast"]
)
def test_a_rank_codes_its_heads_as_the_whole_does(name: str) -> None:
    """The pages of a rank's heads, from its part of the artifact, are those heads' pages of the whole model."""
    from kvant.layout import Layout
    from kvant.ops import LayerStore, PagedBatch
    from kvant.ops.reference import append
    from kvant.rope import Rope

    recipe, total, dim, tokens = recipes.get(name), 4, 64, 70
    tensors = made_up_tensors(recipe, total, dim)
    rope = Rope(torch.rand(dim // 2)) if recipe.wants_rope else None
    at = torch.arange(tokens)
    column = torch.tensor([0])
    batch = PagedBatch(
        torch.tensor([[1, 0]]),
        column + tokens,
        (1 - at // 64) * 64 + at % 64,
        torch.tensor([0, tokens]),
        column,
        column,
        {"key": column, "value": column},
    )
    k, v = torch.randn(2, tokens, total, dim)
    stores = []
    for heads in (range(total), range(2, 4)):
        store = LayerStore.allocate(
            Layout.of(recipe, len(heads), dim, 64), 2, 1, tensors=shard_tensors(tensors, total, heads), rope=rope
        )
        append(store, k[:, list(heads)], v[:, list(heads)], batch)
        stores.append(store)
    for stream in ("key", "value"):
        whole, part = (store.layout.unpack(stream, store.pages) for store in stores)
        slots = batch.slot_mapping
        for field, found in part.items():
            assert torch.equal(found[slots], whole[field][slots][:, 2:4]), (stream, field)


def test_ropes_come_from_the_config() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=50,
        intermediate_size=16,
    )
    model = transformers.LlamaForCausalLM(config)
    for mine, theirs in zip(ropes_from(config, 2), ropes_of(model, 2), strict=True):
        torch.testing.assert_close(mine.inv_freq, theirs.inv_freq)


def test_an_artifact_may_have_a_recipe_for_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    each = [recipes.get(name) for name in ("kvant-2", "kvant-2:v.bits=3", "kvant-2")]
    mixed = MixedRecipe.of("tuned-2.5", each[0], each)
    artifact = Artifact(mixed, 2, 64, 3, {i: made_up_tensors(r, 2, 64) for i, r in enumerate(each)})
    artifact.save(tmp_path / "tuned")
    given = {"artifact": str(tmp_path / "tuned")}
    options = Options.of({"kvant": given}, 3)
    assert options.layers == tuple(each) and options.whole == mixed and refusal(mixed) is None
    for recipe in each:  # one artifact for all of its layers
        found = options.artifact(recipe, 3, 2, 64)
        assert found is not None and found.digest == artifact.digest
    with pytest.raises(ValueError, match="tuned-2.5 is for 3 layers, the model has 4"):
        Options.of({"kvant": given}, 4)
    said: list[str] = []
    judge(options, each[1], artifact, "5" * 64, said.append)
    assert "recipe tuned-2.5 has not been checked on this model: run kvant check --model M --artifact DIR" in said[0]
    figures = (3.0, 0.0, 0.1, 2.5, 300.0, 600, "bfloat16")
    verdicts.keep(Verdict(mixed.name, "5" * 64, mixed.digest, artifact.digest, *figures))
    with pytest.raises(verdicts.Unfit, match=r"tuned-2.5 is unfit"):
        judge(options, each[1], artifact, "5" * 64, said.append)
    some = Options.of({"kvant": {**given, "layers": {"0": "int8", "1-": "int4"}}}, 3)
    assert some.mixed is None and some.whole is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (3, "draft must be the name of a recipe, got 3"),
        ("oscar", "artifacts and rotary embeddings are those of the model"),
        ("int4:sink=4,recent=16", "it keeps tokens outside of pages"),
        ("int4:sink=4", "it keeps tokens outside of pages"),
        ("kivi-k2v2", "it keeps tokens outside of pages"),
    ],
)
def test_a_draft_has_a_recipe_that_keeps_all_in_pages(name: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.of({"kvant": {"recipe": "int4", "draft": name}}, 3)
    assert Options.of({"kvant": {"recipe": "kvant-2", "draft": "saw-int4"}}, 3).draft == recipes.get("saw-int4")
    assert Options.of({"kvant": {"recipe": "int4"}}, 3).draft is None


def test_layers_with_a_sliding_window_may_have_a_recipe_of_their_own() -> None:
    options = Options.of({"kvant": {"recipe": "int4", "sliding": "full"}}, 3)
    assert [options.recipe_of(1, window).name for window in (None, 100)] == ["int4", "full"]
    assert options.whole == recipes.get("int4")  # a verdict on the model holds: these layers are exact
    assert Options.of({"kvant": {"recipe": "int4", "sliding": "int8"}}, 3).whole is None
    assert Options.of({"kvant": {"recipe": "int4", "sliding": "kitty-pro"}}, 3).block_tokens == 128
    with pytest.raises(ValueError, match="sliding must be the name of a recipe, got 3"):
        Options.of({"kvant": {"recipe": "int4", "sliding": 3}}, 3)


def layout_of(name: str, dim: int = 128, dtype: str = "bfloat16") -> Layout:
    layout = Layout.of(recipes.get(name), 2, dim, 64, dtype=dtype, device="cpu")
    return dataclasses.replace(layout, align=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("names", [("saw-int4", "full"), ("int2", "full"), ("int4", "int8"), ("int4", "int2", "full")])
def test_blocks_of_all_kinds_of_cache_have_the_same_bytes(names: tuple[str, ...], dim: int, dtype: str) -> None:
    layouts = [layout_of(name, dim, dtype) for name in names]
    windows = [100 if name == "full" else None for name in names]
    found = same_pages(layouts, windows, 64)
    for before, (layout, block), name in zip(layouts, found, names, strict=True):
        assert layout.sections[-1].offset + layout.sections[-1].nbytes <= layout.page_head_bytes
        assert layout.page_head_bytes % layout.page_tokens == 0  # vLLM counts bytes of a token
        assert block % layout.page_tokens == 0 and layout.recipe == before.recipe
        assert block == layout.page_tokens if name == "full" else block >= 64
    sizes = {layout.page_bytes * (block // layout.page_tokens) for layout, block in found}
    assert len(sizes) == 1, found


def test_pages_that_are_equal_stay_as_they_are() -> None:
    same = [layout_of("int4"), layout_of("int4")]
    assert [each.layout for each in same_pages(same, [None, 100], 64)] == same
    assert same_pages([layout_of("full")], [None], 64)[0].block_tokens == 64


def test_no_layer_makes_all_blocks_as_large_as_in_16_bits() -> None:
    with pytest.raises(ValueError, match='all pages would be as large as those in 16 bits.*"sliding": "full"'):
        same_pages([layout_of("int4"), layout_of("full")], [100, None], 64)
