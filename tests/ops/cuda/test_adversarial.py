"""Keys and values that are hard on a codec or on a kernel, on a GPU, against the reference on the same stored bytes."""

from __future__ import annotations

import pytest

from tests.needs import gpu, needs_gpu
from tests.ops import adversarial
from tests.ops.cuda.adversarial_checks import check


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")
@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", adversarial.PACKED)
def test_adversarial_tensors(name: str, dtype: str) -> None:
    check(name, dtype, "cuda")
