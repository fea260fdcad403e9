"""Launches of decode: tiles, shared memory, constants, transforms. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.layout import Layout
from kvant.ops.cuda import fragments, geometry, plan
from kvant.ops.fused import HADAMARD, MATRIX, NONE, fuse
from kvant.ops.types import BoundStream
from kvant.transforms.hadamard import Hadamard
from kvant.transforms.random_rotation import RandomRotation
from tests.conftest import make_layout
from tests.ops.emulated import H200


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 11, 16, 17, 64])
def test_query_heads_are_tiled(group: int) -> None:
    made = plan.Plan(make_layout("int4", 2, 128), group, "bfloat16", (0, 1), (0, 1), False, True, H200)
    tiles = int(str(made.constants["QUERY_TILES"]))
    assert made.tile_heads <= 16
    assert (tiles - 1) * made.tile_heads < group <= tiles * made.tile_heads
    assert 4 * made.lane_heads >= made.tile_heads
    assert made.dynamic_bytes <= H200[0]


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *((name, H200) for name in ("vecinfer-4", "vecinfer-3", "vecinfer-2", "vecinfer-2-mixed", "vecinfer-1.5")),
        ("vecinfer-2-mixed", (166912, 167936)),
        ("vecinfer-2", (101376, 102400)),
    ],
)
def test_codebooks_fit_beside_the_pages(name: str, shared: tuple[int, int]) -> None:
    made = plan.Plan(make_layout(name, 2, 128), 4, "bfloat16", (2, 1), (0, 1), False, True, shared)
    assert made.dynamic_bytes + geometry.STATIC_BYTES <= shared[0]
    assert made.constants["MIN_CTAS"] == 1 and made.warps >= 1
    if shared == H200 and name in ("vecinfer-2", "vecinfer-4"):  # no lane waits for another
        assert made.book_bytes == [256 * geometry.ROW] * 2


def test_centroids_fit_beside_the_pages() -> None:
    for group, dim in ((4, 128), (16, 128), (1, 64), (8, 256)):
        made = plan.Plan(make_layout("saw-int4-kmeans", 2, dim), group, "bfloat16", (0, 1), (0, 1), False, True, H200)
        assert made.constants["MIN_CTAS"] == 1 and made.warps >= 2
        assert made.dynamic_bytes + made._static_bytes <= H200[0]


def test_a_matrix_that_does_not_fit_beside_the_pages_has_a_kernel_of_its_own() -> None:
    def made(name: str, shared: tuple[int, int], page: int = 64, query: str = "bfloat16") -> plan.Plan:
        layout = Layout.of(recipes.get(name), 2, 128, dtype="bfloat16", page_tokens=page)
        return plan.Plan(layout, 4, query, (2, 1), (0, 1), False, True, shared, (), low_batch=True)

    small = 101376, 102400
    assert made("oscar", H200).fused_queries and not made("oscar", H200).query_kernel
    assert not made("oscar", H200, query="float32").fused_queries
    big = made("oscar:k.bits=4,v.bits=4", small, page=128)
    assert big.query_kernel and not big.fused_queries and big.dynamic_bytes <= small[0]
    assert made("oscar", small).dynamic_bytes <= small[0]


def test_constants_are_the_layouts() -> None:
    layout = make_layout("int3:k.bits=8", 2, 64)
    constants = plan.Plan(layout, 4, "float16", (1, 64), (2, 1), True, True, H200).constants
    offsets = {(s.stream, s.kind, s.bits): s.offset for s in layout.sections}
    assert constants["PAGE_HEAD_BYTES"] == layout.page_head_bytes
    key, value = constants["Key"], constants["Value"]
    assert isinstance(key, dict) and isinstance(value, dict)
    assert key["Operand"] == f"KeyPlanes<KeyPlane<64, 8, {offsets['key', 'code', 8]}, 0, {1 << 20}, 0>>"
    low, high = offsets["value", "code", 2], offsets["value", "code", 1]
    assert value["Codes"] == f"ValueCodes<64, 3, {low}, {high}, {1 << 20}, false>"
    assert value["SCALE_OFFSET"] == offsets["value", "meta", 16]


def test_spaces_are_the_transforms() -> None:
    layout = make_layout("int4", 2, 64)
    stream = BoundStream.of(recipes.get("saw-int4").key, 64, "bfloat16", "cpu")
    assert fuse((), "dual", layout, torch.device("cpu")).kind == NONE
    found = fuse(stream.transforms, "dual", layout, torch.device("cpu"))
    assert (found.kind, found.order, found.tensor) == (HADAMARD, 64, None)
    two = (Hadamard(seed=1).bind(64), RandomRotation().bind(64))
    q = torch.randn(3, 2, 5, 64, dtype=torch.float64)
    for way in ("dual", "inverse"):
        found = fuse(two, way, layout, torch.device("cpu"))
        assert found.kind == MATRIX and found.tensor is not None and len(found.tensor) == 1 and found.offset is None
        expected = q
        for transform in two if way == "dual" else reversed(two):
            expected = getattr(transform, way)(expected)
        torch.testing.assert_close(q @ found.tensor[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_matrices_of_any_magnitude_are_multiplied_by() -> None:
    """float16 holds up to 65504, and nothing below 6e-5 in full."""
    matrix = torch.randn(2, 64, 64)
    one, two = (
        fragments.fused_fragments(matrix),
        fragments.fused_fragments(matrix * torch.tensor([2.0**20, 2.0**-20])[:, None, None]),
    )
    assert torch.equal(one[:-2], two[:-2])
    powers = two[-2:].view(torch.float32) / one[-2:].view(torch.float32)
    assert powers.tolist() == [2.0**20, 2.0**-20]
    largest = one[:-2].view(torch.float16).abs().max()
    assert 0.5 <= float(largest) <= 1.0
