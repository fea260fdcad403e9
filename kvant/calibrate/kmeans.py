"""K-means codebooks: Lloyd's iterations from a k-means++ seeding, in bounded memory.

At most 30 iterations, as in VecInfer (section 4.1). We stop earlier where an iteration gains less than 0.1 %.
"""

from __future__ import annotations

import torch

from kvant.calibrate.fitting import fits
from kvant.codecs.codebook import BOOK_DTYPE, nearest
from kvant.codecs.product_vq import ProductVQ
from kvant.codecs.residual_kmeans import ResidualKMeans
from kvant.stats import LayerStats

Tensor = torch.Tensor
ITERATIONS = 30
CONVERGED = 1e-3  # k-means stops where an iteration reduces the error by less than this share
LEAST = 3  # distinct vectors per centroid, at least; with fewer a codebook is refused
PER_CENTROID = 16  # k-means uses at most this many vectors per centroid, or VECTORS, whichever is more
VECTORS = {"cpu": 1 << 16}
VECTORS_ELSEWHERE = 1 << 18


def kmeans(x: Tensor, count: int, seed: int = 0, iterations: int = ITERATIONS) -> Tensor:
    """Centroids of vectors: float32 [n, d] -> [count, d]. A single centroid is the mean."""
    assert len(x) >= count, (len(x), count)
    centre = x.double().mean(0).float()
    if count == 1:
        return centre[None]
    generator = torch.Generator().manual_seed(seed)
    limit = max(PER_CENTROID * count, VECTORS.get(x.device.type, VECTORS_ELSEWHERE))
    if len(x) > limit:
        x = x[torch.randperm(len(x), generator=generator)[:limit].to(x.device)]
    x = x.float() - centre  # centred, so that float32 products are accurate
    centroids = _seeds(x, count, generator)
    before = float("inf")
    for _ in range(iterations):
        assigned = nearest(x[None], centroids[None], torch.float32)[0]
        distance = (x - centroids[assigned]).square().sum(-1)
        error = float(distance.double().sum())
        sizes = torch.bincount(assigned, minlength=count)
        sums = torch.zeros_like(centroids, dtype=torch.float64).index_add_(0, assigned, x.double())
        empty = (sizes == 0).nonzero()[:, 0]
        centroids = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], centroids.double()).float()
        if len(empty):  # an empty centroid moves to one of the vectors with the largest error
            centroids[empty] = x[distance.topk(len(empty)).indices]
        elif before - error <= CONVERGED * error:
            break
        before = error
    return centroids + centre


def _seeds(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """k-means++ seeding: a vector is drawn with probability proportional to its squared distance to the nearest seed. Beyond
    64 seeds, n / 64 seeds are drawn between updates of the distances, where n is the number of seeds so far."""
    first = int(torch.randint(len(x), (1,), generator=generator))
    seeds = x[first : first + 1]
    distance = (x - seeds).square().sum(-1)
    while len(seeds) < count:
        fresh = min(max(1, len(seeds) // 64), count - len(seeds))
        weight = distance.double().cumsum(0)
        draws = torch.rand(fresh, generator=generator, dtype=torch.float64).to(x.device) * weight[-1]
        drawn = x[torch.searchsorted(weight, draws, right=True).clamp_max(len(x) - 1)]
        seeds = torch.cat((seeds, drawn))
        closest = drawn[nearest(x[None], drawn[None], torch.float32)[0]] if fresh > 1 else drawn
        distance = torch.minimum(distance, (x - closest).square().sum(-1))
    return seeds


def distinct(x: Tensor) -> int:
    """Number of distinct vectors of float32 [n, d], by a 64-bit hash of their bits."""
    bits = (x.float() + 0.0).view(torch.int32).long()  # + 0.0: no negative zeros
    mixed = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for channel in bits.unbind(-1):
        mixed = (mixed ^ channel) * -7046029254386353131  # odd; products wrap around
        mixed = mixed ^ (mixed >> 29)
    return len(mixed.unique())


def codebook(x: Tensor, count: int, what: str, seed: int = 0) -> Tensor:
    """A codebook of 16-bit centroids of vectors [n, d]. Raises where there are too few distinct vectors."""
    found = distinct(x)
    if count > 1 and found < LEAST * count:
        raise ValueError(
            f"{what}: {count} centroids need at least {LEAST * count} distinct vectors, the calibration has {found}; "
            "calibrate with more tokens or use a smaller codebook"
        )
    return stored(kmeans(x, count, seed), what)


def stored(book: Tensor, what: str) -> Tensor:
    """Centroids in the stored type. Raises where one overflows it."""
    largest = float(book.abs().max())
    if largest > torch.finfo(BOOK_DTYPE).max:
        raise ValueError(f"{what}: centroids up to {largest:.3g} do not fit {BOOK_DTYPE}")
    return book.to(BOOK_DTYPE)


@fits(ProductVQ, "sample")
def fit_product_vq(part: ProductVQ, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    """Codebooks of the sub-vectors; each is fitted on all sub-vectors that it will code."""
    sample = stats.of(stream).sample  # [heads, n, head_dim]
    heads, _, head_dim = sample.shape
    vectors = part.by_book(sample.transpose(0, 1))
    what = f"{stream} codebooks d{part.dim}b{part.bits}"
    books = torch.stack([codebook(each, part.centroids, what) for each in vectors])
    return {"codebooks": books.reshape(part.book_shape(head_dim, heads))}


@fits(ResidualKMeans, "sample")
def fit_residual_kmeans(part: ResidualKMeans, stats: LayerStats, stream: str) -> dict[str, Tensor]:
    """Centroids of whole head vectors. A single centroid is the mean over all tokens, not over the sample."""
    moments = stats.of(stream) if part.books == "head" else stats.of(stream).pooled()
    what = f"{stream} centroids"
    if part.centroids == 1:
        return {"centroids": stored(moments.mean[:, None, :], what)}
    return {"centroids": torch.stack([codebook(each, part.centroids, what) for each in moments.sample])}
