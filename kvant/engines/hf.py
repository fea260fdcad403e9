"""The transformers engine: `kvant.Cache`, whose layers write packed pages.

`update` returns no keys and values but a handle to the new ones; the attention function "kvant" (attention.py) asks the cache
behind it to attend, which reads the pages. Nothing of transformers is patched. `kvant.Cache(model, recipe)` switches the model's
attention implementation to "kvant", which serves any other cache through torch's SDPA as before, and switches it back when no
cache of that model is left.

Padding is dropped: pages hold a sequence's tokens only, whatever their columns in the batch (batch_state.py).
"""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import transformers

from kvant import recipes
from kvant.artifact import Artifact
from kvant.cache import PagedCache, PrefixCache
from kvant.engines import fold
from kvant.engines.attention import Handle, flatten, unflatten
from kvant.engines.batch_state import BatchState, Group, Step
from kvant.engines.fingerprint import fingerprint
from kvant.engines.graphs import Decoder
from kvant.engines.layers import PackedLayer
from kvant.engines.lending import borrow
from kvant.engines.ownership import Ownership
from kvant.engines.serving import Serving
from kvant.layout import Layout, Order
from kvant.layouts import Layouts
from kvant.ops import Implementation, choose
from kvant.ops.reference import restored
from kvant.ops.registry import Op
from kvant.ops.types import LayerStore, PagedBatch
from kvant.recipe import Recipe
from kvant.rope import Rope, ropes_of
from kvant.shape import ModelShape

Tensor = torch.Tensor


