"""Kitty: Accurate and Efficient 2-bit KV Cache Quantization with Dynamic Channel-wise Precision Boost (arXiv
2511.18643).

Keys per channel at two bits over groups of G = 128 tokens, in which the channels with the largest mean magnitude of the
group (equation 2) have four: 12.5 % of them in `kitty`, 25 % in `kitty-pro`. The page is that of section 4.1: dense low
bits, compact high bits of the boosted channels, and an index of one byte a channel. Values per token at two bits. The
first S = 32 tokens stay in full precision, so the first page starts at token 32; keys stay in full precision until a
group is complete, and the last R = 128 values always do (figure 1).

Where we differ: a token's value has one scale and minimum whatever the head dim (the paper's 128 is its head dim).
Section 4.3 buffers values for G more tokens before they are coded, to code less often; here they are coded at once and
the last 128 are read in full precision, as in figure 1. A group is coded before the token that
completes it attends, not after.
"""

from kvant.codecs.affine import Affine
from kvant.codecs.boosted import Boosted
from kvant.recipe import Recipe, Stream, Window

_PAPER = "Kitty, arXiv 2511.18643"
_VALUES = Stream(Affine(bits=2, meta="float16"), window=Window(sink=32, recent=128))


def _kitty(name: str, boost: float, summary: str) -> Recipe:
    keys = Stream(Boosted(boost=boost), window=Window(sink=32, flush=128))
    return Recipe(name, keys, _VALUES, paper=_PAPER, summary=summary)


KITTY = _kitty("kitty", 0.125, "keys per channel INT2, 12.5 % of the channels INT4; values INT2; 32 sink tokens")
KITTY_PRO = _kitty("kitty-pro", 0.25, "keys per channel INT2, 25 % of the channels INT4; values INT2; 32 sink tokens")
