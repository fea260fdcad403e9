"""MILLION: outlier-immunized product quantization of the KV cache (arXiv 2504.03661), as VecInfer compares with it.

Keys after RoPE and values are cut into sub-vectors and each is stored as the index of its nearest centroid (VecInfer
section 2.2, equation 2); no transforms; the last 128 tokens are read in full precision (VecInfer section 4.1). So
these recipes and VecInfer's of the same size differ by the smoothing and the Hadamard rotation of the keys alone.

Where we differ: codebooks are shared by the sub-spaces and heads of a layer, as in VecInfer's; `books=space` gives
every sub-space of every head its own, which is product quantization as first described. The first token is in full
precision, as in our VecInfer recipes, which give the reason.
"""

from typing import Literal

from kvant.codecs.product_vq import ProductVQ
from kvant.recipe import Recipe, Stream, Window


def _million(name: str, dim: Literal[2, 4, 8], bits: int) -> Recipe:
    stream = Stream(ProductVQ(dim, bits), (), Window(sink=1, recent=128))
    summary = f"product VQ d{dim}b{bits}, no transforms, 1 sink and 128 recent tokens"
    return Recipe(f"million-{name}", stream, stream, paper="MILLION, arXiv 2504.03661", summary=summary)


MILLION_4 = _million("4", 2, 8)
MILLION_3 = _million("3", 4, 12)
MILLION_2 = _million("2", 4, 8)
MILLION_1_5 = _million("1.5", 8, 12)
