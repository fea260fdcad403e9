"""How much the model's output changes when one stream of one layer is coded: KL(full || coded) of the next token, in nats.

To second order KL = 1/2 E[(sum_s g_s . e_s)^2], with e_s the error of a layer's attention output at token s and g_s the gradient
of sum_t log p(y_t) by that output, for successors y_t drawn from the model's own distributions p. One backward pass gives g of all
layers and tokens; an error costs one attention of one layer. Errors of different tokens are taken as uncorrelated, so the square
of the sum is the sum of the squares; those of different layers and streams too, so that their KLs add. `kvant tune` measures what
it has chosen through the packed cache, and prints both.

Errors are those of decode: codes are written to pages by the cache's own append and read back; tokens in the windows count as
exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvant.cache import PagedCache
from kvant.calibrate.exact_attention import causal, exact_attention, softmax_with_sink_logits
from kvant.eval.profile import packed_form
from kvant.layout import Layout, StreamName
from kvant.progress import Progress
from kvant.recipe import Recipe, Stream, Window
from kvant.rope import Rope, ropes_of
from kvant.shape import ModelShape

Tensor = torch.Tensor
ATTENTION = "kvant_taps"  # name of the attention function in transformers
DRAWS = 1  # of successors for each token, a backward pass each; another excerpt says more than another draw
QUERIES = 96  # tokens of an excerpt whose outputs are compared
PROMPT = 1, 4  # share of an excerpt's tokens before the first of them


@dataclasses.dataclass(frozen=True)
class Choice:
    """A stream that a layer may have, and the recipe that it comes from."""

    stream: StreamName
    recipe: Recipe

    @property
    def spec(self) -> Stream:
        return self.recipe.streams[self.stream]


@dataclasses.dataclass
class Taken:
    """What attention of one layer had and gave for an excerpt of n tokens."""

    query: Tensor  # [1, query heads, n, head_dim]
    key: Tensor  # [1, heads, n, head_dim], after RoPE
    value: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None  # [query heads], of the model's own attention sinks
    tap: Tensor  # zeros [1, n, query heads, head_dim], added to the output


class Taps:
    """Records attention of all layers, and adds a tap to each output, by which the output's gradient can be taken."""

    current: Taps | None = None

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.taken: dict[int, Taken] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        window = self.shape.layers[layer]
        if mask is not None and not bool((mask == causal(query.shape[2], window, query.device)).all()):
            raise ValueError("cannot tune this model: its attention mask is not causal")
        out = exact_attention(query, key, value, scale, window, softcap, sink_logits).transpose(1, 2)
        tap = torch.zeros_like(out).requires_grad_()
        q, k, v = (x.detach() for x in (query, key, value))
        self.taken[layer] = Taken(q, k, v, scale, softcap, None if sink_logits is None else sink_logits.detach(), tap)
        return out + tap


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function of a model whose layers are tapped."""
    taps, layer = Taps.current, getattr(module, "layer_idx", None)
    assert taps is not None and isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return taps.attend(layer, query, key, value, attention_mask, scale, softcap, s_aux), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextlib.contextmanager
def tapped(model: Any) -> Iterator[Taps]:
    """Taps a model's attention; restores its attention, mode and parameters' gradients afterwards."""
    configs = list({id(part): part for part in (model.config, model.config.get_text_config(decoder=True))}.values())
    before, training = [config._attn_implementation for config in configs], model.training
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    taps = Taps.current = Taps(ModelShape.of(model))
    try:
        for config in configs:
            config._attn_implementation = ATTENTION
        for parameter in wanted:
            parameter.requires_grad_(False)
        model.eval()
        with torch.enable_grad():
            yield taps
    finally:
        Taps.current = None
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)


def gradients(model: Any, taps: Taps, ids: Tensor, draws: int, generator: torch.Generator) -> Iterator[list[Tensor]]:
    """For every draw of successors, the gradients of their log-likelihood by the attention output of every layer:
    [n, query heads, head_dim] each. ids is [n]."""
    taps.taken.clear()
    device = model.get_input_embeddings().weight.device
    logits = model(ids.to(device=device, dtype=torch.int64)[None], use_cache=False).logits[0].float()
    inputs = [taps.taken[layer].tap for layer in sorted(taps.taken)]
    if len(inputs) != len(taps.shape.layers):
        raise ValueError(f"{len(inputs)} of the model's {len(taps.shape.layers)} layers attend in a forward pass")
    log_p = logits.log_softmax(-1)
    p = log_p.detach().exp().cpu()
    for draw in range(draws):
        successors = torch.multinomial(p, 1, generator=generator).to(log_p.device)
        total = log_p.gather(-1, successors).sum()
        found = torch.autograd.grad(total, inputs, retain_graph=draw < draws - 1)
        yield [each[0] for each in found]


@dataclasses.dataclass(frozen=True)
class Table:
    """KL of every choice in every layer: nats of a scored token, by (window, layer, choice)."""

    kl: dict[tuple[Window, int, Choice], float]
    tokens: int  # outputs that were compared


class Sensed:
    """Errors of the layers of every excerpt so far, which a checkpoint can hold."""

    def __init__(self, kept: dict[str, Tensor] | None = None) -> None:
        """`kept` is the content of a checkpoint, in the form of `tensors`."""
        self.errors: dict[tuple[int, int], Tensor] = {}  # by excerpt and layer: float64 [windows * choices]
        self.states: dict[int, Tensor] = {}  # of the random numbers, before each excerpt
        for key, tensor in (kept or {}).items():
            kind, *at = key.split(".")
            if kind == "state":
                self.states[int(at[0])] = tensor
            else:
                self.errors[int(at[0]), int(at[1])] = tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        if not self.errors:
            return {}
        errors = {f"errors.{excerpt}.{layer}": tensor for (excerpt, layer), tensor in self.errors.items()}
        return errors | {f"state.{excerpt}": tensor for excerpt, tensor in self.states.items()}

    def __str__(self) -> str:
        return f"{len(self.errors)} measured sensitivities"


def measure(
    model: Any,
    excerpts: Sequence[Tensor],
    choices: Sequence[Choice],
    tensors: Mapping[Recipe, Mapping[int, Mapping[str, Tensor]]],
    windows: Sequence[Window],
    *,
    draws: int = DRAWS,
    queries: int = QUERIES,
    seed: int = 0,
    progress: Progress | None = None,
    sensed: Sensed | None = None,
) -> Table:
    """The sensitivity of the model to every choice in every layer, for every window.

    excerpts  token ids [n] each, read from position 0; the first quarter is not compared, like a prompt.
    tensors   calibrated tensors of the choices' recipes by layer, as an artifact has them.
    sensed    holds what is measured; what it has of an earlier call with the same arguments is not measured again.
    """
    shape = ModelShape.of(model)
    layers = len(shape.layers)
    wants_rope = any(choice.spec.effective_rope_block for choice in choices)
    ropes: Sequence[Rope | None] = ropes_of(model, layers) if wants_rope else [None] * layers
    generator = torch.Generator().manual_seed(seed)
    sensed = sensed or Sensed()
    asked = [(window, choice) for window in windows for choice in choices]
    total: dict[tuple[Window, int, Choice], float] = {}
    compared = 0
    for index, ids in enumerate(excerpts):
        if index in sensed.states:
            generator.set_state(sensed.states[index])
        first = max(1, len(ids) * PROMPT[0] // PROMPT[1])
        at = torch.arange(first, len(ids))
        if len(at) > queries:
            at = at[torch.randperm(len(at), generator=generator)[:queries].sort().values]
        missing = [layer for layer in range(layers) if (index, layer) not in sensed.errors]
        if missing:
            with tapped(model) as taps:
                rows: list[list[Tensor]] = [[] for _ in range(layers)]
                for draw in gradients(model, taps, ids, draws, generator):
                    for layer, gradient in enumerate(draw):
                        rows[layer].append(gradient[at.to(gradient.device)].float())
            sensed.states[index + 1] = generator.get_state()
        compared += len(at)
        with torch.inference_mode():
            for layer in missing:
                taken = taps.taken.pop(layer)
                own = {recipe: found.get(layer, {}) for recipe, found in tensors.items()}
                gradient = torch.stack(rows[layer])
                errors = _errors(taken, gradient, at, choices, own, windows, shape.layers[layer], ropes[layer])
                rows[layer] = []
                sensed.errors[index, layer] = torch.tensor([errors[each] for each in asked], dtype=torch.float64)
                if progress is not None:
                    progress("sensitivity", len(sensed.errors), layers * len(excerpts))
        for layer in range(layers):
            for (window, choice), value in zip(asked, sensed.errors[index, layer].tolist(), strict=True):
                total[window, layer, choice] = total.get((window, layer, choice), 0.0) + value
    return Table({key: value / compared for key, value in total.items()}, compared)


def _errors(
    taken: Taken,
    gradient: Tensor,
    at: Tensor,
    choices: Sequence[Choice],
    tensors: Mapping[Recipe, Mapping[str, Tensor]],
    windows: Sequence[Window],
    sliding_window: int | None,
    rope: Rope | None,
) -> dict[tuple[Window, Choice], float]:
    """1/2 sum over tokens of the mean over draws of (g . e)^2, for one layer and excerpt. gradient is [draws, tokens, query
    heads, head_dim], at [tokens] are their positions."""
    key, value = (x[0].transpose(0, 1).float() for x in (taken.key, taken.value))  # [n, heads, head_dim]
    n, heads = key.shape[:2]
    at = at.to(key.device)
    q = taken.query[0].transpose(0, 1)[at].float().unflatten(1, (heads, -1))  # [tokens, heads, group, head_dim]
    g = gradient.unflatten(2, (heads, -1))
    position = torch.arange(n, device=key.device)
    keep = position <= at[:, None]
    if sliding_window is not None:
        keep &= position > at[:, None] - sliding_window
    exact = _scores(q, key, taken)
    p = _softmax(exact, keep, taken)
    base = torch.einsum("hgqn,nhd->qhgd", p, value)
    packed = {w: (position >= w.sink) & (position < w.packed_end(at[:, None] + 1)) & keep for w in windows}
    out: dict[tuple[Window, Choice], float] = {}
    for recipe in dict.fromkeys(choice.recipe for choice in choices):
        for choice, coded in _coded(recipe, choices, taken, tensors[recipe], rope):
            scores = _scores(q, coded, taken) if choice.stream == "key" else None
            for window, mask in packed.items():
                if scores is None:  # O' - O = P (V' - V)
                    error = torch.einsum("hgqn,nhd->qhgd", p * mask, coded - value)
                else:
                    changed = _softmax(torch.where(mask, scores, exact), keep, taken)
                    error = torch.einsum("hgqn,nhd->qhgd", changed, value) - base
                dot = torch.einsum("xqhgd,qhgd->xq", g, error)
                out[window, choice] = 0.5 * float(dot.square().mean(0).sum())
    return out


def _scores(q: Tensor, keys: Tensor, taken: Taken) -> Tensor:
    """Logits before softcap: [heads, group, tokens, n]."""
    return torch.einsum("qhgd,nhd->hgqn", q, keys) * taken.scale


def _softmax(scores: Tensor, keep: Tensor, taken: Taken) -> Tensor:
    if taken.softcap is not None:
        scores = taken.softcap * torch.tanh(scores / taken.softcap)
    return softmax_with_sink_logits(scores.masked_fill(~keep, float("-inf")), taken.sink_logits)


def _coded(
    recipe: Recipe, choices: Sequence[Choice], taken: Taken, tensors: Mapping[str, Tensor], rope: Rope | None
) -> Iterator[tuple[Choice, Tensor]]:
    """The keys or values of an excerpt as pages of a recipe hold them, in the model's own basis, [n, heads, head_dim], for each
    choice that comes from that recipe. Pages are written by the operation that a cache would take here."""
    key, value = (x[0].transpose(0, 1).contiguous() for x in (taken.key, taken.value))
    dtype = str(key.dtype).removeprefix("torch.")
    layout = Layout.of(recipe, key.shape[1], key.shape[2], dtype=dtype, device=key.device)
    ropes = None if rope is None else [rope]
    cache = PagedCache(layout, 1, None, key.device, {0: tensors}, None, ropes, check=False)
    seq = cache.new()
    cache.append(0, key, value, cache.extend([seq], [len(key)]))
    for choice in choices:
        if choice.recipe == recipe:
            yield choice, packed_form(cache.stores[0], choice.stream, cache.batch([seq]))[: len(key)]
