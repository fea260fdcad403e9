"""Calibration: fits the parts of a recipe to a model. Every module of this package is imported, so that fitters register."""

from kvant.calibrate.fitting import fit_layer, fits
from kvant.spec import discover

__all__ = ["fit_layer", "fits"]

discover(__name__)
