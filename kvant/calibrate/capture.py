"""Gathers the statistics of a transformers model's queries, keys and values that fitters need.

An excerpt of the text goes through the model with a cache that stores nothing. Like `kvant.Cache` it gives the attention
function a handle, and the attention function, which is the one for packed pages, calls the handle's `attend`. So every
model that the engine serves can be measured, and nothing is patched. The statistics (sums, a sample, a few probes) have a
size that does not depend on the number of tokens. Where all layers together would take too much memory, the text is read
several times, some layers at a time. gatherer.py has the statistics of a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any, cast

import torch
import transformers
from transformers.cache_utils import LinearAttentionLayer

from kvant.calibrate.exact_attention import causal, exact_attention
from kvant.calibrate.gatherer import LayerGatherer, Plan, layer_bytes
from kvant.engines.attention import Handle
from kvant.engines.layers import PackedLayer
from kvant.engines.lending import borrow
from kvant.progress import Progress
from kvant.rope import Rope, ropes_of
from kvant.shape import ModelShape, conv_states
from kvant.stats import LayerStats

Tensor = torch.Tensor

BUDGET = 384 << 20  # bytes that statistics may take at a time


class _Enough(Exception):
    """Raised after the last layer of a pass, to skip the rest of the model."""


class Capture(transformers.Cache):
    """A cache that stores nothing: it computes exact attention and gives q, k, v and o to the layers' gatherers. Layers of a hybrid
    model that are not attention have transformers' own states."""

    fixed_steps = None  # it has no decoder: its layers count their columns

    def __init__(self, shape: ModelShape, gatherers: dict[int, Any], excerpt: int = 0, states: int = 1) -> None:
        self.shape, self.gatherers, self.excerpt = shape, gatherers, excerpt
        attention = set(shape.attention_layers)
        super().__init__(
            layers=[
                PackedLayer(self, i, window) if i in attention else LinearAttentionLayer(number_of_states=states)
                for i, window in enumerate(shape.layers)
            ]
        )

    @property
    def batch_size(self) -> int:
        return 1

    def abort(self) -> None:
        """Nothing is stored, so nothing is taken back."""

    def cut_gradients(self) -> None:
        """Gradients are not wanted: `attending` turns them off."""

    def attend(
        self,
        handle: Handle,
        query: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        layer = handle.layer
        window = self.shape.layers[layer]
        q, k, v = query, handle.key, handle.value
        if mask is not None and not bool((mask == causal(q.shape[2], window, q.device)).all()):
            raise ValueError("cannot calibrate this model: its attention mask is not causal")
        out = exact_attention(q, k, v, scale, window, softcap, sink_logits)  # [1, query heads, tokens, head_dim]
        gatherer = self.gatherers.get(layer)
        if gatherer is not None:
            groups = q.shape[1] // k.shape[1]
            gatherer.scale, gatherer.softcap, gatherer.sink_logits = scale, softcap, sink_logits
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


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Makes a model call the `attend` of the cache that it is given; restores attention and training mode afterwards."""
    give_back = borrow(model.config)
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        give_back()
        model.train(training)


def _forward(
    model: Any, shape: ModelShape, gatherers: dict[int, Any], ids: Tensor, excerpt: int = 0, **options: Any
) -> None:
    """Runs one excerpt through the model's layers; no logits are computed."""
    capture = Capture(shape, gatherers, excerpt, conv_states(model.config))
    device = model.get_input_embeddings().weight.device
    ids = ids.to(device=device, dtype=torch.int64)[None]
    with contextlib.suppress(_Enough):
        model.base_model(input_ids=ids, past_key_values=capture, use_cache=True, **options)


class _Keys:
    """A gatherer that keeps the keys of an excerpt, after RoPE."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.scale, self.softcap = 0.0, cast("float | None", None)

    def add(self, excerpt: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        self.keys = k


def keys_of(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """The keys after RoPE of every layer with attention, by its number: [tokens, heads, head_dim] each. ids is [tokens]."""
    shape = ModelShape.of(model, hybrid=True)
    kept = {layer: _Keys() for layer in shape.attention_layers}
    with attending(model):
        _forward(model, shape, kept, ids)
    return {layer: cast(Tensor, found.keys) for layer, found in kept.items()}


def checked_ropes(model: Any, shape: ModelShape, ids: Tensor) -> list[Rope]:
    """The rotary embedding of every layer, verified on the model: the keys of some tokens, rotated by 37 positions, must be
    the keys that the model computes 37 positions later."""
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
            kept = {layer: _Keys() for layer in shape.attention_layers}
            at = torch.arange(first, first + len(ids), device=model.get_input_embeddings().weight.device)[None]
            _forward(model, shape, kept, ids, position_ids=at)
            seen.append([cast(Tensor, kept[layer].keys) for layer in kept])
    for layer, near, far in zip(shape.attention_layers, *seen, strict=True):
        rope = ropes[layer]
        missed = float((rope.rotate(near.float(), shift) - far.float()).norm() / far.float().norm())
        if not missed < (1e-3 if near.dtype == torch.float32 else 0.1):
            raise ValueError(
                f"cannot rotate keys of {name} to other positions: the rotary embedding of layer {layer} is of a kind "
                f"that kvant does not know (relative error {missed:.1e}); {remedy}"
            )
    return ropes


class Measured:
    """The statistics of the layers of a pass, which a checkpoint can hold."""

    def __init__(self, excerpts: Sequence[Tensor], kept: dict[str, Tensor] | None = None) -> None:
        """`kept` is the content of a checkpoint, in the form of `tensors`."""
        self.sizes = [len(ids) for ids in excerpts]
        self.gatherers: dict[int, LayerGatherer] = {}
        self.kept: dict[int, dict[str, Tensor]] = {}
        for key, tensor in (kept or {}).items():
            layer, _, name = key.partition(".")
            self.kept.setdefault(int(layer), {})[name] = tensor

    def tokens(self) -> int:
        """Tokens that all layers of the pass have read."""
        return sum(self.sizes[: min((each.read for each in self.gatherers.values()), default=0)])

    @property
    def tensors(self) -> dict[str, Tensor]:
        if not self.tokens():
            return {}
        return {
            f"{layer}.{name}": tensor for layer, each in self.gatherers.items() for name, tensor in each.state.items()
        }

    def __str__(self) -> str:
        return f"{self.tokens():,} of {sum(self.sizes):,} measured tokens"


def gather(
    model: Any,
    excerpts: Sequence[Tensor],
    plan: Plan,
    progress: Progress | None = None,
    budget: int = BUDGET,
    skip: Container[int] = (),
    measured: Measured | None = None,
) -> Iterator[tuple[int, LayerStats]]:
    """Yields (layer, statistics) for every layer with attention that is not in `skip`. Each pass over the text gathers as many
    layers as the budget allows. An excerpt is a tensor of token ids. `measured` holds the pass that is under way; what it has
    kept of an earlier call is not measured again."""
    shape = ModelShape.of(model, hybrid=True)
    config = model.config.get_text_config(decoder=True)
    groups = config.num_attention_heads // shape.heads
    rotates = bool(plan.block) or any(plan.max_position > len(ids) for ids in excerpts)
    ropes: Sequence[Rope | None] = checked_ropes(model, shape, excerpts[0]) if rotates else [None] * len(shape.layers)
    devices = _layer_devices(model, len(shape.layers))
    at_once = max(1, budget // layer_bytes(shape, plan, groups))
    measured = measured or Measured(excerpts)
    layers = [layer for layer in shape.attention_layers if layer not in skip]
    begun = [layer for layer in layers if layer in measured.kept]  # layers of one pass, which was interrupted
    others = [layer for layer in layers if layer not in measured.kept]
    passes = [begun] * bool(begun) + [others[first : first + at_once] for first in range(0, len(others), at_once)]
    total, done = sum(map(len, excerpts)) * len(passes), 0
    for chosen in passes:
        gatherers = {i: LayerGatherer(i, shape, plan, ropes[i], devices[i]) for i in chosen}
        for layer in chosen:
            if layer in measured.kept:
                gatherers[layer].restore(measured.kept.pop(layer))
        measured.gatherers = gatherers
        done += measured.tokens()
        with attending(model):
            for index in range(min(each.read for each in gatherers.values()), len(excerpts)):
                _forward(model, shape, gatherers, excerpts[index], index)
                done += len(excerpts[index])
                if progress is not None:
                    progress("measuring", done, total)
        for layer in chosen:
            yield layer, gatherers[layer].finish()
            del gatherers[layer]


def _layer_devices(model: Any, layers: int) -> list[torch.device]:
    """The device of every layer's keys."""
    found: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        weight = next(module.parameters(), None)
        if isinstance(index, int) and weight is not None:
            found.setdefault(index, weight.device)
    home = model.get_input_embeddings().weight.device
    return [found.get(layer, home) for layer in range(layers)]
