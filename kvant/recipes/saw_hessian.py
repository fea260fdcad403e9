"""SAW-INT4's Hessian-aware rotation (arXiv 2604.19157, appendix A.3, equations 7 to 11).

Keys are rotated by a block Hadamard matrix and then by the eigenvectors R of the queries' second moment, k -> (k H_b)
R (equation 11), before token-wise INT4; queries likewise, so that logits are kept. The moment is uncentred, pooled
over all query heads of the layer (equation 7), damped with alpha = 0.01 (equation 9), its eigenvectors by descending
eigenvalue with canonical signs. `saw-int4-hessian` rotates keys only, `saw-int4-hessian-kv` values too. `order=16` is
the paper's R16.

Choices, where the text is open:
- The moment is that of the queries before the Hadamard. Measured after it, R would be H U, H H U = U, and the
  Hadamard would have no effect. One transform holds both factors, so that the moment is that of its input.
- The paper has "decode-time query statistics". Our queries are those of a forward pass over the calibration text, as
  in a prefill, at positions over all that will be served.
- "For the Value Hessian computation, we use the same calibration pipeline, learned rotation and apply the transform
  to V": we read it as the same pipeline run on the values, since the queries' basis has no relation to values;
  `v.target=queries` is the other reading.
"""

from kvant.codecs.affine import Affine
from kvant.recipe import Recipe, Stream
from kvant.transforms.rotation import Rotation

_PAPER = "SAW-INT4, arXiv 2604.19157"
_CODEC = Affine(bits=4, zero="integer")
_KEYS = Stream(_CODEC, (Rotation(target="queries", hadamard="before", bitrev=False, damping=0.01),))
_VALUES = Stream(_CODEC, (Rotation(target="values", hadamard="before", bitrev=False, damping=0.01),))

SAW_INT4_HESSIAN = Recipe(
    "saw-int4-hessian",
    _KEYS,
    Stream(_CODEC),
    paper=_PAPER,
    summary="keys rotated by a block Hadamard and the queries' eigenbasis, INT4",
)
SAW_INT4_HESSIAN_KV = Recipe(
    "saw-int4-hessian-kv", _KEYS, _VALUES, paper=_PAPER, summary="the same, values rotated by their own eigenbasis"
)
