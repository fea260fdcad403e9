"""SQuat's corrector: the error of a coded key is kept orthogonal to the subspace that the prompt's queries span.

Appendix B.2 of the paper. A key is coded block by block of channels; after each block the channels that are still free
take up its error, so that  |d|^2 + weight * |Q d|^2  over the whole difference d is as small as it can be (Lemma 2). Q
has the top right singular vectors of the prompt's queries, each times its singular value.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from kvant.codecs import BoundCodec, Codec, Parts
from kvant.correctors.base import Corrector, Progress, Tensor


@dataclasses.dataclass(frozen=True)
class Subspace(Corrector):
    """Fitted per sequence, layer and KV head; the queries of a KV head's query heads are put one after another, as the
    paper does for GQA.

    The paper fits on "the prompt". Here the subspace takes in every append's queries until the first group of the
    sequence is coded, and is left alone from then on: a prompt that comes at once is fitted as in the paper, one that
    comes in chunks on the chunks up to the one that completes the first group, and tokens that come one by one on those
    of the first group.

    rank    singular vectors kept (r).
    weight  the paper's lambda; 0 codes as without a corrector, bit for bit.
    block   channels coded at a time (g); 0 is half the head, which is the paper's 64 of 128.
    shared  all sequences of a batch use the subspace of the first, as the paper does to save memory. Off: each its own.
    """

    rank: int = 5
    weight: float = 0.001
    block: int = 0
    shared: bool = False

    fitted_on_request: ClassVar[str] = "the query subspace is fitted on the request's own prompt"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not (0.0 <= self.weight < math.inf):
            raise ValueError(f"weight must be a finite number of at least 0, got {self.weight}")
        if self.block < 0:
            raise ValueError(f"block must be a number of channels, or 0 for half the head, got {self.block}")

    def check(self, codec: Codec) -> None:
        if not codec.channelwise:
            raise ValueError(f"Subspace needs a codec that codes every channel for itself, got {type(codec).__name__}")

    def check_dim(self, head_dim: int) -> None:
        self.blocks(head_dim)
        if self.rank > head_dim:
            raise ValueError(f"rank must be at most head_dim {head_dim}, got {self.rank}")

    def blocks(self, head_dim: int) -> list[slice]:
        """The blocks of channels in the order in which they are coded."""
        size = self.block or head_dim // 2
        if not size or head_dim % size:
            raise ValueError(f"block must divide head_dim {head_dim}, got {size}")
        return [slice(start, start + size) for start in range(0, head_dim, size)]

    def state_shape(self, head_dim: int, ring: int) -> tuple[int, ...]:
        return self.rank, head_dim

    def source(self, sequence: int) -> int:
        return 0 if self.shared else sequence

    def observe(self, state: Tensor, queries: Tensor, keys: Tensor, progress: Progress) -> Tensor:
        if progress.first == progress.sink:  # nothing is packed yet
            state.copy_(self.fit(queries, state))
        return state

    def fit(self, queries: Tensor, seen: Tensor | None = None) -> Tensor:
        """diag(singular values) times the top right singular vectors of [tokens, heads, queries per head, head_dim]:
        float32 [heads, rank, head_dim]. What was fitted on earlier queries counts as their stand-in.

        Read off the eigenvectors of Q^T Q in float64, which are the singular vectors of Q whatever the number of
        tokens.
        """
        rows = queries.double().permute(1, 0, 2, 3).flatten(1, 2)  # [heads, rows, head_dim]
        if seen is not None:
            rows = torch.cat((seen.double(), rows), 1)
        values, vectors = torch.linalg.eigh(rows.mT @ rows)  # ascending
        values, vectors = values[:, -self.rank :].flip(-1).clamp_min(0.0), vectors[..., -self.rank :].flip(-1).mT
        largest = vectors.gather(-1, vectors.abs().argmax(-1, keepdim=True))
        return (values.sqrt()[..., None] * vectors * largest.sign()).float()

    def updates(self, subspace: Tensor) -> list[Tensor]:
        """B_t H_t of Lemma 2 for every block but the last: float64 [heads, channels after the block, channels of the
        block].

        The inverses of the leading blocks A_t come from the last, A_T^-1 = I + weight Q^T Q, by the recursion of Lemma
        3.
        """
        q = subspace.double()
        dim = q.shape[-1]
        blocks = self.blocks(dim)
        whole = torch.eye(dim, dtype=q.dtype, device=q.device) + self.weight * (q.mT @ q)
        inverse = torch.linalg.inv(whole)  # P_inv
        leading = whole  # A_t^-1
        out: list[Tensor] = []
        for block in reversed(blocks[1:]):
            kept = block.start  # channels of A_t
            cross, last = leading[:, kept:, :kept], leading[:, kept:, kept:]  # N and O of Lemma 3
            leading = leading[:, :kept, :kept] - cross.mT @ torch.linalg.solve(last, cross)
            size = block.stop - block.start
            out.append(inverse[:, kept:, :kept] @ leading[:, :, kept - size :])
        return out[::-1]

    def encode(self, x: Tensor, codec: BoundCodec, known: Tensor) -> Parts:
        x = x.float()
        dim = x.shape[-1]
        coded: list[Parts] = []
        for block, update in zip(self.blocks(dim), [*self.updates(known), None], strict=True):
            now = x[..., block]
            coded.append(codec.encode(now))
            if update is not None:
                error = (codec.decode(coded[-1]) - now).double()  # [tokens, heads, block]
                moved = torch.einsum("thg,hrg->thr", error, update)
                x = torch.cat((x[..., : block.stop], (x[..., block.stop :].double() + moved).float()), -1)
        return {name: torch.cat([parts[name] for parts in coded], -1) for name in coded[0]}
