"""Codecs: numbers to codes and back. Every module of this package is imported, so that its specs register."""

from kvant.codecs.base import DTYPES, BoundCodec, Codec, Field, Parts
from kvant.codecs.format import Band, Codebook, LayerTensors, ScaleKind, Scales, StreamFormat
from kvant.spec import discover

__all__ = [
    "DTYPES",
    "Band",
    "BoundCodec",
    "Codebook",
    "Codec",
    "Field",
    "LayerTensors",
    "Parts",
    "ScaleKind",
    "Scales",
    "StreamFormat",
]

discover(__name__)
