"""Measuring what a recipe costs in quality, through the real packed cache."""

from kvant.eval.teacher import Result, Windows, evaluate

__all__ = ["Result", "Windows", "evaluate"]
