"""The statistics of one layer's queries, keys and values: what is gathered (`Plan`), sums and samples of fixed size, and how
much attention depends on a token.

Positions: attention does not change when q and k are rotated by the same number of positions, but their second moments
and ranges do. Every token of an excerpt is therefore rotated to a position of its own before it is added; the positions of
an excerpt are spread evenly over those that will be served. Probes need q and k at matching positions, so each probe is
rotated as a whole, by an offset of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple, cast

import torch

from kvant.calibrate.checkpoint import uninterrupted
from kvant.calibrate.exact_attention import SCORE_BYTES, softmax_with_sink_logits
from kvant.rope import Rope
from kvant.shape import ModelShape
from kvant.stats import LayerStats, Moments, Probe, WeightedMoments

Tensor = torch.Tensor

SAMPLE_BUDGET = 128 << 20  # bytes of one layer's sampled keys and values
SAMPLES = 16384  # sampled keys and values per head, at most
QUERY_SAMPLES = 1024
PROBES = 4
PROBE_TOKENS = 1024
QUERY_STEP = 16  # a probe keeps every 16th query
CPU_SCORE_BYTES = 4 << 20  # of attention scores for token weights on a CPU, whose caches hold about that much
UNWEIGHTED = 16  # first tokens of an excerpt, which have weight 0: as sinks they would outweigh all others
MAX_WEIGHT = 100.0  # largest weight of a token, as a multiple of the mean weight


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is gathered: from how many excerpts and tokens, at which positions, and the sizes of sample and probes. What no
    fitter reads is not gathered: `samples` and `probes` are then 0, `attended` is False."""

    excerpts: int
    tokens: int
    max_position: int
    sink: int = 0
    recent: int = 0
    seed: int = 0
    attention_weighted: bool = False  # whether to weight tokens by how much an error in them changes attention outputs
    block: int = 0  # positions of a RoPE block, to whose start keys are unrotated; 0: keys are stored after RoPE
    samples: int = SAMPLES
    probes: int = PROBES
    probe_tokens: int = PROBE_TOKENS
    attended: bool = True  # whether to gather the moments of attention outputs

    def reduced(self, reads: Collection[str]) -> Plan:
        """The plan without what is not read: `reads` has the names of `fitting.Statistic`."""
        return dataclasses.replace(
            self,
            samples=self.samples if "sample" in reads else 0,
            probes=self.probes if "probes" in reads else 0,
            attended="attended" in reads,
        )

    def probe_offset(self, excerpt: int, tokens: int) -> int | None:
        """Positions by which a probe of this excerpt is rotated; None where the excerpt gives no probe. Offsets are spread from 0
        to the last that keeps all positions below max_position."""
        count = min(self.probes, self.excerpts)
        chosen = [round(i * (self.excerpts - 1) / max(1, count - 1)) for i in range(count)]
        if excerpt not in chosen:
            return None
        return round(chosen.index(excerpt) * max(0, self.max_position - tokens) / max(1, count - 1))

    def positions(self, excerpt: int, tokens: int, below: int | None = None) -> Tensor | None:
        """Positions int64 [tokens] to which the tokens of an excerpt are rotated: spread evenly over [0, below), in random order.
        `below` defaults to max_position. None where the excerpt's own positions cover the range."""
        below = below or self.max_position
        if below == tokens or (below < tokens and below == self.max_position):
            return None
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + excerpt) * 2 + (below != self.max_position))
        place = torch.randperm(tokens, generator=generator).double()
        place += torch.rand(tokens, generator=generator, dtype=torch.float64)
        return (place * (below / tokens)).long().clamp_max(below - 1)


def by_head(x: Tensor) -> Tensor:
    """Vectors [n, heads, head_dim] as contiguous float64 [heads, n, head_dim], which is what batched products read fastest."""
    return x.transpose(0, 1).to(torch.float64, memory_format=torch.contiguous_format)


