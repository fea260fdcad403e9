"""Emulated kernels, of keys and values that are hard on a codec or on a kernel, against the reference."""

from __future__ import annotations

import pytest

from kvant.ops.cuda import append as cuda_append
from tests.needs import needs_compiler
from tests.ops import adversarial
from tests.ops.cuda.adversarial_checks import check

pytestmark = needs_compiler


@pytest.mark.few(2)
@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
@pytest.mark.parametrize("name", adversarial.PACKED)
def test_adversarial_tensors(name: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended in tiles, or not."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    check(name, "bfloat16", "cpu", every=5, prefill=False)
