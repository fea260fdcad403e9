"""Transforms of head vectors. Every module of this package is imported, so that its specs register."""

from kvant.spec import discover
from kvant.transforms.base import BoundTransform, Transform

__all__ = ["BoundTransform", "Transform"]

discover(__name__)
