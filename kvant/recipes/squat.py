"""SQuat: Subspace-orthogonal KV Cache Quantization (arXiv 2503.24358).

KIVI's codec at two bits with group 32 and residual 32. The keys' channels are coded block by block; after each block,
the channels that are not coded yet are changed to compensate its error, so that the error of the whole key is nearly
orthogonal to the subspace of the prompt's queries (equation 6 and algorithm 1; rank 5, lambda 0.001, two blocks:
appendix E.2). `squat-pre` codes keys before RoPE and rotates them when they are read; its subspace is that of the
queries before RoPE, which is where algorithm 1 takes them (line 4: Q = X W^Q).

Each sequence has its own subspace; `shared=true` uses the first sequence's for the whole batch, as the paper does.
correctors/subspace.py says when it is fitted. The subspace depends on the request, so that pages are not shared
between requests. `weight=0` is KIVI bit for bit (with `squat-pre`: KIVI on keys before RoPE).
"""

import dataclasses

from kvant.codecs.affine import Affine
from kvant.codecs.channel import Channel
from kvant.correctors.subspace import Subspace
from kvant.recipe import Recipe, Stream, Window

_PAPER = "SQuat, arXiv 2503.24358"
_KEYS = Stream(Channel(bits=2, group=32), window=Window(flush=32), corrector=Subspace())
_VALUES = Stream(Affine(bits=2, group=32, meta="float16"), window=Window(recent=32))

SQUAT = Recipe("squat", _KEYS, _VALUES, paper=_PAPER, summary="KIVI with errors orthogonal to the prompt's queries")
SQUAT_PRE = Recipe(
    "squat-pre",
    dataclasses.replace(_KEYS, rope="pre"),
    _VALUES,
    paper=_PAPER,
    summary="squat on keys before RoPE",
)
