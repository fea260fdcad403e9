"""Streams queries, keys and values out of a transformers model, and keeps of them what fitters look at.

An excerpt of text goes through the model with a cache that stores nothing: like `kvant.Cache` it hands the attention
function a handle, and the attention function, already there for packed pages, asks it to attend. So whatever the
engine serves can be measured, and nothing is patched. What is kept (sums, a sample, a few probes) has a size that
does not depend on the number of tokens; where all layers together would take too much, the text is read several
times, a few layers a time.

Positions: attention does not change when q and k are rotated by the same number of positions, but their second moments
and ranges do. Every token of an excerpt is therefore rotated to a position of its own before it counts, the positions of an
excerpt spread evenly over those that will be served; probes, which need q and k to match, are rotated as a whole, each
by another offset.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import transformers

from kvant.engines.attention import Handle
from kvant.engines.layers import PackedLayer
from kvant.engines.lending import borrow
from kvant.progress import Progress
from kvant.rope import Rope, ropes_of
from kvant.shape import ModelShape
from kvant.stats import LayerStats, Moments, Probe, WeightedMoments

Tensor = torch.Tensor

BUDGET = 384 << 20  # bytes that statistics may take at a time
SAMPLE_BUDGET = 128 << 20  # bytes of one layer's sampled keys and values
SAMPLES = 16384  # sampled keys and values a head, at most
QUERY_SAMPLES = 1024
PROBES = 4
PROBE_TOKENS = 1024
QUERY_STEP = 16  # one query of a probe in so many is kept
SCORE_BYTES = 32 << 20  # of a block of attention scores, where they have to be formed
UNWEIGHTED = (
    16  # tokens at the start of an excerpt that weigh nothing in what attention reads: the sinks outweigh all others
)
MAX_WEIGHT = 100.0  # times the mean
STORED_NAMES = {  # of fields of `Plan`, in the names of checkpoints
    "excerpts": "runs",
    "attention_weighted": "reads",
    "probes": "excerpts",
    "probe_tokens": "excerpt_tokens",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is gathered: from how many tokens, at which positions, and how much of it is kept."""

    excerpts: int
    tokens: int
    max_position: int
    sink: int = 0
    recent: int = 0
    seed: int = 0
    attention_weighted: bool = False  # whether to weigh tokens by what attention reads of them
    block: int = 0  # keys are stored relative to the start of their block of so many positions; 0 is as they come
    samples: int = SAMPLES
    probes: int = PROBES
    probe_tokens: int = PROBE_TOKENS

    def checkpoint_key(self) -> dict[str, Any]:
        """The plan as plain data, which names the checkpoint of an interrupted fit. Fields appear under the names that
        checkpoints were first written with, so that a fit that was interrupted before a field was renamed is still found."""
        return {STORED_NAMES.get(name, name): value for name, value in dataclasses.asdict(self).items()}

    def probe_offset(self, excerpt: int, tokens: int) -> int | None:
        """By how many positions an excerpt is rotated if it becomes a probe, else None: from 0 to the end of the range."""
        count = min(self.probes, self.excerpts)
        chosen = [round(i * (self.excerpts - 1) / max(1, count - 1)) for i in range(count)]
        if excerpt not in chosen:
            return None
        return round(chosen.index(excerpt) * max(0, self.max_position - tokens) / max(1, count - 1))

    def positions(self, excerpt: int, tokens: int, below: int | None = None) -> Tensor | None:
        """Where the tokens of an excerpt are rotated to: spread evenly over [0, below) in random order, by default over all
        that will be served; None where the excerpt covers them as it is."""
        below = below or self.max_position
        if below == tokens or (below < tokens and below == self.max_position):
            return None
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + excerpt) * 2 + (below != self.max_position))
        place = torch.randperm(tokens, generator=generator).double()
        place += torch.rand(tokens, generator=generator, dtype=torch.float64)
        return (place * (below / tokens)).long().clamp_max(below - 1)


