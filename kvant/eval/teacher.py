"""Teacher-forced evaluation: every recipe reads the same text, and is compared with the full cache token by token.

The text is cut into windows spread evenly over it. The first tokens of a window are prefilled and not scored; each later
one is fed through the recipe's packed cache, `chunk` tokens at a time, and its next-token distribution is compared with that
of transformers' own full cache on the same tokens. A chunk of 1 is decode; since the text is known, decode is computed for a
block of tokens at once (kvant.ops.replay), which gives what one-by-one gives; `stepwise` does it one by one for real. Windows
run side by side as one batch. The reference runs a block ahead and only a block's distributions are held, so memory does not
grow with the context.
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
from kvant.recipe import Recipe

Tensor = torch.Tensor
AT_ONCE = (
    3  # recipes that run side by side behind one reference; each holds its exact keys and values too, for the probe
)
BLOCK = 64  # tokens a window whose reference distributions are held at a time, at least


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows over a text: ids is int64 [windows, scored + prompt + 1]; the last column is only a target."""

    ids: Tensor
    prompt: int

    @property
    def scored(self) -> int:
        """Tokens a window whose prediction is scored."""
        return self.ids.shape[1] - 1 - self.prompt

    @property
    def tokens(self) -> int:
        return self.scored * len(self.ids)

    @staticmethod
    def over(ids: Sequence[int], context: int, tokens: int, prompt: int | None = None) -> Windows:
        """As many windows as it takes to score at least `tokens` tokens, spread evenly over the text."""
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
        return Windows(torch.tensor([list(ids[start : start + length]) for start in starts]), prompt)


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


class AttentionProbe:
    """Compares a cache's attention outputs with exact attention over the same queries, keys and values."""

    def __init__(self, cache: Cache, scales: list[float], profile: bool = False) -> None:
        self.cache, self.scales, self.profile = cache, scales, profile
        self.logit_error = torch.zeros(len(cache.shape.layers), dtype=torch.float64)
        self.probes = torch.zeros(len(cache.shape.layers), dtype=torch.float64)
        self.windows = cache.shape.layers
        self.keys: list[list[Tensor]] = [[] for _ in self.windows]
        self.values: list[list[Tensor]] = [[] for _ in self.windows]
        self.error = torch.zeros(len(self.windows), dtype=torch.float64)
        self.energy = torch.zeros(len(self.windows), dtype=torch.float64)
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
            window = self.windows[layer]
            if window is not None:
                keep &= at > at[-fresh:, None] - window
            exact = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=keep, scale=self.scales[layer], enable_gqa=True
            ).transpose(1, 2)
            self.error[layer] += (out - exact).double().square().sum().cpu()
            self.energy[layer] += exact.double().square().sum().cpu()
            if self.profile:
                self._probe_logits(layer, query[:, :, -1], keys, keep[-1])
        self.seconds += time.perf_counter() - begin

    def _probe_logits(self, layer: int, query: Tensor, keys: Tensor, keep: Tensor) -> None:
        """Squared error of the last query's logits, as its attention weighs them; what is the same for all does not count."""
        grouped = query.float().unflatten(1, (keys.shape[1], -1))  # [batch, heads, queries per head, head_dim]
        packed = self.cache.keys_as_read(layer)[:, : keys.shape[2]]
        exact = torch.einsum("bhgd,bhnd->bhgn", grouped, keys.float()) * self.scales[layer]
        missed = torch.einsum("bhgd,bnhd->bhgn", grouped, packed) * self.scales[layer] - exact
        weights = exact.masked_fill(~keep, float("-inf")).softmax(-1)
        missed = torch.where(keep, missed, 0.0)
        missed = missed - (weights * missed).sum(-1, keepdim=True)
        self.logit_error[layer] += (weights * missed.square()).sum(-1).double().mean().cpu()
        self.probes[layer] += 1

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
        self.kl: list[Tensor] = []  # [windows of the batch, tokens] each
        self.nll = 0.0
        self.equal = 0
        self.tokens = 0
        self.seconds = 0.0
        self.bpe = 0.0
        self.attention: list[list[float]] = []
        self.logits: list[list[float]] = []

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """logits [windows, tokens, vocabulary]; reference: log-probabilities of the full cache."""
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
    windows: Windows,
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

    `offset` moves every token by so many positions: RoPE is relative, so the full cache does not change, but a recipe that
    was fitted to keys at other positions does. `profile` also compares the logits of some queries, layer by layer. `together` recipes
    run side by side behind one reference.
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
    total = windows.tokens * len(recipes)
    done = 0
    scales = attention_scales(model)
    probe_every = 16 if chunk == 1 and stepwise else 1  # one step in so many also compares attention outputs
    at_once = chunk == 1 and not stepwise
    chunk = BLOCK if at_once else chunk
    block = math.ceil(BLOCK / chunk) * chunk
    turns = itertools.product(range(0, len(windows.ids), batch), range(0, len(recipes), together))
    for first, some in turns:
        ids = windows.ids[first : first + batch].to(model.device)
        runs: list[tuple[Cache, AttentionProbe, _Scores]] = []
        for recipe, score in zip(recipes[some : some + together], scores[some : some + together], strict=True):
            cache = make_cache(recipe)
            probe = AttentionProbe(cache, scales, profile)
            begin = time.perf_counter()
            feed(cache, ids, 0, windows.prompt, logits_to_keep=1)
            score.seconds += time.perf_counter() - begin - probe.seconds
            cache.as_decoded = at_once
            runs.append((cache, probe, score))
        reference = DynamicCache(config=model.config)
        feed(reference, ids, 0, windows.prompt, logits_to_keep=1)
        for start in range(windows.prompt, ids.shape[1] - 1, block):
            stop = min(start + block, ids.shape[1] - 1)
            expected = feed(reference, ids, start, stop).float().log_softmax(-1)
            for cache, probe, score in runs:
                for at in range(start, stop, chunk):
                    until = min(at + chunk, stop)
                    probe.measuring = (at - windows.prompt) // chunk % probe_every == 0
                    begin, probed = time.perf_counter(), probe.seconds
                    logits = feed(cache, ids, at, until)
                    score.seconds += time.perf_counter() - begin - (probe.seconds - probed)
                    score.add(logits, expected[:, at - start : until - start], ids[:, at + 1 : until + 1])
                    done += (until - at) * len(ids)
                    if progress is not None:
                        progress(done, total)
        for cache, probe, score in runs:
            score.bpe = cache.layout.bits_per_element(ids.shape[1] - 1)
            score.attention.append(probe.relative)
            if profile:
                score.logits.append((probe.logit_error / probe.probes).tolist())
    return [score.result(recipe.name) for recipe, score in zip(recipes, scores, strict=True)]
