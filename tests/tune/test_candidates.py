from __future__ import annotations

import pytest

from kvant import recipes
from kvant.layout import Layout
from kvant.recipe import Window
from kvant.shape import ModelShape
from kvant.tune import candidates
from kvant.tune.candidates import CANDIDATES, combined, fast_devices, options, pairs, parse, slow, windowed

SHAPE = ModelShape((None,) * 4, 2, 128, "bfloat16")


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("kvant-2", "kvant-2", "kvant-2"),
        ("kvant-2:k.bits=4", "kvant-2", "kvant-2:k.bits=4"),
        ("kvant-2:k.bits=4,v.bits=1", "kvant-2:k.bits=2,v.bits=3", "kvant-2:k.bits=4,v.bits=3"),
        ("kvant-2:k.bits=4,recent=9", "kvant-2:v.bits=3,recent=9", "kvant-2:k.bits=4,v.bits=3,recent=9"),
        ("int4:sink=4,recent=64", "kvant-2:v.bits=3", "int4:sink=4,recent=64|kvant-2:v.bits=3"),
    ],
)
def test_keys_of_one_and_values_of_another(key: str, value: str, name: str) -> None:
    one, other = recipes.get(key), recipes.get(value)
    found = combined(one, other)
    assert (found.key, found.value, found.name) == (one.key, other.value, name)
    if "|" not in name:
        assert recipes.get(name) == found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kvant-2", "kvant-2:sink=4,recent=128,v.window_dtype=model"),
        ("kvant-2:recent=128", "kvant-2:sink=4,recent=128,v.window_dtype=model"),
        ("kvant-2:k.bits=4,recent=9", "kvant-2:k.bits=4,sink=4,recent=128,v.window_dtype=model"),
        ("kvant-4", "kvant-4:sink=4,recent=128"),
        ("kvant-4-fast", "kvant-4-fast:sink=4,recent=128"),
    ],
)
def test_windows_are_replaced(name: str, expected: str) -> None:
    recipe = recipes.get(name)
    found = windowed(recipe, Window(4, 128))
    assert found.name == expected and found == recipes.get(expected)
    assert found.fits == recipe.fits
    own = recipes.get("kvant-4").key.window
    assert windowed(windowed(recipes.get("kvant-4"), Window(4, 128)), own).name == "kvant-4"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_candidates_are_read_by_fast_kernels(head_dim: int) -> None:
    """On CPUs and on GPUs; what is not is left out with a reason."""
    shape = ModelShape((None,), 2, head_dim, "bfloat16")
    found = options(parse(CANDIDATES), shape)
    made = list(pairs(found, shape))
    assert len(found.keys) >= 3 and len(found.values) >= 3 and len(made) >= 9
    for _, _, recipe in made:
        assert slow(recipe, shape) is None
        for device in fast_devices(shape):
            assert Layout.of(recipe, 2, head_dim, device=device).order != "plain"
    assert fast_devices(shape) == (("cpu",) if head_dim == 96 else ("cpu", "cuda"))
    assert recipes.get(candidates.BASE).key in [choice.spec for choice in found.keys]
    for name, reason in found.refused.items():
        assert name in CANDIDATES and reason


def test_a_stream_of_a_recipe_that_is_slow_as_a_whole_is_kept() -> None:
    shape = ModelShape((None,), 2, 64, "bfloat16")
    whole = recipes.get("kvant-2:k.bits=4/1/0,v.bits=3")
    found = options([recipes.get("kvant-2"), whole], shape)
    assert list(found.refused) == [whole.name] and "part of a byte" in found.refused[whole.name]
    assert [choice.spec.codec.bits for choice in found.keys] == ["4/2/0"]  # type: ignore[attr-defined]
    assert [choice.spec.codec.bits for choice in found.values] == ["2", "3"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["kivi-k2v2"], "coded in groups of 32 tokens"), (["kvant-9"], "unknown recipe"), ([], "got none")],
)
def test_what_cannot_be_mixed_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(names)
