"""Decode by the CUDA kernels against the reference on the same bytes, on a GPU and emulated."""

from __future__ import annotations

from typing import Any

import torch

from kvant.bench import attention
from kvant.cache import PagedCache, Sequence
from kvant.ops import reference
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.types import one_query_each
from tests.conftest import relative_error
from tests.ops.cuda.decode_cases import LENGTHS
from tests.ops.cuda.filling import filled, widened
from tests.ops.scores import head_errors, log_sum_exp, some_sinks, with_sinks


def check_outputs(
    cache: PagedCache,
    seqs: list[Sequence],
    group: int,
    settings: dict[str, Any],
    limit: float = 5e-4,
    dtype: torch.dtype = torch.float32,
    tuned: tuple[tuple[str, int], ...] = (),
) -> None:
    """Outputs and log-sum-exps of random queries, one a sequence, against the reference."""
    batch, store, layout = cache.batch(seqs), cache.stores[0], cache.layout
    q = torch.randn(len(seqs), layout.heads * group, layout.head_dim, device=store.pages.device).to(dtype)
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, tuned=tuned, **settings)
    assert relative_error(found, reference.decode(store, q.double(), batch, **settings)) < limit
    expected = log_sum_exp(store, q, batch, **settings)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-3, atol=5e-3)


def check_sink_logits(
    cache: PagedCache,
    seqs: list[Sequence],
    group: int,
    options: dict[str, Any],
    limit: float = 5e-4,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The same with sink logits, against a float64 softmax with one more logit."""
    batch, store, layout = cache.batch(seqs), cache.stores[0], cache.layout
    device, query_heads = store.pages.device, layout.heads * group
    q = torch.randn(len(seqs), query_heads, layout.head_dim, device=device).to(dtype)
    sinks, settings = some_sinks(query_heads, device), {"scale": layout.head_dim**-0.5, **options}
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, sink_logits=sinks, **settings)
    expected, sums = with_sinks(store, q, batch, sinks, **settings)
    assert relative_error(found, expected) < limit
    # where tokens have little of the softmax, a head shows the error of logits
    assert max(head_errors(found, expected)) < max(2e-3, 2 * limit)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=5e-3)


def check_several_queries(
    cache: PagedCache,
    seqs: list[Sequence],
    group: int,
    dim: int,
    queries: int,
    settings: dict[str, Any],
    limit: float,
    dtype: torch.dtype = torch.float32,
    tuned: tuple[tuple[str, int], ...] = (),
) -> None:
    """Decode of several queries a sequence, of which some sequences have no token more, against the reference."""
    batch, store = cache.batch(seqs), cache.stores[0]
    each = one_query_each(batch, queries)
    batch = widened(batch, 3)
    q = torch.randn(len(seqs) * queries, 2 * group, dim, device=store.pages.device)
    sinks = settings.get("sink_logits") is not None
    # Logits are far apart. Not where they would be rounded: keys in groups round queries times the scales of a group, a query in 16
    # bits is rounded when it is rotated. With sink logits the tokens' share shows the error of logits, which grows with them.
    if dtype == torch.float32 and not cache.layout.recipe.key.groupwise and not sinks:
        q *= 4
    q = q.to(dtype)
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, tuned=tuned, **settings)
    assert found.shape == q.shape and lse.shape == q.shape[:2]
    expected = reference.decode(store, q.double(), each, **settings)
    assert relative_error(found, expected) < limit
    if sinks:  # where tokens have little of the softmax, it shows the error of logits, which the other heads hide
        assert max(head_errors(found, expected)) < 4 * limit
    exact = log_sum_exp(store, q, each, **settings)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-3, atol=2e-2)


def check_decode(
    name: str,
    group: int = 4,
    dim: int = 128,
    dtype: str = "float32",
    softcap: float | None = None,
    sliding_window: int | None = None,
    page: int | None = None,
    lengths: list[int] | None = None,
    heads: int = 2,
    limit: float = 5e-4,
    first: int = 0,
    rotated: int | None = None,
    tuned: tuple[tuple[str, int], ...] = (),
) -> None:
    """Decode on a GPU of a cache of random tokens."""
    cache, seqs = filled(name, heads, group, dim, dtype, lengths or LENGTHS, page, first=first, rotated=rotated)
    assert cache.ops["decode"].name == "cuda"
    settings = {"scale": dim**-0.5, "softcap": softcap, "sliding_window": sliding_window}
    check_outputs(cache, seqs, group, settings, limit, getattr(torch, dtype), tuned)
