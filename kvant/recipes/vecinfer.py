"""VecInfer: Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed Vector Quantization.

Section 3.2: keys are divided channel by channel by lambda_i = sqrt(max|K_i|) (equations 3 and 4), rotated by a
Hadamard matrix (equations 5 and 6), and stored as indices of the nearest centroids of their sub-vectors (equations 2
and 8); values are stored in the same way without transforms. dXbY is sub-vectors of X channels with 2^Y centroids.
The last 128 tokens are read in full precision ("the residual length for all methods is set to 128", section 4.1).
Appendix B.1's Algorithm 1, which computes a lookup table from the query, is the implementation called "lookup"
(kvant/ops/lookup.py).

Choices where the text leaves one: Algorithm 1 and the size 2^b x d x 2 bytes of a codebook (section 2.2) have one
codebook for all sub-spaces of a vector; we share it between the heads of a layer too (`books=head` or `books=space` do
not), since a head alone gives too few vectors for 4,096 centroids. Centroids are float16. Lambda is per head and
channel.

Where we differ: the first token is in full precision (`sink=0` removes that). A text's first token gets much of the
attention, and its vectors are unlike all others. Where every text begins with the same token, k-means has a centroid
for exactly its vectors; in a text that begins otherwise no centroid is near the first token.
On SmolLM2 this token alone doubles the KL of vecinfer-2 and decides whether million-2 is better. The Hadamard matrix
has the order of the head dim up to 128 and is block-diagonal beyond (or where the head dim is no power of two);
tokens are coded when they arrive and the last 128 are read in full precision from the overlay.
"""

from typing import Literal

from kvant.codecs.product_vq import ProductVQ
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.hadamard import Hadamard
from kvant.transforms.smooth import Smooth

_PAPER = "VecInfer, arXiv 2510.06175"
_WINDOW = Window(sink=1, recent=128)
_Book = tuple[Literal[2, 4, 8], int]


def _vecinfer(name: str, key: _Book, value: _Book) -> Recipe:
    return Recipe(
        f"vecinfer-{name}",
        Stream(ProductVQ(*key), (Smooth(), Hadamard()), _WINDOW),
        Stream(ProductVQ(*value), (), _WINDOW),
        paper=_PAPER,
        summary=f"smoothed and rotated keys d{key[0]}b{key[1]}, values d{value[0]}b{value[1]}, 1 sink and 128 recent tokens",
    )


VECINFER_4 = _vecinfer("4", (2, 8), (2, 8))
VECINFER_3 = _vecinfer("3", (4, 12), (4, 12))
VECINFER_2 = _vecinfer("2", (4, 8), (4, 8))
VECINFER_2_MIXED = _vecinfer("2-mixed", (4, 10), (8, 12))
VECINFER_1_5 = _vecinfer("1.5", (8, 12), (8, 12))
VECINFER_1_25 = _vecinfer("1.25", (8, 12), (8, 8))
