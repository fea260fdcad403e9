"""TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (arXiv 2504.19874), its mean-squared-error
form.

A vector is rotated at random, so that each coordinate of its direction follows the distribution of a coordinate of a
random unit vector, whatever the data; then each coordinate is stored as the nearest of the Lloyd-Max levels of that
distribution, and the norm once. Keys and values alike, no windows, nothing is fitted.

Where we differ: the paper's cache experiments give some channels more bits (2.5 and 3.5 on average) and its
inner-product form spends one bit on the sign of a projected residual; these are its plain 4, 3 and 2 bits. The norm is
float16.
"""

from typing import Literal

from kvant.codecs.lloyd_max import LloydMax
from kvant.recipe import Recipe, Stream
from kvant.transforms.random_rotation import RandomRotation


def _turboquant(bits: Literal[4, 3, 2]) -> Recipe:
    stream = Stream(LloydMax(bits), (RandomRotation(),))
    summary = f"random rotation, {bits}-bit Lloyd-Max levels, one norm a vector"
    return Recipe(f"turboquant-{bits}", stream, stream, paper="TurboQuant, arXiv 2504.19874", summary=summary)


TURBOQUANT_4 = _turboquant(4)
TURBOQUANT_3 = _turboquant(3)
TURBOQUANT_2 = _turboquant(2)
