"""Affine maps fitted to a model: a mean that is removed, and a matrix that need not be orthogonal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from kvant.bands import quarters
from kvant.spec import Expected
from kvant.transforms.base import BoundTransform, Form, Tensor, Transform


class BoundAffine(BoundTransform):
    """x -> (x - mu) A, with mu and A per head."""

    def __init__(self, offset: Tensor | None, matrix: Tensor | None) -> None:
        self.offset = None if offset is None else offset.double()  # [heads, head_dim]
        self.matrix = None if matrix is None else matrix.double()  # [heads, head_dim, head_dim]
        self.back = None if matrix is None else torch.linalg.inv(matrix.double())

    @property
    def form(self) -> Form:
        return Form(mean=self.offset) if self.matrix is None else Form()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double() if self.offset is None else x.double() - self.offset
        if self.matrix is not None:  # float64, so that the result does not depend on the batch
            wide = torch.einsum("...hd,hde->...he", wide, self.matrix)
        return wide.to(x.dtype)

    def dual(self, q: Tensor) -> Tensor:
        if self.back is None:
            return q
        return torch.einsum("...hgd,hed->...hge", q.double(), self.back).to(q.dtype)

    def inverse(self, o: Tensor) -> Tensor:
        wide = o.double()
        if self.back is not None:
            wide = torch.einsum("...hgd,hde->...hge", wide, self.back)
        if self.offset is not None:
            wide = wide + self.offset[:, None, :]
        return wide.to(o.dtype)

    def mean_logit(self, q: Tensor) -> Tensor | None:
        if self.offset is None:
            return None
        return torch.einsum("...hgd,hd->...hg", q.double(), self.offset).to(q.dtype)


@dataclasses.dataclass(frozen=True)
class _Learnt(Transform):
    """Base of transforms with fitted tensors `offset`, `matrix`, or both.

    share  share of a token's weight in the fit that depends on attention to it (0 to 1); the rest is equal for all tokens.
    """

    names: ClassVar[tuple[str, ...]] = ()
    calibrated: ClassVar[bool] = True

    share: float = 0.3

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share must be between 0 and 1, got {self.share}")

    @property
    def attention_weighted(self) -> bool:
        return self.share > 0

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        known = {
            "offset": Expected((heads, head_dim)),
            "matrix": Expected((heads, head_dim, head_dim), "invertible"),
        }
        return {name: known[name] for name in self.names}

    def bind(
        self, head_dim: int, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> BoundAffine:
        self.check(head_dim)
        found: dict[str, Tensor | None] = {"offset": None, "matrix": None}
        for name in self.names:
            tensor = (tensors or {}).get(name)
            if tensor is None:
                raise ValueError(f"{type(self).__name__} needs the {name} that kvant calibrate fits")
            rank = 2 if name == "offset" else 3
            if tensor.ndim != rank or any(size != head_dim for size in tensor.shape[1:]):
                raise ValueError(f"{name} must be [heads{f', {head_dim}' * (rank - 1)}], got {list(tensor.shape)}")
            found[name] = tensor.to(device)
        return BoundAffine(found["offset"], found["matrix"])


@dataclasses.dataclass(frozen=True)
class Mean(_Learnt):
    """x -> x - mu. For keys this costs nothing at decode: q . mu is the same for every token, and cancels in the softmax."""

    names: ClassVar[tuple[str, ...]] = ("offset",)


@dataclasses.dataclass(frozen=True)
class Balance(_Learnt):
    """Keys -> (k - mu) A with all channels of unit variance, sorted into bands by the queries' variance in them.

    With Sigma the keys' covariance, S = Sigma^1/2 and C the queries' second moment, S C S = U diag(lambda) U^T: in the
    basis S^-1 U keys are white and queries have variances lambda, descending. The bands are the first quarter of these
    channels, the next half and the last quarter; in each, channels are scaled by lambda^1/4, mixed by a Hadamard matrix
    and scaled back to unit variance, so that within a band an error costs the same in every channel.

    mean      whether mu, the keys' mean, is removed.
    bands     "quarters" as above, or "one": all channels in one band, for codes of one width.
    hadamard  whether to mix within the bands.
    """

    names: ClassVar[tuple[str, ...]] = ("offset", "matrix")

    mean: bool = True
    bands: Literal["quarters", "one"] = "quarters"
    hadamard: bool = True

    def widths(self, head_dim: int) -> tuple[int, ...]:
        return quarters(head_dim) if self.bands == "quarters" else (head_dim,)


@dataclasses.dataclass(frozen=True)
class Spectral(_Learnt):
    """Values -> v V D^-power H, where V D V^T is their covariance: partly whitened, then mixed by a Hadamard matrix.

    power     1/4: errors in strong and in weak directions have equal weight after coding; 0: the plain eigenbasis; 1/2:
              white.
    """

    names: ClassVar[tuple[str, ...]] = ("matrix",)

    power: float = 0.25
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.power <= 0.5:
            raise ValueError(f"power must be between 0 and 0.5, got {self.power}")
