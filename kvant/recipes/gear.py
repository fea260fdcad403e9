"""GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM (arXiv 2403.05527).

KIVI's quantization at two bits with group 32, plus a low-rank estimate of each head's quantization error, plus the
outliers unquantized: X ~ D + L + S. Rank 2 and three power iterations, as SQuat's tables run it. `gear` has the
outliers (one of each end of a channel's 128 tokens, or of a token's channels: 1.6 % at head_dim 128, the paper's 2 %);
`gear-l` has none, which is the paper's GEAR-L and what its CUDA code, and so SQuat's tables, seem to be.

Where we differ: a page has one size, so the low-rank factors belong to a block of 128 tokens rather than to the whole
prompt and then to every buffer of new tokens. That costs more bits for B and estimates more of the error. Both
streams stay in full precision until a block is complete, as the paper's streaming buffer does; SQuat's tables have a
buffer of 32. Outliers are left out of the quantization's ranges and replaced when decoding, rather than quantized as
zeros and added.
"""

from kvant.codecs.low_rank import LowRank
from kvant.recipe import Recipe, Stream, Window

_PAPER = "GEAR, arXiv 2403.05527"
_WINDOW = Window(flush=128)


def _gear(name: str, outliers: int, summary: str) -> Recipe:
    keys = Stream(LowRank("channel", outliers=outliers), window=_WINDOW)
    values = Stream(LowRank("token", outliers=outliers), window=_WINDOW)
    return Recipe(name, keys, values, paper=_PAPER, summary=summary)


GEAR = _gear("gear", 1, "KIVI's INT2, a low-rank estimate of its error, outliers as they are")
GEAR_L = _gear("gear-l", 0, "KIVI's INT2 and a low-rank estimate of its error")
