"""The transformers engine: a Cache whose layers write packed pages, and an attention function that reads them.

`update` does not return dequantized tensors: it returns a handle that carries the new keys and values, and the attention
function registered as "kvant" finds the pages behind it. Nothing of transformers is patched; `kvant.Cache(model, recipe)`
switches the model's attention implementation to "kvant", which serves any other cache through torch's SDPA as before, and
switches it back when no cache of that model is left.

Padding is dropped: pages hold a sequence's real tokens only, whatever their columns in the batch.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvant import recipes
from kvant.artifact import Artifact
from kvant.cache import PagedCache, PrefixCache
from kvant.engines import fold
from kvant.engines.fingerprint import fingerprint
from kvant.engines.graphs import Decoder
from kvant.engines.layers import ATTENTION, Group, Handle, PackedLayer, Step, flatten, unflatten
from kvant.engines.lending import borrow
from kvant.engines.ownership import Ownership
from kvant.engines.serving import Serving
from kvant.layout import Layout, Order
from kvant.ops import choose
from kvant.ops.reference import restored
from kvant.ops.registry import Op
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
    artifact         what `kvant calibrate` wrote for a recipe that is fitted offline: its directory, or an Artifact.
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
            head_dim = ModelShape.of(model_or_config).head_dim
            recipe = recipes.plain(head_dim) if self.artifact is None else self.artifact.recipe
        self.recipe = self.asked = recipes.get(recipe)
        self.shape = ModelShape.of(model_or_config)
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
            self.artifact.check(self.recipe, len(self.shape.layers), self.shape.heads, self.shape.head_dim, named)
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
            ropes = ropes_of(model_or_config, len(self.shape.layers))
            self._ropes = [dataclasses.replace(rope, first=first_position) for rope in ropes]
        device = next(iter(model_or_config.parameters())).device if named is not None else torch.device("cpu")
        self.layout = self._make_layout(self.shape.dtype, device)
        self.groups: list[Group] = []
        self._group_of: list[Group] = []
        self._real: Tensor | None = None  # bool [batch, columns]; None while no column is padding
        self._ids: list[list[int]] | None = None  # tokens of the sequences, where they were told
        self._told: list[list[int]] | None = (
            None  # tokens that `start` was told, of which the sequences may yet get some
        )
        self._salt = ""  # of the tenant whose tokens they are
        self._batch_size = -1
        self._columns_begun = self._columns_before = 0  # they differ while a forward pass is under way
        self._made = False  # the forward pass under way has made the sequences
        self._owner = Ownership()
        self._decoder: Decoder | None = None  # whose the cache is until it is closed
        self.as_decoded = as_decoded
        self._said_gradients = False
        self.on_attend: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None
        super().__init__(layers=[PackedLayer(self, i, window) for i, window in enumerate(self.shape.layers)])
        give_back = borrow(getattr(model_or_config, "config", model_or_config))
        weakref.finalize(self, give_back).atexit = False

    def _make_layout(self, dtype: str, device: torch.device) -> Layout:
        shape = self.shape
        return Layout.of(self.recipe, shape.heads, shape.head_dim, dtype=dtype, device=device, **self._layout_options)

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
        return self.layout.digest("" if self.artifact is None else self.artifact.digest, model)

    @property
    def batch_size(self) -> int:
        return self._batch_size

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

    def attend(self, handle: Handle, query: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
        """Stores a layer's new tokens and attends: query [batch, heads, columns, head_dim] -> [batch, columns, heads, head_dim]."""
        if self._decoder is not None:
            return self._decoder.attend(handle, query, mask, scale, softcap)
        try:
            out = self._attend(handle, query, mask, scale, softcap)
        except BaseException:
            self._abort()
            raise
        if handle.layer == len(self.layers) - 1:
            self._commit()
        return out

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        self._owner.claim()
        if not key_states.shape[0] or not key_states.shape[-2]:
            raise ValueError(
                f"the model was called with {key_states.shape[0]} sequences of {key_states.shape[-2]} new tokens: "
                "both must be at least 1"
            )
        if layer_idx == 0 and self._unfinished:
            self._abort()
            raise RuntimeError(
                "the last forward pass through this cache broke off between layers: it has been taken back; call again"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def _unfinished(self) -> bool:
        """Whether a forward pass has begun and not ended."""
        columns = self._columns_before
        return self._columns_begun != columns or any(layer.columns != columns for layer in self.layers)

    def _commit(self) -> None:
        """A forward pass has reached all layers."""
        self._columns_before, self._made = self._columns_begun, False
        for group in self.groups:
            group.step = None
            self._slide(group)  # not before: a pass that is taken back needs the pages that its window would leave

    def _abort(self) -> None:
        """Takes back a forward pass that failed: no sequence has grown, and none that it made is left."""
        try:
            for group in self.groups:
                step, group.step = group.step, None
                if step is not None:
                    for seq, length in zip(group.sequences, step.before, strict=True):
                        group.paged.rollback(seq, length, range(step.written))
        except BaseException:  # sequences of which nobody knows how long they are
            self._forget()
            raise
        if self._made:
            self._forget()
        columns = self._columns_begun = self._columns_before
        if self._real is not None:
            self._real = self._real[:, :columns]
        for layer in self.layers:
            layer.columns = columns
        if self._batch_size == -1:
            self._owner.release()  # nothing here is anybody's

    def _attend(
        self, handle: Handle, query: Tensor, mask: Tensor | None, scale: float, softcap: float | None
    ) -> Tensor:
        layer, key, value = handle.layer, handle.key, handle.value
        if not self.groups:
            self._initialize(key)
        group = self._group_of[layer]
        columns = query.shape[2]
        if self.layers[layer].columns > self._columns_begun:
            self._begin(query, key, value, mask, self.layers[layer])
        step = group.step
        assert step is not None and step.columns == columns
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sliding_window": group.sliding_window}
        index = group.layers.index(layer)
        rows = query.shape[0] if step.same is None else len(step.batch.seq_lens)
        first = None if step.same is None else sorted(set(step.same))
        q, k, v = (flatten(x if first is None else x[first], step.real) for x in (query, key, value))
        if columns == 1 and step.real is None:
            group.paged.append(index, k, v, step.batch, q)
            flat = group.paged.decode(index, q, step.batch, **options)
        elif self.as_decoded:
            flat = group.paged.replay(index, q, k, v, step.batch, **options)
        else:
            flat = group.paged.prefill(index, q, k, v, step.batch, **options)
            group.paged.append(index, k, v, step.batch, q)
        step.written += 1
        out = unflatten(flat, step.real, rows, columns)
        if first is not None and step.same is not None:
            out = out[[first.index(source) for source in step.same]]
            for row, source in enumerate(step.same):
                if source != row:
                    group.paged.copy_owned(index, group.sequences[source], group.sequences[row])
        if self.on_attend is not None:
            self.on_attend(layer, query, key, value, out)
        return out

    def keys_as_read(self, layer: int) -> Tensor:
        """A layer's keys as attention now reads them, in the model's space: float32 [batch, tokens, heads, head_dim]."""
        group = self._group_of[layer]
        paged = group.paged
        return restored(paged.stores[group.layers.index(layer)], "key", paged.batch(group.sequences))

    def implementation(self, op: Op, device: torch.device) -> str:
        """The name of what does an operation on a device."""
        chosen = self.groups[0].paged.ops[op] if self.groups else choose(op, self.layout, device, self._implementation)
        return chosen.name

    # --- steps of a static batch -------------------------------------------------------------------------------------

    def decoder(self, model: Any, steps: int, *, graph: bool = True) -> Decoder:
        """Steps of the sequences at hand that a CUDA graph replays, for those who do not use `generate(graph=True)`."""
        return Decoder(model, self, steps, graph=graph)

    def settle(self) -> None:
        """Closes the decoder that has the cache, if one has, and takes back a forward pass that broke off between layers."""
        if self._decoder is not None:
            self._decoder.close()
        if self._unfinished:
            self._owner.claim()
            self._abort()

    def _decoded(self, columns: int) -> None:
        """Takes up what a decoder has done: so many tokens of every sequence."""
        self._decoder = None
        self._columns_begun += columns
        self._columns_before = self._columns_begun
        if self._real is not None:
            self._real = torch.nn.functional.pad(self._real, (0, columns), value=True)
        for layer in self.layers:
            layer.columns = self._columns_begun
        for group in self.groups:
            self._slide(group)

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
        self.layout = self._make_layout(dtype, device)
        pages = None
        if self.max_tokens is not None:
            pages = max(1, self.layout.pages_for(self.max_tokens)) * (self.max_sequences or 1)
        groups = []
        for window in dict.fromkeys(self.shape.layers):
            layers = [i for i, w in enumerate(self.shape.layers) if w == window]
            tensors = {} if self.artifact is None else self.artifact.tensors
            own = {index: tensors[layer] for index, layer in enumerate(layers) if layer in tensors}
            ropes = None if self._ropes is None else [self._ropes[layer] for layer in layers]
            paged = PagedCache(
                self.layout,
                len(layers),
                pages,
                device,
                own,
                self._implementation,
                ropes,
                max_sequences=self.max_sequences,
                digest=self.digest,
                check=self.check_finite,
                numbers=layers,
            )
            if self.share:
                PrefixCache(paged, window)
            groups.append(Group(window, layers, paged))
        by_layer = {layer: group for group in groups for layer in group.layers}
        self.groups, self._group_of = groups, [by_layer[i] for i in range(len(self.layers))]

    def _begin(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: PackedLayer) -> None:
        """Makes room for a forward pass's tokens in every group. Where it fails, `_abort` leaves all groups as they were."""
        batch_size, _, columns, _ = query.shape
        if self._batch_size == -1:
            self._made = True
            for group in self.groups:
                group.paged.reserve(0, batch_size)
                for _ in range(batch_size):
                    group.sequences.append(group.paged.new())
            self._batch_size = batch_size
        if batch_size != self._batch_size:
            raise ValueError(f"the cache holds {self._batch_size} sequences, the model was called with {batch_size}")
        real = self._real_columns(columns, mask, layer)
        same = self._same_rows(query, key, value, real) if columns > 1 and batch_size > 1 else None
        rows = range(batch_size) if same is None else sorted(set(same))
        counts = [columns if real is None else int(real[row].sum()) for row in rows]
        for group in self.groups:
            before = [seq.length for seq in group.sequences]
            batch = group.paged.extend([group.sequences[row] for row in rows], counts)
            part = real if same is None or real is None else real[list(rows)]
            group.step = Step(batch, part, columns, before, same)
        for group in self.groups:
            for row, source in enumerate(same or ()):
                if source != row:
                    group.paged.mirror(group.sequences[row], group.sequences[source])
        if real is not None or self._real is not None:
            past = self._real
            if past is None:
                past = torch.ones(batch_size, self._columns_begun, dtype=torch.bool)
            fresh = torch.ones(batch_size, columns, dtype=torch.bool) if real is None else real.cpu()
            self._real = torch.cat((past, fresh), 1)
        self._columns_begun += columns

    def _same_rows(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> list[int] | None:
        """For every row of the batch the first one with the same text, as its first layer shows; None where all differ.

        Samples of one prompt come as equal rows: they are stored, and attended from, once.
        """
        found: dict[Any, int] = {}
        same: list[int] = []
        if any(s.groupwise for s in self.recipe.streams.values()) and self._columns_begun:
            return None  # tails may differ where pages do not
        ends = key[:, 0, -1, :4].tolist()
        for row in range(len(key)):
            pages = tuple(tuple(group.sequences[row].pages) for group in self.groups)
            state = tuple((group.sequences[row].length, str(group.sequences[row].ring_start)) for group in self.groups)
            padding = None if real is None else tuple(real[row].tolist())
            first = found.setdefault((tuple(ends[row]), pages, state, padding), row)
            equal = first == row or all(torch.equal(x[first], x[row]) for x in (query, key, value))
            same.append(first if equal else row)
        return same if len(set(same)) < len(same) else None

    def _real_columns(self, columns: int, mask: Tensor | None, layer: PackedLayer) -> Tensor | None:
        """Which new columns are tokens, from the attention mask; refuses a mask that is not causal but for padding."""
        if mask is None:
            return None
        total = self._columns_begun + columns
        if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-2:] != (columns, total):
            raise ValueError(
                f"expected a 2-D padding mask; got a {mask.ndim}-D {mask.dtype} mask of shape {tuple(mask.shape)} "
                f"for {columns} new of {total} columns"
            )
        at = torch.arange(total, device=mask.device)
        fresh = mask[:, 0, :, self._columns_begun :].diagonal(dim1=1, dim2=2)
        past = mask.new_ones(len(mask), self._columns_begun) if self._real is None else self._real.to(mask.device)
        query_at = at[self._columns_begun :, None]
        expected = (at <= query_at) & torch.cat((past, fresh), 1)[:, None, None, :]
        if layer.sliding_window is not None:
            expected = expected & (at > query_at - layer.sliding_window)
        if not torch.equal(expected.expand_as(mask), mask):
            raise ValueError("cannot serve this attention mask: only causal attention with padded columns is supported")
        return None if bool(fresh.all()) else fresh

    def _slide(self, group: Group) -> None:
        """Gives back pages that a sliding window has left behind, unless a crop may still come."""
        if group.sliding_window is None or any(self.layers[i].record_past for i in group.layers):
            return
        for seq in group.sequences:
            group.paged.slide(seq, group.sliding_window)

    # --- what generate does with a cache ---------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last columns: -k removes k; a positive number is the length to keep, as transformers once had it."""
        with self._owner.claimed(within=True):
            if self._decoder is not None and not tokens_to_remove:
                return  # as a loop that reads its stop one step late says at every step
            self.settle()
            columns = self.get_seq_length()
            asked = int(tokens_to_remove)  # assisted generation may ask with a tensor
            remove = -asked if asked <= 0 else max(0, columns - asked)
            if remove > columns:
                raise ValueError(f"cannot remove {remove} of {columns} columns")
            if remove or any(
                group.sliding_window is not None for group in self.groups
            ):  # pages may have left their window
                self._crop(columns - remove)

    def _crop(self, columns: int) -> None:
        """Keeps so many columns: of all sequences, or an error and all are as they were."""
        gone = [self._columns_begun - columns] * max(0, self._batch_size)
        if self._real is not None:
            gone = [int(count) for count in self._real[:, columns:].sum(1)]
        for group in self.groups:
            for seq, count in zip(group.sequences, gone, strict=True):
                group.paged.check_crop(seq, seq.length - count)
        if any(gone):
            self._ids = None
        for group in self.groups:
            for seq, count in zip(group.sequences, gone, strict=True):
                group.paged.crop(seq, seq.length - count)
                if group.sliding_window is not None:
                    group.paged.slide(seq, group.sliding_window)
        if self._told is not None and self.groups and len(self._told) == self._batch_size:
            lengths = [seq.length for seq in self.groups[0].sequences]
            self._told = [told[:length] for told, length in zip(self._told, lengths, strict=True)]
        if self._real is not None:
            self._real = self._real[:, :columns]
        self._columns_begun = self._columns_before = columns
        for layer in self.layers:
            layer.columns = columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select([int(i) for i in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(max(0, self._batch_size)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = torch.arange(max(0, self._batch_size))[indices.cpu()]  # indices or a mask
        self._select([int(i) for i in chosen])

    def _select(self, order: Sequence[int]) -> None:
        """The batch becomes the sequences at these indices: all of them, or an error and it is as it was. One used again is
        forked: it shares its pages. Its twin gets the rows of a sequence that goes, if there is one."""
        with self._owner.claimed(within=True):
            self.settle()
            if self._batch_size == -1:
                return
            if not order or min(order) < 0 or max(order) >= self._batch_size:
                raise ValueError(
                    f"indices must name at least one of {self._batch_size} sequences, got {list(order)}; "
                    "reset() forgets all of them"
                )
            first = {source: place for place, source in reversed(list(enumerate(order)))}
            again = [place for place, source in enumerate(order) if first[source] != place]
            unused = [i for i in range(self._batch_size) if i not in first]
            more = max(0, len(again) - len(unused))
            made: list[tuple[Group, Any]] = []
            try:
                for group in self.groups:
                    group.paged.reserve(0, more)
                    for place in again[:more]:
                        made.append((group, group.paged.fork(group.sequences[order[place]])))
            except BaseException:
                for group, seq in made:
                    group.paged.free(seq)
                raise
            self._ids = None
            for number, group in enumerate(self.groups):  # from here on nothing is allocated
                twins = dict(zip(again, [seq for _, seq in made[number * more : (number + 1) * more]], strict=False))
                for place, i in zip(again[more:], unused, strict=False):
                    twins[place] = group.sequences[i]
                    group.paged.mirror(group.sequences[i], group.sequences[order[place]])
                for i in unused[len(again) - more :]:
                    group.paged.free(group.sequences[i])
                group.sequences = [twins.get(place, group.sequences[source]) for place, source in enumerate(order)]
            if self._real is not None:
                self._real = self._real[list(order)]
            if self._told is not None:
                whole = len(self._told) == self._batch_size
                self._told = [self._told[i] for i in order] if whole else None
            self._batch_size = len(order)

    def reset(self) -> None:
        """Forgets all sequences, and gives back their pages but those that are kept to be shared; memory stays
        allocated. Any thread may take the cache afterwards."""
        with self._owner.claimed():
            self._forget()
        self._owner.release()

    def _forget(self) -> None:
        """Whatever state the cache is in: it holds no sequences afterwards."""
        if self._decoder is not None:  # its room goes with the sequences
            self._decoder.closed, self._decoder = True, None
        for group in self.groups:
            group.step = None
            while group.sequences:
                group.paged.free(group.sequences.pop())
        for layer in self.layers:
            layer.columns = 0
        self._batch_size, self._real, self._made = -1, None, False
        self._ids = self._told = None
        self._columns_begun = self._columns_before = 0


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "kvant": packed pages behind a handle, or plain tensors through SDPA."""
    if not isinstance(key, Handle):
        if softcap is not None:
            raise ValueError(
                "a logit soft cap without a kvant.Cache: set the model's attention implementation to eager"
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    try:
        for name in ("s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise ValueError(f"cannot serve this model: its attention takes {name}")
        if dropout or is_causal is False or getattr(module, "is_causal", True) is False:
            raise ValueError("cannot serve this call: a packed cache is for causal attention without dropout")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key.key, key.value)):
            _cut_gradients(module, key)
            query = query.detach()
    except BaseException:
        if isinstance(key.cache, Cache) and key.cache._decoder is None:
            key.cache._abort()
        raise
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.cache.attend(key, query, attention_mask, scale, softcap), None


def _cut_gradients(module: torch.nn.Module, handle: Handle) -> None:
    """Parameters require gradients by default, so many a script asks for them without wanting any: it is told once. One that
    trains is refused, since codes have no gradients and what came through the rest of the model would be wrong."""
    if module.training:
        raise ValueError(
            "cannot serve this call: gradients do not flow through packed keys and values, and the model is in training "
            "mode; call it under torch.no_grad(), or after model.eval(), or train without a kvant.Cache"
        )
    if not getattr(handle.cache, "_said_gradients", True):
        handle.cache._said_gradients = True
        warnings.warn(
            "gradients do not flow through packed keys and values: attention from a kvant.Cache is detached; call the model "
            "under torch.no_grad()",
            UserWarning,
            stacklevel=2,
        )
    handle.key, handle.value = handle.key.detach(), handle.value.detach()


def attention_mask(batch_size: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of the attention function "kvant": that of SDPA."""
    if not batch_size:
        raise ValueError("the model was called with no sequences: input_ids must have at least one row")
    return sdpa_mask(batch_size, *args, **kwargs)  # type: ignore[no-any-return]


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, attention_mask)
