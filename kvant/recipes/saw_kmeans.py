"""SAW-INT4's k-means variant (arXiv 2604.19157, appendix A.2 and table 9): centroid index and INT4 residual.

Equations 5 and 6: each head vector is assigned to the nearest of C centroids learnt offline, for keys and values both,
and the residual is stored as token-wise INT4. `saw-int4-kmeans` has no rotation ("KM w C=256" of table 2);
`saw-int4-kmeans-rot` rotates the keys, not the values ("C=256 BDR128 (K)" of table 9; "(K)" is the rotation's target
alone, centroids are subtracted from both). `centroids=1`, `16` or `2048` are the paper's other sizes.

The rotation comes before the centroids here. That is the same as rotating the residual: a rotation keeps distances, so
the centroids of rotated vectors are the rotated centroids.

Choices where the text leaves one: every head has its own C centroids ("mapping head vectors to a learned codebook",
section 3); `books=layer` shares them. An index takes a whole byte (two beyond 256 centroids) and is counted. The
residual has the integer zero point of equation 3; `zero=float` stores its minimum instead.
"""

from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.recipe import Recipe, Stream
from kvant.transforms.hadamard import Hadamard

_PAPER = "SAW-INT4, arXiv 2604.19157"
_PLAIN = Stream(ResidualKMeans())
_ROTATED = Stream(ResidualKMeans(), (Hadamard(),))

SAW_INT4_KMEANS = Recipe("saw-int4-kmeans", _PLAIN, _PLAIN, paper=_PAPER, summary="256 centroids and INT4 residuals")
SAW_INT4_KMEANS_ROT = Recipe(
    "saw-int4-kmeans-rot", _ROTATED, _PLAIN, paper=_PAPER, summary="rotated keys, 256 centroids and INT4 residuals"
)