class Running:
    """Streamed sums and a uniform sample of vectors; its size is fixed when it is made."""

    def __init__(self, heads: int, dim: int, samples: int, device: torch.device, seed: int) -> None:
        self.count = 0
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)
        self.absmax = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.sample = torch.zeros(samples, heads, dim, dtype=torch.float32, device=device)
        self.priorities = torch.full(
            (samples,), 2.0, dtype=torch.float64
        )  # every vector draws one; the lowest are kept
        self.generator = torch.Generator().manual_seed(seed)

    @staticmethod
    def nbytes(heads: int, dim: int, samples: int) -> int:
        return 8 * heads * dim * (dim + 2) + samples * (4 * heads * dim + 8)

    def add(self, x: Tensor) -> None:
        """x is [vectors, heads, head_dim]."""
        wide = x.double()
        self.count += len(x)
        self.total += wide.sum(0)
        self.second += torch.einsum("nhd,nhe->hde", wide, wide)
        self.absmax = torch.maximum(self.absmax, wide.abs().amax(0))
        if not len(self.priorities):
            return
        priorities = torch.rand(len(x), dtype=torch.float64, generator=self.generator)
        kept = torch.cat((self.priorities, priorities)).topk(len(self.priorities), largest=False).indices.sort().values
        stay = torch.zeros(len(self.priorities), dtype=torch.bool)
        stay[kept[kept < len(self.priorities)]] = True
        enter = kept[kept >= len(self.priorities)] - len(self.priorities)
        self.priorities[~stay] = priorities[enter]
        self.sample[(~stay).to(x.device)] = x[enter.to(x.device)].float()

    def finish(self) -> Moments:
        assert self.count, "no vectors were added"
        sample = self.sample[(self.priorities < 2.0).to(self.sample.device)].transpose(0, 1)
        return Moments(self.count, self.total / self.count, self.second / self.count, self.absmax, sample)


class WeightedSums:
    """Streamed weighted sums of vectors."""

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self.weight = torch.zeros(heads, dtype=torch.float64, device=device)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)

    def add(self, x: Tensor, weight: Tensor) -> None:
        """x is [vectors, heads, head_dim], weight [vectors, heads]."""
        wide, weight = x.double(), weight.double()
        heavy = wide * weight[..., None]
        self.weight += weight.sum(0)
        self.total += heavy.sum(0)
        self.second += torch.einsum("nhd,nhe->hde", heavy, wide)

    def finish(self) -> WeightedMoments:
        assert bool((self.weight > 0).all()), "no vectors were added"
        return WeightedMoments(self.total / self.weight[:, None], self.second / self.weight[:, None, None])


def relative(read: Tensor) -> Tensor:
    """Weights of an excerpt's tokens [tokens, heads] in terms of their mean."""
    return (read / read.mean(0).clamp_min(1e-30)).clamp_max(MAX_WEIGHT)


class TokenWeights(NamedTuple):
    """What attention reads, summed over the tokens that a query finds coded: those before the recent window, and none of
    the first, which are sinks."""

    keys: (
        Tensor  # [tokens, heads]: sum over queries of p^2 |v - o|^2, how much an error of its logits moves the outputs
    )
    values: Tensor  # [tokens, heads]: sum over queries of p^2, how much an error of its value does


