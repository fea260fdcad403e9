"""Codecs: numbers to codes and back. Every module here is found because it exists."""

from kvant.codecs.base import DTYPES, BoundCodec, Codec, Field, Parts
from kvant.spec import discover

__all__ = ["DTYPES", "BoundCodec", "Codec", "Field", "Parts"]

discover(__name__)
