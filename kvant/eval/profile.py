"""Where a recipe's error is: by layer, by KV head and by length of context (as OSCAR's figures 2, 3 and 8 show it).

Each layer's attention is compared for the same queries, keys and values: those that the model has while it reads from the recipe's
cache. So an error is that of the layer itself, without what earlier layers' errors make of its input.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from kvant.layout import StreamName
from kvant.ops.reference import read
from kvant.ops.types import LayerStore, PagedBatch, as_held, without_overlay

Tensor = torch.Tensor
METRICS = ("attention_kl", "key_error", "value_error", "logit_error", "output_error")
BUCKETS = 32  # of context lengths: bucket i has lengths of more than 2^(i - 1) and at most 2^i tokens
SCORES = 1 << 24  # logits of a block of queries that are held at a time, of each kind


@dataclasses.dataclass(frozen=True)
class Profile:
    """Errors of every layer's attention; names are those of `kvant eval --profile --json`.

    attention_kl  KL(full || recipe) of attention probabilities, mean over queries
    key_error, value_error  squared error of what a query reads, over its energy
    logit_error   squared error of q . k over the variance of q . k; both without their mean, which the softmax cancels
    output_error  squared error of attention's output, over its energy
    """

    heads: dict[str, list[list[float]]]  # metric -> [layer][KV head]
    layers: dict[str, list[float]]  # metric -> [layer]
    lengths: list[int]  # upper ends of the buckets of context lengths, in tokens; buckets without a query are left out
    by_length: dict[str, list[list[float]]]  # metric -> [bucket][layer]


class ReadForms(NamedTuple):
    """What attention may read in place of a stream's tokens, in the model's own basis: [tokens, heads, head_dim] each."""

    exact: Tensor
    packed: Tensor
    overlay: Tensor


class WhichForm(NamedTuple):
    """Which form of a token each query reads: bool [queries, tokens] each. Tokens of neither are read as they are."""

    packed: Tensor
    overlay: Tensor


def packed_form(store: LayerStore, name: StreamName, row: PagedBatch) -> Tensor:
    """A stream of one sequence as its pages hold it, in the model's own basis: [tokens, heads, head_dim]. Undefined where a page
    holds no codes yet."""
    return store.stream(name).inverse(read(store, name, without_overlay(row), row.seq_lens)[0, :, :, None])[:, :, 0]


def read_forms(store: LayerStore, name: StreamName, exact: Tensor, row: PagedBatch) -> ReadForms:
    """A stream of one sequence as its pages hold it, and as its overlay would: exact [tokens, heads, head_dim] is what the model
    gave. Undefined where a page holds no codes yet."""
    stream = store.stream(name)
    position = torch.arange(len(exact), device=exact.device)
    exact = exact.float()
    packed = packed_form(store, name, row)[: len(exact)]
    if not store.overlays[name].shape[1]:
        return ReadForms(exact, packed, packed)
    rounded = as_held(stream.windowed(exact, position), store.overlays[name].dtype).float()
    overlay = stream.inverse(stream.attended_window(rounded, position)[:, :, None])[:, :, 0]
    return ReadForms(exact, packed, overlay)


def which_form(store: LayerStore, name: StreamName, at: Tensor, tokens: int, before: int | None) -> WhichForm:
    """Which form of `tokens` tokens the queries at positions `at` [queries] read. `before` is None where they are decoded: each
    reads what decode reads at its length. Otherwise they are prefilled behind a history of `before` tokens, and read new tokens as
    they are."""
    window = store.stream(name).spec.window
    position = torch.arange(tokens, device=at.device)
    n = at[:, None] + 1 if before is None else torch.full_like(at, before)[:, None]
    stored = position < n
    packed = stored & (position >= window.sink) & (position < window.packed_end(n))
    return WhichForm(packed, stored & ~packed)


class Sums:
    """Sums over all compared queries, by bucket of context length, layer and KV head."""

    NAMES = (
        *("queries", "attention_kl", "weighted_logit"),
        *(f"{kind}_{what}" for kind in ("key", "value", "logit", "output") for what in ("error", "energy")),
    )

    def __init__(self, layers: int, heads: int) -> None:
        self.sums = {name: torch.zeros(BUCKETS, layers, heads, dtype=torch.float64) for name in self.NAMES}

    def add(self, name: str, layer: int, length: Tensor, x: Tensor) -> None:
        """Adds x [queries, heads] of queries with contexts of `length` [queries] tokens."""
        into = self.sums[name]
        if into.device != x.device:
            into = self.sums[name] = into.to(x.device)
        ends = 2 ** torch.arange(BUCKETS, device=x.device)
        into[:, layer].index_add_(0, torch.searchsorted(ends, length), x.double())

    def compare(
        self,
        layer: int,
        store: LayerStore,
        row: PagedBatch,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        at: Tensor,
        *,
        before: int | None,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
    ) -> None:
        """Adds the errors of keys, values, logits and probabilities of one sequence: query [queries, query heads, head_dim] at
        positions `at` [queries]; keys and values [tokens, heads, head_dim] as the model gave them. Queries go block by block, so
        that no more than SCORES logits of a kind are held."""
        forms = {"key": read_forms(store, "key", keys, row), "value": read_forms(store, "value", values, row)}
        tokens, query_heads = len(keys), query.shape[1]
        position = torch.arange(tokens, device=query.device)
        for some in torch.arange(len(at), device=query.device).split(max(1, SCORES // (query_heads * tokens))):
            here = at[some]
            keep = position <= here[:, None]
            if sliding_window is not None:
                keep &= position > here[:, None] - sliding_window
            names: tuple[StreamName, ...] = ("key", "value")
            forms_read = {name: which_form(store, name, here, tokens, before) for name in names}
            for name in names:
                error, energy = stream_error(forms[name], forms_read[name], keep)
                self.add(f"{name}_error", layer, here + 1, error)
                self.add(f"{name}_energy", layer, here + 1, energy)
            q = query[some].float().unflatten(1, (keys.shape[1], -1))  # [queries, heads, queries per head, head_dim]
            exact, found = logits(q, forms["key"], forms_read["key"], scale, softcap)
            for name_of_sum, x in logit_errors(exact, found, keep).items():
                self.add(name_of_sum, layer, here + 1, x.sum(1).T)

    def profile(self) -> Profile:
        used = (self.sums["queries"].sum((1, 2)) > 0).nonzero()[:, 0].tolist()
        return Profile(
            heads={metric: self._ratio(metric, (0,)).tolist() for metric in METRICS},
            layers={metric: self._ratio(metric, (0, 2)).tolist() for metric in METRICS},
            lengths=[2**i for i in used],
            by_length={metric: self._ratio(metric, (2,))[used].tolist() for metric in METRICS},
        )

    @property
    def weighted_logits(self) -> list[float]:
        """sum_n p_n (e_n - mean e)^2 of each layer, mean over queries: squared logit error as attention weighs it."""
        found: list[float] = self._ratio("weighted_logit", (0, 2)).tolist()
        return found

    def _ratio(self, metric: str, over: tuple[int, ...]) -> Tensor:
        by = metric.replace("_error", "_energy") if metric.endswith("_error") else "queries"
        total, energy = (self.sums[name].cpu().sum(over) for name in (metric, by))
        return total / energy.clamp_min(1e-300)  # 0 where there is neither


def stream_error(forms: ReadForms, which: WhichForm, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of what each query reads of a stream, and the energy of what it should have read: [queries, heads] each."""
    error = torch.zeros(len(keep), forms.exact.shape[1], dtype=torch.float32, device=keep.device)
    for form, reads in ((forms.packed, which.packed), (forms.overlay, which.overlay)):
        of_token = (form - forms.exact).square().sum(-1)  # [tokens, heads]
        of_token = torch.where((reads & keep).any(0)[:, None], of_token, 0.0)  # pages may hold anything elsewhere
        error += (reads & keep).float() @ of_token
    return error, keep.float() @ forms.exact.square().sum(-1)


