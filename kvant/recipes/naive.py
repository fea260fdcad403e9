"""The unquantized cache, and round-to-nearest over each token's head vector: what every method is compared with.

`int4` is the naive INT4 of SAW-INT4 (appendix A.1, equations 3 and 4), except that the minimum is stored as it is rather
than as an integer zero point; `int4:zero=integer` is the paper's. See docs/methods.md for what that costs.
"""

from kvant.codecs.affine import Affine
from kvant.codecs.raw import Raw
from kvant.recipe import Recipe, Stream

FULL = Recipe("full", Stream(Raw()), Stream(Raw()), summary="the unquantized cache, in the model's own type")


def _naive(bits: int, meta: str = "bfloat16") -> Recipe:
    stream = Stream(Affine(bits=bits, meta=meta))  # type: ignore[arg-type]
    return Recipe(f"int{bits}", stream, stream, summary=f"round to nearest, {bits} bits a token and head")


INT8 = _naive(8, meta="float16")
INT4 = _naive(4)
INT3 = _naive(3)
INT2 = _naive(2)
