"""Transforms of head vectors. Every module here is found because it exists."""

from kvant.spec import discover
from kvant.transforms.base import BoundTransform, Transform

__all__ = ["BoundTransform", "Transform"]

discover(__name__)