class Running:
    """Running sums and a uniform sample (reservoir) of vectors, of fixed size."""

    def __init__(self, heads: int, dim: int, samples: int, device: torch.device, seed: int) -> None:
        self.count = 0
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)
        self.absmax = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.sample = torch.zeros(samples, heads, dim, dtype=torch.float32, device=device)
        self.priorities = torch.full(
            (samples,), 2.0, dtype=torch.float64
        )  # a random number per vector; those with the lowest are the sample
        self.generator = torch.Generator().manual_seed(seed)

    @staticmethod
    def nbytes(heads: int, dim: int, samples: int) -> int:
        return 8 * heads * dim * (dim + 2) + samples * (4 * heads * dim + 8)

    def add(self, x: Tensor) -> None:
        """x is [vectors, heads, head_dim]."""
        wide = by_head(x)
        self.count += len(x)
        self.total += wide.sum(1)
        self.second += wide.mT @ wide
        if not len(self.priorities):
            return
        low, high = x.aminmax(dim=0)
        self.absmax = torch.maximum(self.absmax, torch.maximum(high, -low).double())
        priorities = torch.rand(len(x), dtype=torch.float64, generator=self.generator)
        kept = torch.cat((self.priorities, priorities)).topk(len(self.priorities), largest=False).indices.sort().values
        stay = torch.zeros(len(self.priorities), dtype=torch.bool)
        stay[kept[kept < len(self.priorities)]] = True
        enter = kept[kept >= len(self.priorities)] - len(self.priorities)
        self.priorities[~stay] = priorities[enter]
        self.sample[(~stay).to(x.device)] = x[enter.to(x.device)].float()

    @property
    def state(self) -> dict[str, Tensor]:
        parts = {name: getattr(self, name) for name in ("total", "second", "absmax", "sample", "priorities")}
        return parts | {"count": torch.tensor(self.count), "generator": self.generator.get_state()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.count, self.priorities = int(state["count"]), state["priorities"]
        self.generator.set_state(state["generator"])
        device = self.total.device
        self.total, self.second = state["total"].to(device), state["second"].to(device)
        self.absmax, self.sample = state["absmax"].to(device), state["sample"].to(device)

    def finish(self) -> Moments:
        assert self.count, "no vectors were added"
        sample = self.sample[(self.priorities < 2.0).to(self.sample.device)].transpose(0, 1)
        absmax = self.absmax if len(self.priorities) else torch.full_like(self.absmax, torch.nan)
        return Moments(self.count, self.total / self.count, self.second / self.count, absmax, sample)


class WeightedSums:
    """Running weighted sums of vectors."""

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self.weight = torch.zeros(heads, dtype=torch.float64, device=device)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)

    def add(self, x: Tensor, weight: Tensor) -> None:
        """x is [vectors, heads, head_dim], weight [vectors, heads]."""
        wide, weight = by_head(x), weight.double().T
        heavy = wide * weight[..., None]
        self.weight += weight.sum(1)
        self.total += heavy.sum(1)
        self.second += heavy.mT @ wide

    @property
    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "total": self.total, "second": self.second}

    def restore(self, state: dict[str, Tensor]) -> None:
        device = self.total.device
        self.weight, self.total, self.second = (state[name].to(device) for name in ("weight", "total", "second"))

    def finish(self) -> WeightedMoments:
        assert bool((self.weight > 0).all()), "no vectors were added"
        return WeightedMoments(self.total / self.weight[:, None], self.second / self.weight[:, None, None])


def relative(read: Tensor) -> Tensor:
    """Weights of an excerpt's tokens [tokens, heads], divided by their mean and clipped at MAX_WEIGHT."""
    return (read / read.mean(0).clamp_min(1e-30)).clamp_max(MAX_WEIGHT)


