"""KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (arXiv 2402.02750), and the same with sink tokens.

Keys are coded per channel over groups of G tokens, values per token over groups of G channels, both asymmetric with
the minimum as zero point. Algorithm 1: keys stay in full precision until there are R of them and are then coded
together, so that 0 to R - 1 keys are in full precision; of the values the last R always are. `kivi-k2v2` and
`kivi-k4v4` have the paper's G = 32 and R = 128. What SQuat compares itself with is
`kivi-k2v2:k.flush=32,v.recent=32`.

The -sink recipes are what Kitty's tables mark with an asterisk: the same, with the first 32 tokens in full precision.
Kitty's paper does not say with which G and R it ran KIVI; ours are KIVI's own. `kivi-k2v2-sink:k.group=128,v.group=0`
has Kitty's groups and differs from `kitty` by the boost alone (OSCAR's table 1 counts KIVI's bits with groups of 128).

Where we differ: when the R-th key arrives it is coded before that token attends, not after, since what is packed is a
function of the length alone. Scales and minima are float16, as the paper's; codes are computed from the rounded ones.
"""

from kvant.codecs.affine import Affine
from kvant.codecs.channel import Channel
from kvant.recipe import Recipe, Stream, Window

_PAPER = "KIVI, arXiv 2402.02750"


def _kivi(name: str, keys: int, values: int, sink: int, summary: str) -> Recipe:
    return Recipe(
        name,
        Stream(Channel(bits=keys, group=32), window=Window(sink, flush=128)),  # type: ignore[arg-type]
        Stream(Affine(bits=values, group=32, meta="float16"), window=Window(sink, recent=128)),  # type: ignore[arg-type]
        paper=_PAPER,
        summary=summary,
    )


KIVI_K2V2 = _kivi("kivi-k2v2", 2, 2, 0, "keys per channel, values per token, INT2")
KIVI_K4V4 = _kivi("kivi-k4v4", 4, 4, 0, "keys per channel, values per token, INT4")
KIVI_K2V2_SINK = _kivi("kivi-k2v2-sink", 2, 2, 32, "INT2, 32 sink tokens")
KIVI_K4V2_SINK = _kivi("kivi-k4v2-sink", 4, 2, 32, "INT4 keys, INT2 values, 32 sink tokens")
KIVI_K2V4_SINK = _kivi("kivi-k2v4-sink", 2, 4, 32, "INT2 keys, INT4 values, 32 sink tokens")
