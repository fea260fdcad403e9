"""Measuring what a recipe costs in quality, through the real packed cache."""

import warnings
from typing import Any

from kvant.eval.profile import Profile
from kvant.eval.segments import ChatSegments, Segments
from kvant.eval.teacher import Result, evaluate

__all__ = ["ChatSegments", "Profile", "Result", "Segments", "evaluate"]


def __getattr__(name: str) -> Any:
    if name == "Windows":
        warnings.warn("kvant.eval.Windows is now called kvant.eval.Segments", DeprecationWarning, stacklevel=2)
        return Segments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