class TokenWeights(NamedTuple):
    """How much an error in a token changes attention outputs, summed over the queries that read the token packed: those
    beyond the recent window. The first tokens, which are sinks, have weight 0."""

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
    sink_logits: Tensor | None = None,
) -> TokenWeights:
    """Weights of the tokens of one excerpt. q, k, v and o as in `LayerGatherer.add`.

    keys: sum_q p^2 |v - o|^2, since d o = p (v - o) for an error of one logit. values: sum_q p^2, since d o = p d v.
    |v - o|^2 is expanded to |v|^2 - 2 v . o + |o|^2, so that no [queries, tokens, head_dim] tensor is formed.
    """
    tokens, heads, groups, dim = q.shape
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)  # [heads, d, tokens], [heads, tokens, d]
    queries, outputs = (x.float().permute(1, 2, 0, 3) for x in (q, o))  # [heads, groups, tokens, d]
    recent = min(recent, tokens // 4)
    # per token: sums over queries of p^2 o, p^2 |o|^2 and p^2
    sums = torch.zeros(heads, tokens, dim + 2, dtype=torch.float32, device=k.device)
    at = torch.arange(tokens, device=k.device)
    score_bytes = CPU_SCORE_BYTES if k.device.type == "cpu" else SCORE_BYTES
    block = max(1, score_bytes // (4 * heads * groups * tokens))
    for first in range(0, tokens, block):
        last = min(tokens, first + block)
        low = 0 if sliding_window is None else max(0, first - sliding_window + 1)  # the first token that a query sees
        rows = at[first:last, None]
        scores = (queries[:, :, first:last].flatten(1, 2) * scale) @ keys[..., low:last]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.unflatten(1, (groups, last - first))  # [heads, groups, rows, last - low]
        scores[..., first - low :].masked_fill_(at[first:last] > rows, float("-inf"))
        if sliding_window is not None:
            scores.masked_fill_(at[low:last] <= rows - sliding_window, float("-inf"))
        p2 = softmax_with_sink_logits(scores, sink_logits).square_()
        edge = max(low, first - recent)  # from this token on, some query of the block reads it exactly
        p2[..., edge - low :].masked_fill_(at[edge:last] > rows - recent, 0.0)
        out = outputs[:, :, first:last].flatten(1, 2)
        squared = out.square().sum(-1, keepdim=True)
        sums[:, low:last] += p2.flatten(1, 2).mT @ torch.cat((out, squared, torch.ones_like(squared)), -1)
    sums[:, : min(UNWEIGHTED, tokens // 2)] = 0.0
    cross, norms, squares = sums[..., :dim], sums[..., dim], sums[..., dim + 1]
    read = squares * values.square().sum(-1) - 2.0 * (cross * values).sum(-1) + norms
    return TokenWeights(read.clamp_min(0.0).T, squares.T)


class LayerGatherer:
    """Accumulates the statistics of one layer."""

    def __init__(self, layer: int, shape: ModelShape, plan: Plan, rope: Rope | None, device: torch.device) -> None:
        self.plan, self.rope, self.sliding_window = plan, rope, shape.layers[layer]
        self.scale, self.softcap = 0.0, cast("float | None", None)
        self.sink_logits: Tensor | None = None
        samples = sample_size(shape, plan)
        seed = (plan.seed * 1_000_003 + layer) * 4
        size = shape.heads, shape.head_dim
        self.queries = Running(*size, min(samples, QUERY_SAMPLES), device, seed)
        self.keys = Running(*size, samples, device, seed + 1)
        self.values = Running(*size, samples, device, seed + 1)  # same seed: the same tokens as the keys
        self.attended = Running(*size, 0, device, seed) if plan.attended else None
        self.weighted_keys = WeightedSums(*size, device) if plan.attention_weighted else None
        self.weighted_values = WeightedSums(*size, device) if plan.attention_weighted else None
        self.probes: list[Probe] = []
        self.read = 0  # excerpts that were added

    def add(self, excerpt: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Adds one excerpt: queries and outputs [tokens, heads, queries per head, head_dim], keys and values [tokens, heads,
        head_dim]. Excerpts come in order; one that was added before, by a call that was interrupted, is not added again."""
        if excerpt < self.read:
            return
        with uninterrupted():  # an interrupt finds every layer with whole excerpts
            self._add(excerpt, q, k, v, o)
            self.read = excerpt + 1

    def _add(self, excerpt: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
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
            weights = token_weights(
                q, k, v, o, self.scale, self.sliding_window, self.softcap, self.plan.recent, self.sink_logits
            )
        q = self._rotated(q, self.plan.positions(excerpt, tokens))
        k = self._rotated(k, self.plan.positions(excerpt, tokens, self.plan.block or None))
        self.queries.add(q[coded].transpose(1, 2).flatten(0, 1))
        self.keys.add(k[coded])
        self.values.add(v[coded])
        if self.attended is not None:
            self.attended.add(o[coded].transpose(1, 2).flatten(0, 1))
        if weights is not None:
            assert self.weighted_keys and self.weighted_values
            self.weighted_keys.add(k, relative(weights.keys))
            self.weighted_values.add(v, relative(weights.values))

    def _rotated(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Queries or keys of an excerpt, token t rotated from position t to positions[t]."""
        if positions is None:
            return x
        return self._rotate(x.float(), (positions - torch.arange(len(x))).to(x.device))

    def _rotate(self, x: Tensor, by: Tensor | int) -> Tensor:
        if isinstance(by, int) and by == 0:
            return x
        assert self.rope is not None
        return self.rope.rotate(x, by)

    @property
    def _sums(self) -> dict[str, Running | WeightedSums]:
        names = ("queries", "keys", "values", "attended", "weighted_keys", "weighted_values")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def state(self) -> dict[str, Tensor]:
        """All that was gathered so far, for a checkpoint."""
        out = {f"{name}.{key}": tensor for name, sums in self._sums.items() for key, tensor in sums.state.items()}
        for i, probe in enumerate(self.probes):
            out |= {f"probe.{i}.{key}": tensor for key, tensor in probe._asdict().items()}
        out |= {"read": torch.tensor(self.read), "scale": torch.tensor(self.scale, dtype=torch.float64)}
        if self.softcap is not None:
            out["softcap"] = torch.tensor(self.softcap, dtype=torch.float64)
        if self.sink_logits is not None:
            out["sink_logits"] = self.sink_logits.clone()
        return out

    def restore(self, state: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            part, _, key = name.rpartition(".")
            parts.setdefault(part, {})[key] = tensor
        for name, sums in self._sums.items():
            sums.restore(parts[name])
        device = self.keys.total.device
        count = sum(part.startswith("probe.") for part in parts)
        self.probes = [
            Probe(**{key: tensor.to(device) for key, tensor in parts[f"probe.{i}"].items()}) for i in range(count)
        ]
        own = parts[""]
        self.read, self.scale = int(own["read"]), float(own["scale"])
        self.softcap = float(own["softcap"]) if "softcap" in own else None
        self.sink_logits = own["sink_logits"].to(device) if "sink_logits" in own else None

    def finish(self) -> LayerStats:
        attended = None if self.attended is None else self.attended.finish()
        return LayerStats(
            queries=self.queries.finish(),
            keys=self.keys.finish(),
            values=self.values.finish(),
            attended=None if attended is None else attended.second,
            attended_mean=None if attended is None else attended.mean,
            probes=tuple(self.probes),
            scale=self.scale,
            sink=self.plan.sink,
            recent=self.plan.recent,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sink_logits=self.sink_logits,
            weighted_keys=None if self.weighted_keys is None else self.weighted_keys.finish(),
            weighted_values=None if self.weighted_values is None else self.weighted_values.finish(),
        )


def sample_size(shape: ModelShape, plan: Plan) -> int:
    """Number of keys and values per head that are sampled: all of them, or as many as the budget allows."""
    fit = max(1, SAMPLE_BUDGET // (2 * 4 * shape.heads * shape.head_dim))
    return min(plan.samples, plan.tokens, fit)


def layer_bytes(shape: ModelShape, plan: Plan, groups: int) -> int:
    """Bytes of the statistics of one layer; they do not depend on the number of tokens."""
    samples = sample_size(shape, plan)
    kinds = (min(samples, QUERY_SAMPLES), samples, samples, *[0] * plan.attended)
    moments = sum(Running.nbytes(shape.heads, shape.head_dim, count) for count in kinds)
    moments += 2 * Running.nbytes(shape.heads, shape.head_dim, 0) if plan.attention_weighted else 0
    rows = -(-plan.probe_tokens // QUERY_STEP) * groups + 2 * plan.probe_tokens
    return moments + plan.probes * rows * shape.heads * shape.head_dim * 4
