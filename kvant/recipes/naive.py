"""The baselines of every method: the unquantized cache, and round-to-nearest over each token's head vector.

`int4` is the naive INT4 of SAW-INT4 (appendix A.1, equations 3 and 4): one scale and one integer zero point for each
token and head; `int3` and `int2` are the same equations. `zero=float` stores the minimum itself in place of the zero
point, at the same bits and with less error; docs/ablations.md has both. `int8`, which no paper defines, has it, and
stores scale and minimum in float16: with the 8-bit mantissa of bfloat16 the ends of its range would be off by half a
step.
"""

from kvant.codecs.affine import Affine
from kvant.codecs.raw import Raw
from kvant.recipe import Recipe, Stream

FULL = Recipe("full", Stream(Raw()), Stream(Raw()), summary="the unquantized cache, in the model's own type")


def _naive(bits: int, zero: str = "integer", meta: str = "bfloat16") -> Recipe:
    stream = Stream(Affine(bits=bits, zero=zero, meta=meta))  # type: ignore[arg-type]
    return Recipe(f"int{bits}", stream, stream, summary=f"round to nearest, {bits} bits a token and head")


INT8 = _naive(8, zero="float", meta="float16")
INT4 = _naive(4)
INT3 = _naive(3)
INT2 = _naive(2)
