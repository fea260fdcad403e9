"""Sums in another order, as another machine adds them.

`pytest --other-order` runs tests with every matrix product and every sum of torch computed with its terms in an order of chance. The
order is that of the shapes at hand: the same computation gives the same result again, and one token by itself is added in another
order than among others, as libraries do that choose their kernels by shape. What fails here and not without hangs on the order in
which a machine adds. Exact sums do not change: of integers, and in float64 mostly those of single numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
aten = torch.ops.aten


def _order(terms: int, *shapes: object) -> Tensor:
    """A permutation of so many terms, always the same for the same shapes."""
    seed = zlib.crc32(repr([tuple(shape) for shape in shapes]).encode())  # type: ignore[call-overload]
    return torch.randperm(terms, generator=torch.Generator().manual_seed(seed))


class OtherOrder(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shuffle = SHUFFLES.get(func)
        floats = [x for x in args if isinstance(x, Tensor)]
        if shuffle is not None and all(x.is_floating_point() and x.device.type == "cpu" for x in floats):
            args = shuffle(*args)
        return func(*args, **(kwargs or {}))


def _product(a: Tensor, b: Tensor, *rest: Any) -> tuple[Any, ...]:
    if a.shape[-1] < 2:
        return (a, b, *rest)
    order = _order(a.shape[-1], a.shape, b.shape)
    return (a[..., order], b[..., order, :] if b.ndim > 1 else b[order], *rest)


def _sum_and_product(start: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Any, ...]:
    return (start, *_product(a, b, *rest))


def _sum(x: Tensor, dims: list[int] | None = None, *rest: Any) -> tuple[Any, ...]:
    for dim in dims or range(x.ndim):
        if x.ndim and x.shape[dim] > 1:
            x = x.index_select(dim, _order(x.shape[dim], x.shape, (dim,)))
    return (x, dims, *rest)


def _sum_all(x: Tensor) -> tuple[Any, ...]:
    return (x.flatten()[_order(x.numel(), x.shape)].reshape(x.shape) if x.numel() > 1 else x,)


SHUFFLES: dict[Any, Callable[..., tuple[Any, ...]]] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.mv.default: _product,
    aten.dot.default: _product,
    aten.addmm.default: _sum_and_product,
    aten.baddbmm.default: _sum_and_product,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _sum,
    aten.sum.default: _sum_all,
    aten.mean.default: _sum_all,
}
