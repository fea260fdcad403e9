"""Emulated conversion of rows against torch's."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvant.bench import attention
from kvant.ops.cuda.convert_rows import convert_rows, converted
from tests.needs import needs_compiler

pytestmark = needs_compiler
TYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("given", "wanted"), list(itertools.product(TYPES, repeat=2)))
@pytest.mark.parametrize(("sequences", "rows", "padded"), [(1, 1, 1), (3, 37, 37), (3, 37, 48), (2, 16, 17)])
def test_rows_are_converted_and_padded(
    sequences: int, rows: int, padded: int, given: torch.dtype, wanted: torch.dtype, launched: list[str]
) -> None:
    """Queries, keys and values in one launch, the queries with a stride; what float16 does not hold is infinite."""
    q, k, v = (torch.randn(sequences * rows, heads, 24).mul(1e3).to(given) for heads in (8, 2, 1))
    q[0, 3, 5] = 65536.0
    with attention.poisoned():
        found = convert_rows([q[:, 2:6], k, v], wanted, rows, padded)
    assert launched == ([] if given == wanted and rows == padded else ["kvant_convert_rows"])
    for x, y in zip((q[:, 2:6], k, v), found, strict=True):
        assert y.shape == (sequences, padded, *x.shape[1:]) and y.dtype == wanted and y.is_contiguous()
        torch.testing.assert_close(y[:, :rows], x.to(wanted).unflatten(0, (sequences, rows)), rtol=0, atol=0)
        assert not y[:, rows:].any()


def test_rows_that_the_kernel_cannot_read_are_copied_first(launched: list[str]) -> None:
    """Rows that begin between 16-byte words, and channels with a stride; tensors of several types have a launch each."""
    flat = torch.randn(5 * 2 * 16 + 1).bfloat16()
    q, k, v = flat[1:].view(5, 2, 16), torch.randn(5, 2, 32).bfloat16()[..., ::2], torch.randn(5, 1, 16).half()
    for x in (q, k, v):
        found = converted(x, torch.float16)
        torch.testing.assert_close(found, x.half(), rtol=0, atol=0)
    assert found is v and launched == ["kvant_convert_rows"] * 2
    for x, y in zip((q, k, v), convert_rows([q, k, v], torch.float16, 5, 8), strict=True):
        torch.testing.assert_close(y[0, :5], x.half(), rtol=0, atol=0)
        assert not y[0, 5:].any()
    assert launched == ["kvant_convert_rows"] * 5
