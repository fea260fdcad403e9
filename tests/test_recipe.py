from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant import recipes
from kvant.codecs.affine import Affine
from kvant.recipe import Recipe, Stream, Window, spans
from kvant.transforms.hadamard import Hadamard


@given(st.integers(0, 100), st.integers(0, 300), st.integers(0, 1000))
def test_window_packs_everything_between_sink_and_recent(sink: int, recent: int, n: int) -> None:
    end = Window(sink, recent).packed_end(n)
    assert end == max(min(n, sink), n - recent)


@given(st.integers(0, 64), st.integers(0, 200), st.sampled_from([1, 16, 32, 128]), st.integers(0, 1000))
def test_a_flush_is_whole_and_the_ring_holds_the_rest(sink: int, recent: int, flush: int, n: int) -> None:
    window = Window(sink, recent, flush)
    end = window.packed_end(n)
    assert min(n, sink) <= end <= n
    assert (end - min(n, sink)) % flush == 0
    assert n - end <= window.ring or n <= sink
    assert window.packed_end(n + 1) >= end, "what is packed stays packed"


@given(st.sampled_from(recipes.names()), st.integers(0, 2000))
def test_spans_cover_every_token_once(name: str, n: int) -> None:
    recipe = recipes.get(name)
    found = spans(recipe, n)
    assert len(found) <= 4
    assert [token for span in found for token in range(span.start, span.stop)] == list(range(n))
    for span in found:
        for side, place in (("key", span.key), ("value", span.value)):
            window = recipe.streams[side].window
            for token in (span.start, span.stop - 1):
                packed = window.sink <= token < window.packed_end(n)
                assert place == ("packed" if packed else "full")


@pytest.mark.parametrize("name", recipes.names())
def test_json_round_trip(name: str) -> None:
    recipe = recipes.get(name)
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.digest == recipe.digest
    assert hash(again) == hash(recipe)


def test_digest_sees_what_decides_bytes_and_not_the_name() -> None:
    base = recipes.get("int4")
    assert recipes.get("int4:bits=4").digest == base.digest
    assert recipes.get("int4:bits=4").name != base.name
    digests = {
        recipes.get(text).digest for text in ("int4", "int4:group=32", "int4:k.bits=2", "int4:recent=8", "saw-int4")
    }
    assert len(digests) == 5


def test_groups_may_begin_at_the_first_token() -> None:
    """Then sinks are coded as well, and read in full precision all the same. Recipes that do not say so have the digest they had."""
    shifted, other = recipes.get("kitty-pro"), recipes.get("kitty-pro:shift=false")
    assert (shifted.origin, other.origin) == (32, 0) and shifted.digest != other.digest
    assert "shift" not in shifted.key.window.to_dict() and Recipe.from_json(other.to_json()) == other
    assert [shifted.key.window.packed_end(n) for n in (10, 127, 128, 159, 160, 300)] == [10, 32, 32, 32, 160, 288]
    assert [other.key.window.packed_end(n) for n in (10, 127, 128, 159, 160, 300)] == [0, 0, 128, 128, 128, 256]
    assert [tuple(span) for span in spans(other, 300)] == [
        (0, 32, "full", "full"),
        (32, 172, "packed", "packed"),
        (172, 256, "packed", "full"),
        (256, 300, "full", "full"),
    ]
    with pytest.raises(ValueError, match="two values of shift"):
        recipes.get("kitty-pro:k.shift=false")


def test_fields_override_parts_of_both_streams_or_of_one() -> None:
    recipe = recipes.get("saw-int4:order=16")
    assert recipe.key.transforms == (Hadamard(order=16),)
    assert recipe.name == "saw-int4:order=16"
    recipe = recipes.get("int2:sink=64,recent=256,k.bits=4")
    assert recipe.key == Stream(Affine(bits=4, zero="integer"), window=Window(64, 256))
    assert recipe.value == Stream(Affine(bits=2, zero="integer"), window=Window(64, 256))
    assert recipes.get("quarot-int2:seed=7").key.transforms == (Hadamard(seed=7),)
    assert recipes.get("quarot-int2:seed=none").key.transforms == (Hadamard(),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown recipe 'int5' (did you mean int"),
        ("int4:order=16", "has no field 'order'; it has bits"),
        ("saw-int4:v.order=16", "has no field 'v.order'"),
        ("saw-int4:x.order=16", "has no field 'x.order'"),
        ("int4:bits=5", "bits must be one of 8, 4, 3, 2"),
        ("int4:bits", "expected NAME:field=value"),
        ("int4:", "expected NAME:field=value"),
        ("int4:recent=-1", "recent must be from 0 to 1048576 tokens, got -1"),
        ("kvant-2:recent=10000000000", "recent must be from 0 to 1048576 tokens, got 10000000000"),
        ("int4:sink=1048577", "sink must be from 0 to 1048576 tokens, got 1048577"),
        ("int4:recent=many", "recent must be int, got 'many'"),
        ("int4:clip=1.5", "clip must be a quantile"),
        ("int4:k.sink=4", "keys and values must keep the same sink tokens"),
        ("int4:k.window_dtype=fp8", "only windows of values may be fp8 (v.window_dtype=fp8)"),
        ("kvant-2:v.window_dtype=int8", "window_dtype must be one of model, fp8, got 'int8'"),
        ("kivi-k2v2:v.window_dtype=fp8", "v.window_dtype=fp8 needs tokens that are coded one by one"),
        ("int4:flush=2", "flush must be 1 where every token is coded alone"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^") as error:
        recipes.get(text)
    assert message in str(error.value)


def test_lists_of_recipes_keep_the_commas_of_fields() -> None:
    assert recipes.split("full,int2:sink=64,recent=256, saw-int4") == ["full", "int2:sink=64,recent=256", "saw-int4"]
    assert recipes.split("all") == recipes.names()
    with pytest.raises(ValueError, match="one or more recipes"):
        recipes.split(" ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Nothing"}, "unknown Recipe kind 'Nothing'"),
        ({"surprise": 1}, "Recipe has no field surprise"),
        ({"name": 3}, "Recipe.name must be str"),
        ({"key": {"kind": "Window"}}, "unknown Stream kind 'Window'"),
        ({"key": [1]}, "Recipe.key must be Stream"),
        ({"paper": {"kind": "Window"}}, "Recipe.paper must be str"),
    ],
)
def test_json_of_something_else_is_refused(change: dict[str, object], message: str) -> None:
    data = {**recipes.get("int4").to_dict(), **change}
    with pytest.raises(ValueError, match=message):
        Recipe.from_json(json.dumps(data))
