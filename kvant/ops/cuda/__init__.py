"""CUDA C++ kernels, kept as text, compiled at first use by the NVRTC that PyTorch carries. Every module here registers itself."""

from kvant.spec import discover

discover(__name__)
