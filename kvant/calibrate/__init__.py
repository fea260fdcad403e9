"""Calibration: what a recipe's parts learn from a model. Every module here is found because it exists."""

from kvant.calibrate.fitting import fit_layer, fits
from kvant.spec import discover

__all__ = ["fit_layer", "fits"]

discover(__name__)