def logits(
    q: Tensor, forms: ReadForms, which: WhichForm, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of exact keys and of keys as they are read: [heads, queries per head, queries, tokens] each."""

    def product(keys: Tensor) -> Tensor:
        out = torch.einsum("qhgd,nhd->hgqn", q, keys) * scale
        return out if softcap is None else softcap * torch.tanh(out / softcap)

    exact = product(forms.exact)
    found = exact
    for form, reads in ((forms.packed, which.packed), (forms.overlay, which.overlay)):
        form = torch.where(reads.any(0)[:, None, None], form, 0.0)
        found = torch.where(reads, product(form), found)
    return exact, found


def logit_errors(exact: Tensor, found: Tensor, keep: Tensor) -> dict[str, Tensor]:
    """Of logits [heads, queries per head, queries, tokens] where `keep` [queries, tokens]: sums by name,
    [heads, queries per head, queries] each."""
    log_p, log_r = (x.masked_fill(~keep, float("-inf")).log_softmax(-1) for x in (exact, found))
    p = log_p.exp()
    count = keep.sum(-1)

    def spread(x: Tensor) -> Tensor:
        """sum_n (x_n - mean x)^2 over what is kept."""
        mean = x.masked_fill(~keep, 0.0).sum(-1) / count
        return (x - mean[..., None]).masked_fill(~keep, 0.0).square().sum(-1)

    error = (found - exact).masked_fill(~keep, 0.0)
    weighted = error - (p * error).sum(-1, keepdim=True)
    return {
        "queries": torch.ones_like(p[..., 0]),
        "attention_kl": (p * (log_p - log_r).masked_fill(~keep, 0.0)).sum(-1),
        "weighted_logit": (p * weighted.square()).sum(-1),
        "logit_error": spread(error),
        "logit_energy": spread(exact),
    }