def token_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    recent: int,
) -> TokenWeights:
    """Arguments as in `LayerGatherer.add`."""
    tokens, heads = k.shape[:2]
    keys, values = k.float(), v.float()
    energy = values.square().sum(-1).T  # [heads, tokens]
    squares = torch.zeros(heads, tokens, device=k.device)
    cross = torch.zeros(heads, tokens, v.shape[-1], device=k.device)
    norms = torch.zeros(heads, tokens, device=k.device)
    block = max(1, SCORE_BYTES // (4 * q.shape[1] * q.shape[2] * tokens))
    keep = causal(tokens, sliding_window, k.device)
    at = torch.arange(tokens, device=k.device)
    coded = (at >= min(UNWEIGHTED, tokens // 2)) & (at <= at[:, None] - min(recent, tokens // 4))
    for first in range(0, tokens, block):
        rows = slice(first, min(tokens, first + block))
        scores = torch.einsum("qhgd,nhd->hgqn", q[rows].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        p2 = scores.masked_fill(~keep[rows], float("-inf")).softmax(-1).square() * coded[rows]
        out = o[rows].float()
        squares += p2.sum((1, 2))
        cross += torch.einsum("hgqn,qhgd->hnd", p2, out)
        norms += torch.einsum("hgqn,qhg->hn", p2, out.square().sum(-1))
    read = squares * energy - 2.0 * (cross * values.transpose(0, 1)).sum(-1) + norms
    return TokenWeights(read.clamp_min(0.0).T, squares.T)


class LayerGatherer:
    """Everything that is kept of one layer."""

    def __init__(self, layer: int, shape: ModelShape, plan: Plan, rope: Rope | None, device: torch.device) -> None:
        self.plan, self.rope, self.window = plan, rope, shape.layers[layer]
        self.scale, self.softcap = 0.0, cast("float | None", None)
        samples = sample_size(shape, plan)
        seed = (plan.seed * 1_000_003 + layer) * 4
        size = shape.heads, shape.head_dim
        self.queries = Running(*size, min(samples, QUERY_SAMPLES), device, seed)
        self.keys = Running(*size, samples, device, seed + 1)
        self.values = Running(*size, samples, device, seed + 1)  # the same tokens as the keys
        self.attended = Running(*size, 0, device, seed)
        self.weighted_keys = WeightedSums(*size, device) if plan.attention_weighted else None
        self.weighted_values = WeightedSums(*size, device) if plan.attention_weighted else None
        self.probes: list[Probe] = []

    def add(self, excerpt: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """One excerpt's queries and outputs [tokens, heads, queries per head, head_dim], keys and values [tokens, heads,
        head_dim]."""
        tokens = len(k)
        offset = self.plan.probe_offset(excerpt, tokens)
        if offset is not None:
            size = min(tokens, self.plan.probe_tokens)
            rows = torch.arange((size - 1) % QUERY_STEP, size, QUERY_STEP, device=k.device)
            queries, keys = self._rotate(q[rows].float(), offset), self._rotate(k[:size].float(), offset)
            self.probes.append(Probe(queries.clone(), keys.clone(), v[:size].float().clone(), rows))
        first = max(self.plan.sink, UNWEIGHTED) if self.plan.attention_weighted else self.plan.sink
        coded = slice(min(first, tokens // 2), None)
        weights = None
        if self.plan.attention_weighted:
            weights = token_weights(q, k, v, o, self.scale, self.window, self.softcap, self.plan.recent)
        q = self._rotated(q, self.plan.positions(excerpt, tokens))
        k = self._rotated(k, self.plan.positions(excerpt, tokens, self.plan.block or None))
        self.queries.add(q[coded].transpose(1, 2).flatten(0, 1))
        self.keys.add(k[coded])
        self.values.add(v[coded])
        self.attended.add(o[coded].transpose(1, 2).flatten(0, 1))
        if weights is not None:
            assert self.weighted_keys and self.weighted_values
            self.weighted_keys.add(k, relative(weights.keys))
            self.weighted_values.add(v, relative(weights.values))

    def _rotated(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """An excerpt's queries or keys, each rotated to a position of its own."""
        if positions is None:
            return x
        return self._rotate(x.float(), (positions - torch.arange(len(x))).to(x.device))

    def _rotate(self, x: Tensor, by: Tensor | int) -> Tensor:
        if isinstance(by, int) and by == 0:
            return x
        assert self.rope is not None
        return self.rope.rotate(x, by)

    def finish(self) -> LayerStats:
        attended = self.attended.finish()
        return LayerStats(
            queries=self.queries.finish(),
            keys=self.keys.finish(),
            values=self.values.finish(),
            attended=attended.second,
            attended_mean=attended.mean,
            probes=tuple(self.probes),
            scale=self.scale,
            sink=self.plan.sink,
            recent=self.plan.recent,
            window=self.window,
            softcap=self.softcap,
            weighted_keys=None if self.weighted_keys is None else self.weighted_keys.finish(),
            weighted_values=None if self.weighted_values is None else self.weighted_values.finish(),
        )


def sample_size(shape: ModelShape, plan: Plan) -> int:
    """Keys and values a head that are sampled: all of them, if they are few."""
    fit = SAMPLE_BUDGET // (2 * 4 * shape.heads * shape.head_dim)
    return max(1, min(plan.samples, plan.tokens, fit))


def layer_bytes(shape: ModelShape, plan: Plan, groups: int) -> int:
    """What the statistics of one layer take, whatever the number of tokens."""
    samples = sample_size(shape, plan)
    kinds = (min(samples, QUERY_SAMPLES), samples, samples, 0)
    moments = sum(Running.nbytes(shape.heads, shape.head_dim, count) for count in kinds)
    moments += 2 * Running.nbytes(shape.heads, shape.head_dim, 0) if plan.attention_weighted else 0
    rows = -(-plan.probe_tokens // QUERY_STEP) * groups + 2 * plan.probe_tokens
    return moments + plan.probes * rows * shape.heads * shape.head_dim * 4


class _Enough(Exception):
    """All layers of a pass have been seen; the rest of the model need not run."""


class Capture(transformers.Cache):
    """A cache that stores nothing: it attends exactly, and shows what goes through to the layers' gatherers."""

    fixed_steps = None  # it has no decoder: its layers count their columns

    def __init__(self, shape: ModelShape, gatherers: dict[int, Any], excerpt: int = 0) -> None:
        self.shape, self.gatherers, self.excerpt = shape, gatherers, excerpt
        super().__init__(layers=[PackedLayer(self, i, window) for i, window in enumerate(shape.layers)])

    @property
    def batch_size(self) -> int:
        return 1

    def abort(self) -> None:
        """Nothing is stored, so nothing is taken back."""

    def cut_gradients(self) -> None:
        """Gradients are not wanted: `attending` turns them off."""

    def attend(self, handle: Handle, query: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
        layer = handle.layer
        window = self.shape.layers[layer]
        q, k, v = query, handle.key, handle.value
        if mask is not None and not bool((mask == causal(q.shape[2], window, q.device)).all()):
            raise ValueError("cannot calibrate this model: its attention mask is not causal")
        out = exact_attention(q, k, v, scale, window, softcap)  # [1, query heads, tokens, head_dim]
        gatherer = self.gatherers.get(layer)
        if gatherer is not None:
            groups = q.shape[1] // k.shape[1]
            gatherer.scale, gatherer.softcap = scale, softcap
            gatherer.add(
                self.excerpt,
                q[0].unflatten(0, (-1, groups)).permute(2, 0, 1, 3),
                k[0].transpose(0, 1),
                v[0].transpose(0, 1),
                out[0].unflatten(0, (-1, groups)).permute(2, 0, 1, 3),
            )
        if layer == max(self.gatherers):
            raise _Enough
        return out.transpose(1, 2)


def causal(tokens: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Which tokens (columns) every query (row) sees."""
    at = torch.arange(tokens, device=device)
    keep = at <= at[:, None]
    return keep if sliding_window is None else keep & (at > at[:, None] - sliding_window)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Causal attention of an excerpt over itself, [1, heads, tokens, head_dim]. Scores are never formed for all queries."""
    tokens, device = q.shape[2], q.device
    if softcap is None:
        if sliding_window is None or sliding_window >= tokens:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        keep = causal(tokens, sliding_window, device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    grouped = q.unflatten(1, (-1, groups))
    block = max(1, SCORE_BYTES // (4 * q.shape[1] * tokens))
    out = []
    for first in range(0, tokens, block):
        last = min(tokens, first + block)
        scores = torch.einsum("bhgqd,bhnd->bhgqn", grouped[..., first:last, :], k[:, :, :last]).float() * scale
        scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~causal(last, sliding_window, device)[first:], float("-inf"))
        out.append(torch.einsum("bhgqn,bhnd->bhgqd", scores.softmax(-1).to(v.dtype), v[:, :, :last]))
    return torch.cat(out, 3).flatten(1, 2)


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Sends a model's attention to the cache that it is called with, and puts everything back afterwards."""
    give_back = borrow(model.config)
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        give_back()
        model.train(training)


def _forward(model: Any, capture: Capture, ids: Tensor, **options: Any) -> None:
    """One excerpt through the model's layers; no logits are computed."""
    device = model.get_input_embeddings().weight.device
    ids = ids.to(device=device, dtype=torch.int64)[None]
    with contextlib.suppress(_Enough):
        model.base_model(input_ids=ids, past_key_values=capture, use_cache=True, **options)


class _Keys:
    """Keeps an excerpt's keys as they come."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.scale, self.softcap = 0.0, cast("float | None", None)

    def add(self, excerpt: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        self.keys = k


def keys_of(model: Any, ids: Tensor) -> list[Tensor]:
    """The keys of every layer as they come, after RoPE: [tokens, heads, head_dim]. ids is [tokens]."""
    shape = ModelShape.of(model)
    kept = {layer: _Keys() for layer in range(len(shape.layers))}
    with attending(model):
        _forward(model, Capture(shape, kept), ids)
    return [cast(Tensor, found.keys) for found in kept.values()]


def checked_ropes(model: Any, shape: ModelShape, ids: Tensor) -> list[Rope]:
    """The rotation of every layer, tried on the model: a few tokens further on must give the same keys, rotated."""
    name = getattr(model.config, "model_type", type(model).__name__)
    remedy = "set max_position to the length of an excerpt to measure the positions of the text alone"
    try:
        ropes = ropes_of(model, len(shape.layers))
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from error
    ids = ids[:16]
    shift = 37
    seen: list[list[Tensor]] = []
    with attending(model):
        for first in (0, shift):
            kept = {layer: _Keys() for layer in range(len(shape.layers))}
            at = torch.arange(first, first + len(ids), device=model.get_input_embeddings().weight.device)[None]
            _forward(model, Capture(shape, kept), ids, position_ids=at)
            seen.append([cast(Tensor, kept[layer].keys) for layer in kept])
    for layer, (rope, near, far) in enumerate(zip(ropes, *seen, strict=True)):
        missed = float((rope.rotate(near.float(), shift) - far.float()).norm() / far.float().norm())
        if not missed < (1e-3 if near.dtype == torch.float32 else 0.1):
            raise ValueError(
                f"cannot rotate keys of {name} to other positions: the rotary embedding of layer {layer} is of a kind "
                f"that kvant does not know (relative error {missed:.1e}); {remedy}"
            )
    return ropes


def gather(
    model: Any,
    excerpts: Sequence[Tensor],
    plan: Plan,
    progress: Progress | None = None,
    budget: int = BUDGET,
    skip: Container[int] = (),
) -> Iterator[tuple[int, LayerStats]]:
    """Statistics of every layer in turn but those to skip, gathered of as many layers at a time as the budget allows. An excerpt is
    the token ids of one text."""
    shape = ModelShape.of(model)
    config = model.config.get_text_config(decoder=True)
    groups = config.num_attention_heads // shape.heads
    rotates = bool(plan.block) or any(plan.max_position > len(ids) for ids in excerpts)
    ropes: Sequence[Rope | None] = checked_ropes(model, shape, excerpts[0]) if rotates else [None] * len(shape.layers)
    devices = _layer_devices(model, len(shape.layers))
    at_once = max(1, budget // layer_bytes(shape, plan, groups))
    layers = [layer for layer in range(len(shape.layers)) if layer not in skip]
    passes = [layers[first : first + at_once] for first in range(0, len(layers), at_once)]
    total, done = sum(map(len, excerpts)) * len(passes), 0
    for chosen in passes:
        gatherers = {i: LayerGatherer(i, shape, plan, ropes[i], devices[i]) for i in chosen}
        with attending(model):
            for index, ids in enumerate(excerpts):
                _forward(model, Capture(shape, gatherers, index), ids)
                done += len(ids)
                if progress is not None:
                    progress("measuring", done, total)
        for layer in chosen:
            yield layer, gatherers.pop(layer).finish()


def _layer_devices(model: Any, layers: int) -> list[torch.device]:
    """Where every layer's keys will be."""
    found: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        weight = next(module.parameters(), None)
        if isinstance(index, int) and weight is not None:
            found.setdefault(index, weight.device)
    home = model.get_input_embeddings().weight.device
    return [found.get(layer, home) for layer in range(layers)]
