"""QuaRot's cache at two bits: Hadamard rotation of keys and values, then token-wise asymmetric INT2.

The baseline of the INT2 papers (OSCAR's tables call it QuaRot-INT2). `quarot-int2` has no windows; `quarot-int2-win` has
the windows that OSCAR uses, 64 sink and 256 recent tokens, so that the two differ by the rotation and the clip alone.
"""

import dataclasses

from kvant.codecs.affine import Affine
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.hadamard import Hadamard

_PAPER = "QuaRot, arXiv 2404.00456"
_PLAIN = Stream(Affine(bits=2), (Hadamard(),))
_WINDOWED = dataclasses.replace(_PLAIN, window=Window(sink=64, recent=256))

QUAROT_INT2 = Recipe("quarot-int2", _PLAIN, _PLAIN, paper=_PAPER, summary="Hadamard, INT2, no windows")
QUAROT_INT2_WIN = Recipe(
    "quarot-int2-win", _WINDOWED, _WINDOWED, paper=_PAPER, summary="Hadamard, INT2, 64 sink and 256 recent tokens"
)
