"""The settings of KIVI, Kitty, SQuat, GEAR and ZipCache as their papers have them, and their bits counted by hand."""

from __future__ import annotations

import pytest

from kvant import recipes
from kvant.layout import Layout
from kvant.recipe import Span, Window, spans

BITS: dict[str, tuple[float, float]] = {  # of keys and values, at head_dim 64 and 128
    "kivi-k2v2": (3.0, 3.0),  # 2 + 32 / 32 each
    "kivi-k4v4": (5.0, 5.0),
    "kivi-k2v2-sink": (3.0, 3.0),
    "kivi-k4v2-sink": (4.0, 4.0),
    "kivi-k2v4-sink": (4.0, 4.0),
    "kivi-k2v2-sink:k.group=128,v.group=0": ((2.25 + 2.5) / 2, 2.25),
    # keys: 2 + 2 * boost + 8 / 128 for the index + 32 / 128; values: 2 + 32 / head_dim
    "kitty": ((2.5625 + 2.5) / 2, (2.5625 + 2.25) / 2),
    "kitty-pro": ((2.8125 + 2.5) / 2, (2.8125 + 2.25) / 2),
    "squat": (3.0, 3.0),
    "squat-pre": (3.0, 3.0),
    # KIVI's 3 and the factors, 2 * 16 * (1 / 128 + 1 / head_dim)
    "gear-l": (3.75, 3.5),
    # and the outliers, 2 * 24 bits of every channel's 128 tokens or of every token
    "gear": (3.75 + (48 / 128 + 48 / 64) / 2, 3.5 + 48 / 128),
    # 51 of 128 tokens have 2 more bits, a token's index 8; keys: 2 scales and minima a channel; values: one of each a
    # token, and 16 bits a channel for the group
    "zipcache": (
        2 + 102 / 128 + 8 / 64 + (64 / 128 + 32 / 64 + 16 / 128) / 2,
        2 + 102 / 128 + 8 / 128 + (64 / 128 + 32 / 128 + 16 / 128) / 2,
    ),
}


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize(("head_dim", "which"), [(64, 0), (128, 1)])
def test_bits_are_what_the_fields_add_up_to(name: str, head_dim: int, which: int) -> None:
    layout = Layout.of(recipes.get(name), 2, head_dim)
    assert layout.bits_per_element() == pytest.approx(BITS[name][which], abs=1e-9)


def test_kivi_has_its_papers_windows_and_the_sinks_shift_the_grid() -> None:
    recipe = recipes.get("kivi-k2v2")
    assert (recipe.key.window, recipe.value.window) == (Window(0, 0, 128), Window(0, 128))
    assert spans(recipe, 300) == (
        Span(0, 172, "packed", "packed"),
        Span(172, 256, "packed", "full"),
        Span(256, 300, "full", "full"),
    )
    recipe = recipes.get("kivi-k2v2-sink")
    assert (recipe.origin, recipe.key.window, recipe.value.window) == (32, Window(32, 0, 128), Window(32, 128))


def test_kittys_page_is_its_group_and_starts_at_token_32() -> None:
    recipe = recipes.get("kitty")
    layout = Layout.of(recipe, 8, 128)
    assert (recipe.origin, layout.page_tokens, layout.order) == (32, 128, "fragment")
    assert [layout.pages_for(n) for n in (1, 32, 33, 160, 161)] == [0, 0, 1, 1, 2]
    assert spans(recipe, 32 + 128 + 5) == (
        Span(0, 32, "full", "full"),
        Span(32, 37, "packed", "packed"),
        Span(37, 160, "packed", "full"),
        Span(160, 165, "full", "full"),
    )


def test_squats_setting_of_kivi_is_a_matter_of_fields() -> None:
    squat, kivi = recipes.get("squat"), recipes.get("kivi-k2v2:group=32,k.flush=32,v.recent=32")
    assert (squat.key.codec, squat.key.window) == (kivi.key.codec, kivi.key.window)
    assert squat.value == kivi.value
    pre = recipes.get("squat-pre:rank=20,weight=0.0005,block=64,shared=true")
    assert pre.wants_rope
    assert pre.wants_queries
    assert not squat.wants_rope
    assert recipes.get("squat:k.weight=0").key.corrector != squat.key.corrector


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", BITS)
def test_every_recipe_serves_the_usual_head_dims(name: str, head_dim: int) -> None:
    layout = Layout.of(recipes.get(name), 3, head_dim)
    assert layout.order == "fragment", layout.order_reason