class Cache(Serving, transformers.Cache):
    """A packed, paged cache for `model.generate(..., past_key_values=kvant.Cache(model, recipe))`.

    model_or_config  a transformers model, or its config; its attention implementation is "kvant" as long as a cache of it
                     lives, then again what it was before. One that you set in the meantime stays.
    recipe           a name such as "saw-int4" or "int2:sink=64,recent=256", or a Recipe; without it, the artifact's recipe,
                     or kivi-k4v4 where there is no artifact either: it needs no fit, and survives keys with a
                     large mean. `kvant check` says which recipes with fewer bits fit the model.
    artifact         what `kvant calibrate` wrote for a recipe that is fitted offline, or `kvant tune` for a recipe of its own for
                     every layer: its directory, or an Artifact.
    max_tokens       tokens that the cache holds, allocated at once; more raises PoolFull. Over all sequences, or of each where
                     max_sequences is given too. Without it the cache grows as needed.
    max_sequences    sequences that the cache holds; their windows are allocated at once. What `kvant plan` counts.
    share            keep the pages of finished sequences, and find them again by their tokens: see `generate` and `start`.
    first_position   position of a sequence's first token, for who calls the model with position_ids that do not begin at 0.
    page_tokens, order, implementation  as in Layout.of and ops.choose.
    check_finite     refuse keys and values that are NaN or infinite, naming layer and token; on a GPU this waits for them.
    as_decoded       True: every token of a forward pass attends to what decode would have read at its position. For
                     perplexity and loglikelihood: without it the new tokens of a pass see each other unpacked, as in any
                     prefill, and a text that is read in one pass scores every recipe as (nearly) lossless.

    A cache belongs to one thread: the one whose sequences it holds. Others are refused until that thread has left
    `cache.generate`, called `finish` or `reset`, or ended. Gradients do not flow through packed pages: call the model under
    torch.no_grad().

    >>> import kvant
    >>> from kvant.models import tiny
    >>> model, tokenizer = tiny()
    >>> cache = kvant.Cache(model, "saw-int4", max_tokens=256)
    >>> inputs = tokenizer("Once upon a time", return_tensors="pt")
    >>> _ = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    >>> cache
    Cache(recipe='saw-int4', layers=2, tokens=23, nbytes=...)

    A chat that goes on reads only what is new, and with `share=True` other requests find its pages by their tokens:

    >>> cache = kvant.Cache(model, "saw-int4", share=True)
    >>> first = cache.generate(model, inputs["input_ids"], max_new_tokens=8, do_sample=False)
    >>> _ = cache.generate(model, first, max_new_tokens=8, do_sample=False)
    >>> cache.reused  # tokens that were not computed again
    23
    """

    def __init__(
        self,
        model_or_config: Any,
        recipe: str | Recipe | None = None,
        *,
        artifact: Artifact | str | os.PathLike[str] | None = None,
        max_tokens: int | None = None,
        first_position: int = 0,
        page_tokens: int | None = None,
        order: Order | None = None,
        implementation: str | None = None,
        check_finite: bool = True,
        share: bool = False,
        max_sequences: int | None = None,
        as_decoded: bool = False,
    ) -> None:
        self.artifact = artifact if artifact is None or isinstance(artifact, Artifact) else Artifact.load(artifact)
        if recipe is None:
            head_dim = self._shape_of(model_or_config).head_dim
            recipe = recipes.plain(head_dim) if self.artifact is None else self.artifact.recipe
        self.recipe = self.asked = recipes.get(recipe)
        self.shape = self._shape_of(model_or_config)
        self._numbers, self._layer_count = self._numbers_of(model_or_config)
        self._layout_options: dict[str, Any] = {"page_tokens": page_tokens, "order": order}
        self._implementation = implementation
        self.check_finite = check_finite
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {max_tokens}")
        if max_sequences is not None and (max_sequences < 1 or max_tokens is None):
            raise ValueError(f"max_sequences must be positive and come with max_tokens, got {max_sequences}")
        if share and self.recipe.not_prefix_safe is not None:
            raise ValueError(
                f"recipe {self.recipe.name} cannot share pages between requests: {self.recipe.not_prefix_safe}"
            )
        self.max_tokens, self.max_sequences, self.share = max_tokens, max_sequences, share
        self.first_position = first_position
        named = fingerprint(model_or_config) if isinstance(model_or_config, torch.nn.Module) else None
        self.fingerprint = named  # None where only a config is known
        if self.artifact is not None:
            self.artifact.check(self.recipe, self._layer_count, self.shape.heads, self.shape.head_dim, named)
        elif self.recipe.calibrated:
            raise ValueError(
                f"recipe {self.recipe.name} is fitted offline: it needs an artifact made by kvant calibrate, or by "
                "kvant.artifact_for(model, tokenizer, recipe)"
            )
        self.recipe = fold.served(self.recipe, self.artifact, getattr(model_or_config, "config", model_or_config))
        self._ropes: list[Rope] | None = None
        if self.recipe.wants_rope:
            if not isinstance(model_or_config, torch.nn.Module):
                raise ValueError(
                    f"recipe {self.recipe.name} stores keys unrotated: it needs the model itself, whose rotary "
                    f"embedding it reads, got a {type(model_or_config).__name__}"
                )
            ropes = self._ropes_of(model_or_config)
            self._ropes = [dataclasses.replace(rope, first=first_position) for rope in ropes]
        device = next(iter(model_or_config.parameters())).device if named is not None else torch.device("cpu")
        self.layouts = self._make_layouts(self.shape.dtype, device)
        self.ownership = Ownership()
        self.as_decoded = as_decoded
        self._warned_of_gradients = False
        self.on_attend: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None
        super().__init__(layers=[PackedLayer(self, i, window) for i, window in enumerate(self.shape.layers)])
        self.state = BatchState(self.layers)
        give_back = borrow(getattr(model_or_config, "config", model_or_config))
        weakref.finalize(self, give_back).atexit = False

    def _shape_of(self, model_or_config: Any) -> ModelShape:
        """The shape of the layers that this cache stores."""
        return ModelShape.of(model_or_config)

    def _numbers_of(self, model_or_config: Any) -> tuple[list[int], int]:
        """The model's numbers of the layers that this cache stores, and how many layers the model has."""
        return list(range(len(self.shape.layers))), len(self.shape.layers)

    def _ropes_of(self, model: Any) -> list[Rope]:
        """The rotary embeddings of the layers that this cache stores."""
        return ropes_of(model, len(self.shape.layers))

    def _make_layouts(self, dtype: str, device: torch.device) -> Layouts:
        layers, heads, head_dim = len(self.shape.layers), self.shape.heads, self.shape.head_dim
        return Layouts.of(self.recipe, layers, heads, head_dim, dtype=dtype, device=device, **self._layout_options)

    @property
    def layout(self) -> Layout:
        """The layout of all layers; refuses where layers have different recipes, see `layouts`."""
        return self.layouts.only

    def __repr__(self) -> str:
        return f"Cache(recipe={self.recipe.name!r}, layers={len(self.layers)}, tokens={self.get_seq_length()}, nbytes={self.nbytes})"

    # --- sizes -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that torch allocated for pages and full-precision windows."""
        return sum(group.paged.nbytes for group in self.groups)

    @property
    def nbytes_used(self) -> int:
        """The part of `nbytes` that sequences use."""
        return sum(group.paged.nbytes_used for group in self.groups)

    @property
    def predicted_nbytes(self) -> int:
        """What the layout predicts for `nbytes`."""
        return sum(group.paged.predicted_nbytes for group in self.groups)

    @property
    def digest(self) -> str:
        """Names what the stored bytes mean."""
        model = self.fingerprint or ""
        if self.first_position:  # keys that are stored unrotated depend on it
            model += f"@{self.first_position}"
        return self.layouts.digest("" if self.artifact is None else self.artifact.digest, model)

    @property
    def groups(self) -> list[Group]:
        """Layers with the same sliding window, their storage and sequences; empty until the first keys have come."""
        return self.state.groups

    @property
    def batch_size(self) -> int:
        return self.state.batch_size

    @property
    def fixed_steps(self) -> int | None:
        """Steps of the decoder that has the batch; None where none has it."""
        return None if self.state.decoder is None else self.state.decoder.done

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.is_sliding for layer in self.layers]

    @property
    def one_by_one(self) -> bool:
        """The old name of `as_decoded`."""
        warnings.warn("Cache.one_by_one is now called Cache.as_decoded", DeprecationWarning, stacklevel=2)
        return self.as_decoded

    @one_by_one.setter
    def one_by_one(self, value: bool) -> None:
        warnings.warn("Cache.one_by_one is now called Cache.as_decoded", DeprecationWarning, stacklevel=2)
        self.as_decoded = value

    # --- attention -------------------------------------------------------------------------------------------------

    def attend(
        self,
        handle: Handle,
        query: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Stores a layer's new tokens and attends: query [batch, heads, columns, head_dim] -> [batch, columns, heads, head_dim]."""
        if self.state.decoder is not None:
            return self.state.decoder.attend(handle, query, mask, scale, softcap, sink_logits)
        try:
            out = self._attend(handle, query, mask, scale, softcap, sink_logits)
            if handle.layer == len(self.layers) - 1:
                self.state.commit()
        except BaseException:
            self.abort()
            raise
        return out

    def abort(self) -> None:
        """Takes back the forward pass under way. The steps of a decoder are its own to take back."""
        self.state.recover()
        if self.state.decoder is not None:
            return
        self.state.abort()
        if self.state.batch_size == -1:
            self.ownership.release()  # an empty cache belongs to no thread

    def cut_gradients(self) -> None:
        """Warns, once, that gradients end here."""
        if not self._warned_of_gradients:
            self._warned_of_gradients = True
            warnings.warn(
                "gradients do not flow through packed keys and values: attention from a kvant.Cache is detached; call the "
                "model under torch.no_grad()",
                UserWarning,
                stacklevel=2,
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        self.ownership.claim()
        if not key_states.numel():
            raise ValueError(
                f"the model was called with {key_states.shape[0]} sequences of {key_states.shape[-2]} new tokens: "
                "both must be at least 1"
            )
        if layer_idx == 0:
            self.state.recover()
            if self.state.unfinished:
                self.abort()
                raise RuntimeError(
                    "the last forward pass through this cache broke off between layers: it has been taken back; call again"
                )
        return self.layers[layer_idx].update(key_states, value_states)  # there is nothing to offload

    def _attend(
        self,
        handle: Handle,
        query: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        layer, key, value = handle.layer, handle.key, handle.value
        group, step, index = self._enter(layer, query, key, value, mask)
        columns = query.shape[2]
        assert step.columns == columns
        options: dict[str, Any] = {
            "scale": scale,
            "softcap": softcap,
            "sliding_window": group.sliding_window,
            "sink_logits": sink_logits,
        }
        if columns == 1 and step.padding_mask is None:  # a token of every sequence: as `_tokens_of`, by one view each
            q, k, v = query.squeeze(2), key.squeeze(2), value.squeeze(2)
            step.begun = index + 1  # as `writing`, with nothing to be saved
            group.paged.append(index, k, v, step.batch, q)
            step.written = index + 1
            out = group.paged.decode(index, q, step.batch, **options).unsqueeze(1)
        else:
            out = self._prefill(query, key, value, group, step, index, options)
        if self.on_attend is not None:
            self.on_attend(layer, query, key, value, out)
        return out

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: Group,
        step: Step,
        index: int,
        options: dict[str, Any],
    ) -> Tensor:
        """The part of `_attend` for several new columns, or padded ones."""
        q, k, v = (self._tokens_of(x, step) for x in (query, key, value))
        if self.as_decoded:
            self._begin_writing(group, step, index)
            flat = group.paged.replay(index, q, k, v, step.batch, **options)
        else:
            flat = group.paged.prefill(index, q, k, v, step.host_lengths, **options)
            self._begin_writing(group, step, index)
            group.paged.append(index, k, v, step.batch, q)
        self._written(group, step, index)
        if step.same is None:
            return unflatten(flat, step.padding_mask, query.shape[0], step.columns)
        out = unflatten(flat, step.padding_mask, len(step.batch.seq_lens), step.columns)
        first = sorted(set(step.same))
        return out[[first.index(source) for source in step.same]]

    def fill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        layers: Iterable[tuple[Tensor, Tensor]],
        *,
        salt: str = "",
    ) -> None:
        """Stores prompts that were prefilled elsewhere: by another process, or once for several caches. The cache then holds what
        its own prefill would have stored, and `generate` continues from it.

        input_ids, attention_mask  [batch, columns], padding to the left; None where no column is padding.
        layers                     keys and values of every layer as attention gets them (keys after RoPE), in the type of
                                   the model: [batch, heads, columns, head_dim] each.
        """
        if self.recipe.wants_queries:
            raise ValueError(
                f"recipe {self.recipe.name} needs the prompt's queries: let the model read the prompt itself"
            )
        padding_mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        with self.ownership.claimed():
            self.settle()
            if self.state.batch_size > 0:
                raise ValueError(f"the cache holds {self.state.batch_size} sequences: reset it first")
            count = 0
            try:
                for key, value in layers:
                    if count == len(self.layers) or key.shape[::2] != input_ids.shape or value.shape != key.shape:
                        raise ValueError(
                            f"expected keys and values of {len(self.layers)} layers, [batch, heads, columns, head_dim] for tokens "
                            f"of shape {list(input_ids.shape)}; got {list(key.shape)} and {list(value.shape)} for layer {count}"
                        )
                    self._store(count, key, value, padding_mask)
                    count += 1
                if count != len(self.layers):
                    raise ValueError(f"expected keys and values of {len(self.layers)} layers, got those of {count}")
            except BaseException:
                self.abort()
                raise
            self.state.commit()
            self._finish(input_ids, attention_mask, salt)
        self.ownership.release()

    def _store(self, layer: int, key: Tensor, value: Tensor, padding_mask: Tensor | None) -> None:
        """Appends a layer's keys and values without attending."""
        self.update(key, value, layer)
        group, step, index = self._enter(layer, key, key, value, padding_mask)
        k, v = (self._tokens_of(x, step) for x in (key, value))
        self._begin_writing(group, step, index)
        group.paged.append(index, k, v, step.batch)
        self._written(group, step, index)

    def _enter(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Group, Step, int]:
        """The forward pass under way, which its first layer begins: a layer's group, the pass in it, the layer's index in it."""
        state = self.state
        if not state.groups:
            self._initialize(key)
        if self.layers[layer].columns > state.columns_begun:  # the first layer of a forward pass
            state.begin(query, key, value, mask, self.layers[layer])
        else:
            state.separate_rows(query, key, value)
        group = state.group_of[layer]
        assert group.step is not None
        return group, group.step, state.index_of[layer]

    @staticmethod
    def _tokens_of(x: Tensor, step: Step) -> Tensor:
        """[batch, heads, columns, head_dim] -> [tokens, heads, head_dim]: without padding, and of equal rows the first alone."""
        return flatten(x if step.same is None else x[sorted(set(step.same))], step.padding_mask)

    @staticmethod
    def _begin_writing(group: Group, step: Step, index: int) -> None:
        """A layer's new tokens are about to be stored. If that breaks off, it is not known which of them are. One new token takes the
        place of one that is in a page (`Window.ring`); several may take places in the tail of a group, which is saved."""
        assert index == step.written
        groupwise = any(stream.groupwise for stream in group.paged.layout.recipe.streams.values())
        more = groupwise and step.columns > 1 and any(step.before)
        step.saved = group.paged.saved_rows(index, group.sequences) if more else None
        step.begun = index + 1

    @staticmethod
    def _written(group: Group, step: Step, index: int) -> None:
        """A layer's new tokens are stored: rows with the same text get a copy of the first one's overlay row."""
        for row, source in enumerate(step.same or ()):
            if source != row:
                group.paged.copy_row(index, group.sequences[source], group.sequences[row])
        step.written = index + 1

    def keys_as_read(self, layer: int) -> Tensor:
        """A layer's keys as attention now reads them, in the model's space: float32 [batch, tokens, heads, head_dim]."""
        store, batch = self.store_of(layer)
        return restored(store, "key", batch)

    def store_of(self, layer: int) -> tuple[LayerStore, PagedBatch]:
        """A layer's storage, and the sequences of the batch as they are in it."""
        group = self.state.group_of[layer]
        return group.paged.stores[group.layers.index(layer)], group.paged.batch(group.sequences)

    def implementation(self, op: Op, device: torch.device) -> str:
        """Name of the implementation of an operation on a device; names, where layers have different ones."""
        return ", ".join(dict.fromkeys(found.name for found in self.chosen(op, device)))

    def chosen(self, op: Op, device: torch.device) -> list[Implementation]:
        """The implementations of an operation that layers have, each once: those of the storage, or before there is any those that
        would be chosen."""
        if self.groups:
            found = [ops[op] for group in self.groups for ops in group.paged.ops_of]
        else:
            found = [choose(op, layout, device, self._implementation) for layout in self.layouts.distinct]
        return list({each.name: each for each in found}.values())

    # --- steps of a static batch -------------------------------------------------------------------------------------

    def decoder(self, model: Any, steps: int, *, graph: bool = True) -> Decoder:
        """Steps of the sequences at hand that a CUDA graph replays, for those who do not use `generate(graph=True)`."""
        return Decoder(model, self, steps, graph=graph)

    def settle(self) -> None:
        """Closes the decoder that has the cache, if one has, and takes back a forward pass that broke off between layers."""
        self.state.recover()
        if self.state.decoder is not None:
            self.state.decoder.close()
        if self.state.unfinished:
            self.ownership.claim()
            self.abort()

    def _initialize(self, key: Tensor) -> None:
        """Allocates on the device and in the type that the first keys come in."""
        heads, dim = key.shape[1], key.shape[3]
        if (heads, dim) != (self.shape.heads, self.shape.head_dim):
            raise ValueError(
                f"cannot serve this model: its config says {self.shape.heads} KV heads of {self.shape.head_dim}, "
                f"its keys have {heads} of {dim}"
            )
        self._allocate(str(key.dtype).removeprefix("torch."), key.device)

    def _allocate(self, dtype: str, device: torch.device) -> None:
        self.layouts = self._make_layouts(dtype, device)
        pages = None
        if self.max_tokens is not None:
            pages = max(1, self.layouts.first.pages_for(self.max_tokens)) * (self.max_sequences or 1)
        groups = []
        for window in dict.fromkeys(self.shape.layers):
            layers = [i for i, w in enumerate(self.shape.layers) if w == window]
            tensors = {} if self.artifact is None else self.artifact.tensors
            numbers = [self._numbers[layer] for layer in layers]
            own = {index: tensors[layer] for index, layer in enumerate(numbers) if layer in tensors}
            ropes = None if self._ropes is None else [self._ropes[layer] for layer in layers]
            paged = PagedCache(
                Layouts(tuple(self.layouts.layers[layer] for layer in layers)),
                len(layers),
                pages,
                device,
                own,
                self._implementation,
                ropes,
                max_sequences=self.max_sequences,
                digest=self.digest,
                check=self.check_finite,
                numbers=numbers,
            )
            if self.share:
                PrefixCache(paged, window)
            groups.append(Group(window, layers, paged))
        self.state.set_groups(groups)

    # --- what generate does with a cache ---------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last columns: -k removes k; a positive number is the length to keep, as transformers once had it."""
        with self.ownership.claimed(within=True):
            if self.state.decoder is not None and not tokens_to_remove:
                return  # a loop that reads its stopping criteria one step late asks this at every step
            self.settle()
            columns = self.get_seq_length()
            asked = int(tokens_to_remove)  # assisted generation may ask with a tensor
            remove = -asked if asked <= 0 else max(0, columns - asked)
            if remove > columns:
                raise ValueError(f"cannot remove {remove} of {columns} columns")
            if remove or any(
                group.sliding_window is not None for group in self.groups
            ):  # pages may have left their window
                self.state.crop(columns - remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select([int(i) for i in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(max(0, self.batch_size)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = torch.arange(max(0, self.batch_size))[indices.cpu()]  # indices or a mask
        self._select([int(i) for i in chosen])

    def _select(self, order: Sequence[int]) -> None:
        """The batch becomes the sequences at these indices; see BatchState.select."""
        with self.ownership.claimed(within=True):
            self.settle()
            if self.batch_size != -1:
                self.state.select(order)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "a kvant.Cache cannot be copied, since its pages are shared: share=True keeps prompts for later calls, save() and "
            "Cache.load() store and copy a cache"
        )

    def reset(self) -> None:
        """Forgets all sequences, and gives back their pages but those that are kept to be shared; memory stays
        allocated. Any thread may take the cache afterwards."""
        with self.ownership.claimed():
            self.state.forget()
            self.state.expect_no_crop()
        self.ownership.release()
