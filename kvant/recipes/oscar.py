"""OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization (arXiv 2605.17757).

Keys are rotated by R_K = U_Q H P_br and values by R_V = U_S H P_br (equation 3), clipped token by token at a quantile
of their magnitudes and coded as asymmetric INT2 with a float zero point (A.5). U_Q are the eigenvectors of the
queries' second moment C_Q, averaged over the query heads of each KV head and then over the KV heads (A.4); U_S those
of C_S = V^T S^T S V / N (section 3), which is the second moment of the attention outputs S V; both by descending
eigenvalue. The first 64 tokens and the last 256 are read in full precision (section 4). R_V can be folded into the
model's projections: kvant.engines.fold.

Its ablations, as fields: `target=none` is no U, `hadamard=none` no H, `bitrev=false` no P, all three no rotation;
`k.target=keys,v.target=values` the reconstruction targets (table 4); `sink=32,recent=128` (table 5);
`k.clip=0.96,v.clip=0.92` fixed ratios, `clip=1` none (table 6); `group=64`; `per_head=true` one rotation for each KV
head.

Choices, where the text is open:
- The clip ratios (`clip=0`) are calibrated per layer, as section 5.1 and algorithm 1 say, by a search that the paper
  does not give: the ratio from 0.80 to 1.00 with the least squared error of the attention outputs over probes of the
  calibration text, keys and values each with the other exact, with the windows of the recipe that is fitted. A.5 and
  table 11 have them fixed at 0.96 and 0.92: `k.clip=0.96,v.clip=0.92`.
- The group is the whole head: the paper names 128 (algorithm 1, tables 2 and 11) and 64 (A.5) for head dim 128. The
  scores of table 2 are those of groups of 128 for Qwen3-4B and GLM-4.7 and of 64 for Qwen3-8B and Qwen3-32B (tables 13
  and 16); `group=64` is that. With one group P_br moves nothing between groups, as the paper notes.
- Sink tokens are never coded, so neither they nor their queries count in the moments. The outputs of later queries
  contain the sinks' values, as in the paper.
- Queries are measured over all positions that will be served, not only those of the calibration text.
- A head dim that is not a power of two has Hadamard blocks of the largest power of two that divides it; the
  eigenvectors are assigned to the blocks in turn (round robin).
- C_SQ, which table 4's text mentions, is not defined in the paper.
"""

from kvant.codecs.affine import Affine
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.rotation import Rotation

_CODEC = Affine(bits=2, clip=0.0)
_WINDOW = Window(sink=64, recent=256)

OSCAR = Recipe(
    "oscar",
    Stream(_CODEC, (Rotation(target="queries"),), _WINDOW),
    Stream(_CODEC, (Rotation(target="attended"),), _WINDOW),
    paper="OSCAR, arXiv 2605.17757",
    summary="keys and values rotated by what attention reads, clipped, INT2, 64 sink and 256 recent tokens",
)
