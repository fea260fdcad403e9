"""SAW-INT4: System-AWare 4-Bit KV-Cache Quantization for Real-World LLM Serving (arXiv 2604.19157).

Section 3, equations 1 and 2: each head vector is rotated by a block-diagonal Hadamard matrix of order h before
token-wise asymmetric INT4 with an integer zero point (appendix A.1, equations 3 and 4). `saw-int4` is the paper's
BDR-128 (K), keys rotated and values not; `saw-int4-kv` is BDR-128. The order is min(128, head_dim);
`saw-int4:order=16` is BDR-16. `zero=float` stores the minimum in place of the zero point. One scale serves a token's
head vector (A.1); section 3 has each block quantized by itself, which `order=16,group=16` is.

Where we differ: the paper speaks of randomized transforms but gives no sign vector; ours is plain, `seed=N` adds
random signs. A head dim that is not a power of two takes the largest order that divides it.
"""

from kvant.codecs.affine import Affine
from kvant.recipe import Recipe, Stream
from kvant.transforms.hadamard import Hadamard

_PAPER = "SAW-INT4, arXiv 2604.19157"
_PLAIN = Stream(Affine(bits=4, zero="integer"))
_ROTATED = Stream(Affine(bits=4, zero="integer"), (Hadamard(),))

SAW_INT4 = Recipe("saw-int4", _ROTATED, _PLAIN, paper=_PAPER, summary="keys rotated by a block Hadamard, INT4")
SAW_INT4_KV = Recipe("saw-int4-kv", _ROTATED, _ROTATED, paper=_PAPER, summary="keys and values rotated, INT4")
