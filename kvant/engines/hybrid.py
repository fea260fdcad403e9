"""A cache for hybrid models in transformers: layers with attention have packed pages, the others have transformers' own states.

Layers that are not attention (Mamba, gated delta nets, short convolutions) remember a state of fixed size that every token changes.
They are transformers' `LinearAttentionLayer`; kvant stores nothing for them. A state cannot be taken back, so what needs that is
refused: shared prefixes, cropping behind recurrent states, steps of fixed graphs, and going on after a forward pass that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvant.engines.hf import Cache
from kvant.rope import Rope, ropes_of
from kvant.shape import ModelShape, conv_states

Tensor = torch.Tensor


class AttentionCache(Cache):
    """The packed layers of a hybrid model, counted without the others."""

    def __init__(self, model_or_config: Any, recipe: Any, **options: Any) -> None:
        self.broken = False  # something broke off, and states of other layers are ahead or behind
        # number of the forward pass that changed a state last, by kind ("conv", "recurrent"), layer and number of the state
        self.changed: dict[tuple[str, int, int], int] = {}
        self.first_pass = 0  # forward passes before the last `reset`
        if options.get("share"):
            raise ValueError("share is not served for hybrid models: states of linear layers cannot be taken back")
        super().__init__(model_or_config, recipe, **options)

    def _shape_of(self, model_or_config: Any) -> ModelShape:
        return ModelShape.of(model_or_config, hybrid=True).packed

    def _numbers_of(self, model_or_config: Any) -> tuple[list[int], int]:
        shape = ModelShape.of(model_or_config, hybrid=True)
        return list(shape.attention), len(shape.layers)

    def _ropes_of(self, model: Any) -> list[Rope]:
        shape = ModelShape.of(model, hybrid=True)
        ropes = ropes_of(model, len(shape.layers))
        return [ropes[i] for i in shape.attention]

    def abort(self) -> None:
        ahead = any(number > self.state.passes for number in self.changed.values())
        self.broken = self.broken or ahead or self.state.batch_size != -1
        super().abort()

    def advance(self, kind: str, layer: int, number: int) -> None:
        """A forward pass is about to change a state of another layer: once. A second time, or none in the pass before, means that a
        pass broke off, and has left the state ahead of the pages, or behind. A pass is counted when the last layer with attention has
        had its turn."""
        now = self.state.passes + (layer < self._numbers[-1])
        self.broken = self.broken or self.changed.get((kind, layer, number), self.first_pass) != now - 1
        self.check()
        self.changed[kind, layer, number] = now

    def check(self) -> None:
        if self.broken:
            raise RuntimeError(
                "a forward pass through this cache failed, and states of layers without attention cannot be taken back: reset() it"
            )

    def all_layers(self, ours: Callable[[], None], others: Callable[[], None]) -> None:
        """Changes the layers with attention, which may refuse, then the others. Where this breaks off, they do not agree."""
        self.check()
        self.broken = True
        try:
            ours()
        except Exception:
            self.broken = False  # nothing has changed
            raise
        others()
        self.broken = False


class HybridCache(transformers.Cache):
    """A cache for `model.generate(..., past_key_values=kvant.HybridCache(model, recipe))` where some of the model's layers are not
    attention. Recipe and options are those of `kvant.Cache`; `packed` is the cache of the layers with attention.

    An artifact has tensors for the layers with attention, by the model's own numbers of layers: `kvant calibrate` and
    `kvant.artifact_for` fit one."""

    def __init__(self, model_or_config: Any, recipe: Any = None, **options: Any) -> None:
        config = getattr(model_or_config, "config", model_or_config)
        shape = ModelShape.of(model_or_config, hybrid=True)
        self.packed = AttentionCache(model_or_config, recipe, **options)
        self.place = {layer: place for place, layer in enumerate(shape.attention)}
        self._conv_states = conv_states(config)
        super().__init__(
            layers=[
                self.packed.layers[self.place[i]] if i in self.place else self._other()
                for i in range(len(shape.layers))
            ]
        )

    def _other(self) -> LinearAttentionLayer:
        """A layer that is not attention."""
        return LinearAttentionLayer(number_of_states=self._conv_states)

    def __repr__(self) -> str:
        return f"HybridCache({self.packed!r}, other layers={len(self.layers) - len(self.place)})"

    @property
    def nbytes(self) -> int:
        """Bytes that torch allocated for pages and full-precision windows, without the states of other layers."""
        return self.packed.nbytes

    @property
    def is_sliding(self) -> list[bool]:
        return [bool(getattr(layer, "is_sliding", False)) for layer in self.layers]

    @property
    def batch_size(self) -> int:
        return self.packed.batch_size

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.packed.check()
        return self.packed.update(key_states, value_states, self.place[layer_idx], *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self.packed.advance("conv", layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self.packed.advance("recurrent", layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    @property
    def _others(self) -> list[LinearAttentionLayer]:
        return [layer for layer in self.layers if not isinstance(layer, CacheLayerMixin)]

    def crop(self, tokens_to_remove: int) -> None:
        if not all(layer.is_croppable for layer in self._others):
            raise ValueError(
                "cannot crop the cache of a hybrid model: its layers' recurrent states cannot be taken back"
            )

        def crop() -> None:
            for layer in self._others:
                layer.crop(tokens_to_remove)

        self.packed.all_layers(lambda: self.packed.crop(tokens_to_remove), crop)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        def reorder() -> None:
            for layer in self._others:
                layer.reorder_cache(beam_idx)

        self.packed.all_layers(lambda: self.packed.reorder_cache(beam_idx), reorder)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(0, self.batch_size)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(max(0, self.batch_size))[indices.cpu()])

    def reset(self) -> None:
        self.packed.broken = True  # until the end
        # transformers' own reset keeps the states' tensors, which have the batch size of before
        for i in range(len(self.layers)):
            if i not in self.place:
                self.layers[i] = self._other()
        self.packed.reset()
        self.packed.changed.clear()
        self.packed.first_pass = self.packed.state.passes
        self.packed.broken = False


def cache_for(model_or_config: Any, recipe: Any = None, **options: Any) -> Cache | HybridCache:
    """The cache of a model, hybrid or not."""
    hybrid = ModelShape.of(model_or_config, hybrid=True).hybrid
    return HybridCache(model_or_config, recipe, **options) if hybrid else Cache(model_or_config, recipe, **options)


def packed_of(cache: Cache | HybridCache) -> Cache:
    """The packed layers of a cache."""
    return cache.packed if isinstance(cache, HybridCache) else cache
