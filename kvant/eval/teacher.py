"""Teacher-forced evaluation: every recipe reads the same text, and is compared with the full cache token by token.

Segments are spread evenly over the text. The first tokens of a segment are prefilled and not scored. Each later token is
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

from kvant.engines.hf import Cache
from kvant.eval.profile import Profile
from kvant.recipe import Recipe

Tensor = torch.Tensor
AT_ONCE = (
    3  # recipes compared with one pass of the full cache; each also holds exact keys and values, for AttentionError
)
BLOCK = 64  # tokens per segment whose reference distributions are held at a time, at least


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments of a text. ids is int64 [segments, prompt + scored + 1]; the last column is only a target."""

    ids: Tensor
    prompt: int

    @property
    def scored(self) -> int:
        """Tokens per segment whose prediction is scored."""
        return self.ids.shape[1] - 1 - self.prompt

    @property
    def tokens(self) -> int:
        return self.scored * len(self.ids)

    @staticmethod
    def over(ids: Sequence[int], context: int, tokens: int, prompt: int | None = None) -> Segments:
        """As many segments as it takes to score at least `tokens` tokens, spread evenly over the text."""
        prompt = context // 3 if prompt is None else prompt
        if context < 2:
            raise ValueError(f"context must be at least 2 tokens, got {context}")
        if not 1 <= prompt < context:
            raise ValueError(
                f"prompt must be at least 1 and shorter than the context of {context} tokens, got {prompt}"
            )
        if tokens < 1:
            raise ValueError(f"tokens must be positive, got {tokens}")
        if len(ids) < context + 1:
            raise ValueError(f"the text has {len(ids)} tokens, a context of {context} needs at least {context + 1}")
        count = math.ceil(tokens / (context - prompt))
        length = prompt + math.ceil(tokens / count) + 1
        room = len(ids) - length
        starts = [round(room * i / max(1, count - 1)) for i in range(count)]
        return Segments(torch.tensor([list(ids[start : start + length]) for start in starts]), prompt)


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
    logits: list[float] = dataclasses.field(default_factory=list)  # with `profile`: logit error of each layer
    profile: Profile | None = None  # with `profile`


class AttentionError:
    """Compares a cache's attention outputs with exact attention over the same queries, keys and values."""

    def __init__(self, cache: Cache, scales: list[float], profile: bool = False) -> None:
        self.cache, self.scales, self.profile = cache, scales, profile
        self.logit_error = torch.zeros(len(cache.shape.layers), dtype=torch.float64)
        self.compared = torch.zeros(len(cache.shape.layers), dtype=torch.float64)
        self.sliding_windows = cache.shape.layers
        self.keys: list[list[Tensor]] = [[] for _ in self.sliding_windows]
        self.values: list[list[Tensor]] = [[] for _ in self.sliding_windows]
        self.error = torch.zeros(len(self.sliding_windows), dtype=torch.float64)
        self.energy = torch.zeros(len(self.sliding_windows), dtype=torch.float64)
        self.measuring = False
        self.seconds = 0.0
        cache.on_attend = self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        begin = time.perf_counter()
        self.keys[layer].append(key)
        self.values[layer].append(value)
        if self.measuring:
            keys, values = torch.cat(self.keys[layer], 2), torch.cat(self.values[layer], 2)
            self.keys[layer], self.values[layer] = [keys], [values]
            fresh, total = query.shape[2], keys.shape[2]
            at = torch.arange(total, device=query.device)
            keep = at <= at[-fresh:, None]
            sliding_window = self.sliding_windows[layer]
            if sliding_window is not None:
                keep &= at > at[-fresh:, None] - sliding_window
            exact = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=keep, scale=self.scales[layer], enable_gqa=True
            ).transpose(1, 2)
            self.error[layer] += (out - exact).double().square().sum().cpu()
            self.energy[layer] += exact.double().square().sum().cpu()
            if self.profile:
                self._add_logit_error(layer, query[:, :, -1], keys, keep[-1])
        self.seconds += time.perf_counter() - begin

    def _add_logit_error(self, layer: int, query: Tensor, keys: Tensor, keep: Tensor) -> None:
        """Adds sum_n p_n (e_n - mean e)^2 for the last query: e_n is the error of its logit for token n, p_n its attention
        weight, and mean e = sum_n p_n e_n, which the softmax cancels."""
        grouped = query.float().unflatten(1, (keys.shape[1], -1))  # [batch, heads, queries per head, head_dim]
        packed = self.cache.keys_as_read(layer)[:, : keys.shape[2]]
        exact = torch.einsum("bhgd,bhnd->bhgn", grouped, keys.float()) * self.scales[layer]
        missed = torch.einsum("bhgd,bnhd->bhgn", grouped, packed) * self.scales[layer] - exact
        weights = exact.masked_fill(~keep, float("-inf")).softmax(-1)
        missed = torch.where(keep, missed, 0.0)
        missed = missed - (weights * missed).sum(-1, keepdim=True)
        self.logit_error[layer] += (weights * missed.square()).sum(-1).double().mean().cpu()
        self.compared[layer] += 1

    @property
    def relative(self) -> list[float]:
        return (self.error / self.energy).tolist()


