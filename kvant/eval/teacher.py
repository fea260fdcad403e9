"""Teacher-forced evaluation: every recipe reads the same text, and is compared with the full cache token by token.

The first tokens of a segment are prefilled and not scored (segments.py says which texts there are). Each later token is
fed through the recipe's packed cache, `chunk` tokens at a time, and its next-token distribution is compared with that of
transformers' own full cache on the same tokens. A chunk of 1 is decode. Since the text is known, decode is computed for a
block of tokens at once (kvant.ops.replay), with the same result as one by one; `stepwise` really goes one by one.
Segments form one batch. The full cache runs one block ahead and only one block's distributions are held, so memory does
not grow with the context.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from kvant.engines.attention import eager_attention
from kvant.engines.hf import Cache, ModelShape
from kvant.engines.hybrid import HybridCache, cache_for, packed_of
from kvant.eval.profile import Profile, Sums
from kvant.eval.segments import Batch, Segments, Text
from kvant.ops.types import one_sequence
from kvant.recipe import Recipe

__all__ = ["AttentionError", "Result", "Segments", "evaluate"]

Tensor = torch.Tensor
AT_ONCE = (
    3  # recipes compared with one pass of the full cache; each also holds exact keys and values, for AttentionError
)
BLOCK = 64  # tokens per segment whose reference distributions are held at a time, at least
GPU_BLOCK = 256  # on a GPU, where a block costs its launches


@dataclasses.dataclass
class Result:
    """What one recipe scored; field names are those of `kvant eval --json`."""

    recipe: str
    bpe: float
    ppl: float
    kl: float
    kl_se: float
    top1: float
    attn_rel_mse: float
    seconds: float
    layers: list[float] = dataclasses.field(default_factory=list)  # attn_rel_mse of each layer
    logits: list[float] = dataclasses.field(
        default_factory=list
    )  # with `profile`: logit error of each layer, as attention weighs it
    profile: Profile | None = None  # with `profile`


class AttentionError:
    """Compares a cache's attention outputs with exact attention over the same queries, keys and values.

    scales, sinks, softcaps  of every layer: softmax scale, sink logits, soft cap of the logits
    total    sums over all batches, of one recipe
    batch    the rows that the cache reads; `asked` [rows, columns] are the queries that count in the forward pass at hand, None
             where none do
    """

    def __init__(
        self,
        cache: Cache,
        scales: list[float],
        sinks: list[Tensor | None],
        softcaps: list[float | None],
        total: Errors,
        batch: Batch,
    ) -> None:
        self.cache, self.total, self.batch = cache, total, batch
        self.scales, self.sinks, self.softcaps = scales, sinks, softcaps
        self.sliding_windows = cache.shape.layers
        self.keys: list[list[Tensor]] = [[] for _ in self.sliding_windows]
        self.values: list[list[Tensor]] = [[] for _ in self.sliding_windows]
        self.asked: Tensor | None = None
        self.seconds = 0.0
        cache.on_attend = self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        begin = time.perf_counter()
        self.keys[layer].append(key)
        self.values[layer].append(value)
        if self.asked is not None:
            keys, values = torch.cat(self.keys[layer], 2), torch.cat(self.values[layer], 2)
            self.keys[layer], self.values[layer] = [keys], [values]
            self._compare(layer, query, keys, values, out, self.asked)
        self.seconds += time.perf_counter() - begin

    def _compare(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, asked: Tensor) -> None:
        """query [rows, query heads, new columns, head_dim], keys and values [rows, heads, columns, head_dim], out
        [rows, new columns, query heads, head_dim]."""
        fresh, total = query.shape[2], keys.shape[2]
        at = torch.arange(total, device=query.device)
        keep = at <= at[-fresh:, None]
        sliding_window = self.sliding_windows[layer]
        if sliding_window is not None:
            keep &= at > at[-fresh:, None] - sliding_window
        if self.batch.real is not None:
            keep = keep & self.batch.real[:, None, None, :total]
        scale, sinks, softcap = self.scales[layer], self.sinks[layer], self.softcaps[layer]
        if sinks is None and softcap is None:
            exact = F.scaled_dot_product_attention(query, keys, values, attn_mask=keep, scale=scale, enable_gqa=True)
            exact = exact.transpose(1, 2)
        else:
            exact = eager_attention(query, keys, values, keep.view(-1, 1, fresh, total), scale, sinks, softcap)
        counts = asked[..., None]  # a query of padding may attend to nothing, which gives NaN
        error, energy = (torch.where(counts, x.double().square().sum(-1), 0.0) for x in (out - exact, exact))
        self.total.add(layer, error, energy)  # each [rows, new columns, query heads], zero where a query does not count
        if self.total.profile is not None:
            length = self.batch.positions(total - fresh, total)[asked] + 1
            for name, x in (("output_error", error), ("output_energy", energy)):
                self.total.profile.add(name, layer, length, x[asked].unflatten(1, (keys.shape[1], -1)).sum(-1))
            self._profile(self.total.profile, layer, query, keys, values, asked)

    def _profile(self, profile: Sums, layer: int, query: Tensor, keys: Tensor, values: Tensor, asked: Tensor) -> None:
        """Compares keys, values and logits sequence by sequence."""
        fresh, total = query.shape[2], keys.shape[2]
        real = self.batch.real
        new = None if real is None else real[:, total - fresh : total]
        decoded = self.cache.as_decoded or (fresh == 1 and (new is None or bool(new.all())))
        store, stored = self.cache.store_of(layer)
        positions = self.batch.positions(total - fresh, total)
        for row in range(len(query)):
            columns = asked[row].nonzero()[:, 0]
            if not len(columns):
                continue
            tokens = slice(0, total) if real is None else real[row, :total]
            profile.compare(
                layer,
                store,
                one_sequence(stored, row),
                query[row, :, columns].transpose(0, 1),
                keys[row, :, tokens].transpose(0, 1),
                values[row, :, tokens].transpose(0, 1),
                positions[row, columns],
                before=None if decoded else total - fresh if real is None else int(real[row, : total - fresh].sum()),
                scale=self.scales[layer],
                softcap=self.softcaps[layer],
                sliding_window=self.sliding_windows[layer],
            )


class Errors:
    """Sums of a recipe's attention errors over all batches; error and energy of the outputs by layer."""

    def __init__(self, layers: int, heads: int, profile: bool) -> None:
        self.error, self.energy = (torch.zeros(layers, dtype=torch.float64) for _ in range(2))
        self.profile = Sums(layers, heads) if profile else None

    def add(self, layer: int, error: Tensor, energy: Tensor) -> None:
        """Adds squared errors and energies of a layer. The sums stay on their device: reading them would wait for it."""
        self.error, self.energy = self.error.to(error.device), self.energy.to(error.device)
        self.error[layer] += error.sum()
        self.energy[layer] += energy.sum()

    @property
    def relative(self) -> Tensor:
        return (self.error / self.energy).cpu()


