"""What a test needs of a machine; where that is missing, it is skipped with the reason."""

from __future__ import annotations

import pytest
import torch

from kvant.ops.cuda import nvrtc
from tests.ops import emulated

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")


def skip_without_nvrtc() -> None:
    """NVIDIA's compiler, which needs no GPU."""
    try:
        nvrtc.compiler()
    except OSError as error:
        pytest.skip(str(error))