def attention_scales(model: Any) -> list[float]:
    """The softmax scale of every attention layer."""
    scales: dict[int, float] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if index is not None and hasattr(module, "scaling"):
            scales[index] = float(module.scaling)
    return [scales[i] for i in sorted(scales)]


class _Scores:
    """Sums over all scored tokens of one recipe."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []  # [segments of the batch, tokens] each
        self.nll = 0.0
        self.equal = 0
        self.tokens = 0
        self.seconds = 0.0
        self.bpe = 0.0
        self.attention: list[list[float]] = []
        self.logits: list[list[float]] = []

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """logits [segments, tokens, vocabulary]; reference: log-probabilities of the full cache."""
        found = torch.log_softmax(logits.float(), -1)
        self.kl.append((reference.exp() * (reference - found)).sum(-1).cpu())
        self.nll -= float(found.gather(-1, targets[..., None]).double().sum())
        self.equal += int((found.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += targets.numel()

    def result(self, name: str) -> Result:
        kl = torch.cat([part.flatten() for part in self.kl]).double()
        layers = torch.tensor(self.attention, dtype=torch.float64).mean(0)
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
            logits=torch.tensor(self.logits, dtype=torch.float64).mean(0).tolist() if self.logits else [],
        )


@torch.inference_mode()
def evaluate(
    model: Any,
    recipes: Sequence[Recipe],
    segments: Segments,
    chunk: int = 1,
    batch: int = 8,
    make_cache: Callable[[Recipe], Cache] | None = None,
    progress: Callable[[int, int], None] | None = None,
    stepwise: bool = False,
    offset: int = 0,
    profile: bool = False,
    together: int = AT_ONCE,
) -> list[Result]:
    """Scores recipes against the full cache on the same tokens. `progress` is called with (done, total) tokens.

    `offset` adds a constant to every position. RoPE is relative, so the full cache gives the same distributions; a recipe
    that was fitted to keys at other positions may not. `profile` also compares the logits of some queries, layer by layer.
    `together` recipes share one pass of the full cache.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")

    def feed(cache: Any, ids: Tensor, start: int, stop: int, **options: Any) -> Tensor:
        position = torch.arange(offset + start, offset + stop, device=ids.device).expand(len(ids), -1)
        return model(ids[:, start:stop], position_ids=position, past_key_values=cache, **options).logits

    make_cache = make_cache or (lambda recipe: Cache(model, recipe, first_position=offset))
    scores = [_Scores() for _ in recipes]
    total = segments.tokens * len(recipes)
    done = 0
    scales = attention_scales(model)
    compare_every = 16 if chunk == 1 and stepwise else 1  # attention outputs are compared at every n-th step
    at_once = chunk == 1 and not stepwise
    chunk = BLOCK if at_once else chunk
    block = math.ceil(BLOCK / chunk) * chunk
    rounds = itertools.product(range(0, len(segments.ids), batch), range(0, len(recipes), together))
    for first, some in rounds:
        ids = segments.ids[first : first + batch].to(model.device)
        running: list[tuple[Cache, AttentionError, _Scores]] = []
        for recipe, score in zip(recipes[some : some + together], scores[some : some + together], strict=True):
            cache = make_cache(recipe)
            meter = AttentionError(cache, scales, profile)
            begin = time.perf_counter()
            feed(cache, ids, 0, segments.prompt, logits_to_keep=1)
            score.seconds += time.perf_counter() - begin - meter.seconds
            cache.as_decoded = at_once
            running.append((cache, meter, score))
        reference = DynamicCache(config=model.config)
        feed(reference, ids, 0, segments.prompt, logits_to_keep=1)
        for start in range(segments.prompt, ids.shape[1] - 1, block):
            stop = min(start + block, ids.shape[1] - 1)
            expected = feed(reference, ids, start, stop).float().log_softmax(-1)
            for cache, meter, score in running:
                for at in range(start, stop, chunk):
                    until = min(at + chunk, stop)
                    meter.measuring = (at - segments.prompt) // chunk % compare_every == 0
                    begin, metered = time.perf_counter(), meter.seconds
                    logits = feed(cache, ids, at, until)
                    score.seconds += time.perf_counter() - begin - (meter.seconds - metered)
                    score.add(logits, expected[:, at - start : until - start], ids[:, at + 1 : until + 1])
                    done += (until - at) * len(ids)
                    if progress is not None:
                        progress(done, total)
        for cache, meter, score in running:
            score.bpe = cache.layout.bits_per_element(ids.shape[1] - 1)
            score.attention.append(meter.relative)
            if profile:
                score.logits.append((meter.logit_error / meter.compared).tolist())
    return [score.result(recipe.name) for recipe, score in zip(recipes, scores, strict=True)]
