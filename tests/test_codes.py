"""The check of codes can fail: whatever a codec stores is right, and anything else is wrong unless rounding explains it."""

from __future__ import annotations

import pytest
import torch

from kvant.codecs.affine import Affine
from tests.codes import correct
from tests.conftest import make_layout
from tests.fitted import made_up_tensors

RECIPES = [
    "full",
    "int4",
    "int8:group=32",
    "int3:zero=integer,meta=float16",
    "int4:zero=float,search=5",
    "int4:zero=integer,search=5",
    "oscar",
    "kvant-4-fast",
    "kvant-2",
    "kvant-2:k.bits=3,v.bits=4",
    "turboquant-3",
    "million-2",
    "saw-int4-kmeans",
    "kivi-k2v2",
    "kitty",
]


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_codec_stores_is_right_and_its_neighbours_are_wrong(name: str) -> None:
    layout = make_layout(name, 2, 64, dtype="float32")
    tensors = made_up_tensors(layout.recipe, 2, 64)
    for side, spec in layout.recipe.streams.items():
        own = {key.removeprefix(f"{side}.codec."): x for key, x in tensors.items() if key.startswith(f"{side}.codec.")}
        codec = spec.codec.bind(64, own, "float32")
        x = torch.randn(2 * max(64, codec.group_tokens), 2, 64) * 3
        parts = codec.encode(x)
        exact, off = x.double(), torch.zeros(1, 1, 1, dtype=torch.float64)
        assert bool(correct(codec, parts, exact, off).all())
        for field, part in parts.items():
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.element_size()]
            planted = part.clone()
            planted[0].view(bits)[1, 3 % part.shape[-1]] ^= 1  # the next code, or the next number
            good = correct(codec, parts | {field: planted}, exact, off)
            assert not bool(good[: codec.group_tokens, 1].all()), f"{side} {field}"
            assert bool(good[:, 0].all()) and bool(good[codec.group_tokens :].all()), "of the vector it is in alone"


def test_a_number_in_the_middle_has_either_code() -> None:
    codec = Affine(bits=4, zero="float")
    x = torch.tensor([0.0, 15.0, 7.5, 7.5, 3.0, 4.49]).double()[None, None]
    off = torch.full((1, 1, 1), 1e-6, dtype=torch.float64)
    scale, low = torch.ones(1, 1, 1).bfloat16(), torch.zeros(1, 1, 1).bfloat16()
    for codes, expected in (
        ([0, 15, 7, 8, 3, 4], True),
        ([0, 15, 8, 7, 3, 4], True),
        ([0, 15, 8, 9, 3, 4], False),
        ([0, 15, 7, 8, 3, 5], False),
        ([0, 14, 7, 8, 3, 4], False),
    ):
        parts = {"codes": torch.tensor(codes, dtype=torch.uint8)[None, None], "scale": scale, "min": low}
        assert bool(correct(codec, parts, x, off)) is expected, codes