def attention_layers(model: Any) -> list[Any]:
    """The attention modules of a model, in the order of its layers."""
    found = {getattr(module, "layer_idx", None): module for module in model.modules() if hasattr(module, "scaling")}
    return [found[index] for index in sorted(index for index in found if index is not None)]


def attention_scales(model: Any) -> list[float]:
    """The softmax scale of every attention layer."""
    return [float(layer.scaling) for layer in attention_layers(model)]


def sink_logits_of(model: Any) -> list[Tensor | None]:
    """The sink logits of every attention layer, [query heads]; None where it has none."""
    sinks = (getattr(layer, "sinks", None) for layer in attention_layers(model))
    return [x.detach() if isinstance(x, Tensor) else None for x in sinks]


def softcaps_of(model: Any) -> list[float | None]:
    """The soft cap of the attention logits of every attention layer; None where it has none."""
    return [getattr(layer, "attn_logit_softcapping", None) for layer in attention_layers(model)]


class _Scores:
    """Sums over all scored tokens of one recipe."""

    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.kl: list[Tensor] = []  # [tokens] each
        self.nll = 0.0
        self.equal = 0
        self.tokens = 0
        self.seconds = 0.0
        self.bpe = 0.0

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """logits [tokens, vocabulary]; reference: log-probabilities of the full cache."""
        found = torch.log_softmax(logits.float(), -1)
        self.kl.append((reference.exp() * (reference - found)).sum(-1).cpu())
        self.nll -= float(found.gather(-1, targets[..., None]).double().sum())
        self.equal += int((found.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += targets.numel()

    def result(self, name: str) -> Result:
        kl = torch.cat(self.kl).double()
        layers, profile = self.errors.relative, self.errors.profile
        return Result(
            recipe=name,
            bpe=self.bpe,
            ppl=math.exp(self.nll / self.tokens),
            kl=float(kl.mean()),
            kl_se=float(kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else math.nan,
            top1=self.equal / self.tokens,
            attn_rel_mse=float(layers.mean()),
            seconds=self.seconds,
            layers=layers.tolist(),
            logits=[] if profile is None else profile.weighted_logits,
            profile=None if profile is None else profile.profile(),
        )


@torch.inference_mode()
def evaluate(
    model: Any,
    recipes: Sequence[Recipe],
    segments: Text,
    chunk: int = 1,
    batch: int = 8,
    make_cache: Callable[[Recipe], Cache | HybridCache] | None = None,
    progress: Callable[[int, int], None] | None = None,
    stepwise: bool = False,
    offset: int = 0,
    profile: bool = False,
    together: int = AT_ONCE,
) -> list[Result]:
    """Scores recipes against the full cache on the same tokens: `Segments` of a text, or the answers of `ChatSegments`. `progress`
    is called with (done, total) tokens.

    `offset` adds a constant to every position. RoPE is relative, so the full cache gives the same distributions; a recipe
    that was fitted to keys at other positions may not. `profile` also compares keys, values and attention probabilities.
    `together` recipes share one pass of the full cache. With `stepwise`, chats are read one at a time: a batch of them has padding,
    which decode of one token does not.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")

    def feed(cache: Any, rows: Batch, start: int, stop: int, **options: Any) -> Tensor:
        if rows.real is not None:
            options["attention_mask"] = rows.real[:, :stop].long()
        position = rows.positions(start, stop) + offset
        return model(rows.ids[:, start:stop], position_ids=position, past_key_values=cache, **options).logits

    make_cache = make_cache or (lambda recipe: cache_for(model, recipe, first_position=offset))
    shape = ModelShape.of(model, hybrid=True).packed
    scores = [_Scores(Errors(len(shape.layers), shape.heads, profile)) for _ in recipes]
    total = segments.tokens * len(recipes)
    done = 0
    scales, sinks, softcaps = attention_scales(model), sink_logits_of(model), softcaps_of(model)
    compare_every = 16 if chunk == 1 and stepwise else 1  # attention outputs are compared at every n-th step
    at_once = chunk == 1 and not stepwise
    batch = 1 if chunk == 1 and stepwise and segments.ragged else batch
    held = GPU_BLOCK if model.device.type == "cuda" else BLOCK
    chunk = held if at_once else chunk
    block = math.ceil(held / chunk) * chunk
    for rows, some in itertools.product(segments.batches(batch), range(0, len(recipes), together)):
        rows = rows.to(model.device)
        prompt, columns = rows.prompt, rows.ids.shape[1]
        running: list[tuple[Cache | HybridCache, AttentionError, _Scores]] = []
        for recipe, score in zip(recipes[some : some + together], scores[some : some + together], strict=True):
            cache = make_cache(recipe)
            meter = AttentionError(packed_of(cache), scales, sinks, softcaps, score.errors, rows)
            begin = time.perf_counter()
            feed(cache, rows, 0, prompt, logits_to_keep=1)
            score.seconds += time.perf_counter() - begin - meter.seconds
            packed_of(cache).as_decoded = at_once
            running.append((cache, meter, score))
        reference = DynamicCache(config=model.config)
        feed(reference, rows, 0, prompt, logits_to_keep=1)
        for start in range(prompt, columns - 1, block):
            stop = min(start + block, columns - 1)
            expected = feed(reference, rows, start, stop).float().log_softmax(-1)
            for cache, meter, score in running:
                for at in range(start, stop, chunk):
                    until = min(at + chunk, stop)
                    asked = rows.targets(at, until)
                    compared = (at - prompt) // chunk % compare_every == 0 and bool(asked.any())
                    meter.asked = asked if compared else None
                    begin, metered = time.perf_counter(), meter.seconds
                    logits = feed(cache, rows, at, until)
                    score.seconds += time.perf_counter() - begin - (meter.seconds - metered)
                    targets = rows.ids[:, at + 1 : until + 1]
                    score.add(logits[asked], expected[:, at - start : until - start][asked], targets[asked])
                    done += int(asked.sum())
                    if progress is not None:
                        progress(done, total)
        for cache, _, score in running:
            score.bpe = packed_of(cache).layouts.bits_per_element(segments.length)
    return [score.result(recipe.name) for recipe, score in zip(recipes, scores, strict=True)]
