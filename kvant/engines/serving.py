"""What a server does with a cache between calls: takes up what is stored, keeps it, moves it to host memory or disk.

The model's `generate` sees keys and values, never token ids, so these are told: `generate` of the cache wraps that of the
model and tells them; `start` and `finish` are its two halves for those who call the model themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from kvant.artifact import Artifact
from kvant.cache import Snapshot, Swapped, save, swap_in, swap_out
from kvant.engines import graphs
from kvant.layout import Layout
from kvant.recipe import Recipe

if TYPE_CHECKING:
    from kvant.engines.layers import Group

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Preempted:
    """The sequences of a cache in host memory, and how far their batch had come."""

    groups: tuple[Swapped, ...]
    columns: int
    real: Tensor | None
    ids: list[list[int]] | None
    salt: str

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


class Serving:
    """Mixed into `kvant.Cache`."""

    reused = 0  # columns that the last `start` took up

    if TYPE_CHECKING:
        groups: list[Group]
        layers: list[Any]
        share: bool
        first_position: int
        asked: Recipe
        layout: Layout
        _ids: list[list[int]] | None
        _salt: str
        _real: Tensor | None
        _batch_size: int
        _columns_begun: int
        _columns_before: int

        def reset(self) -> None: ...
        def settle(self) -> None: ...

    def generate(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        salt: str = "",
        graph: bool = False,
        **options: Any,
    ) -> Tensor:
        """`model.generate` from this cache, re-using every page that it can: those of the sequences that the cache still
        holds (a chat that goes on), and with `share=True` those of earlier ones. Padding goes to the left.

        salt   only sequences with the same salt share pages.
        graph  decode in steps that a CUDA graph replays: the batch stays as it is, and pages for `max_new_tokens` are taken
               at once. Greedy search and sampling, with everything that transformers does to logits and to stop. What
               cannot be captured is refused before anything is computed.
        """
        if graph:
            reason = graphs.refuse(model, self)  # type: ignore[arg-type]
            if reason is not None:
                raise ValueError(f"cannot generate in a CUDA graph: {reason}")
            options["custom_generate"] = functools.partial(graphs.sample, streamer=options.get("streamer"))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        copies = max(options.get("num_return_sequences") or 1, options.get("num_beams") or 1)
        many = mask.repeat_interleave(copies, 0)
        self.start(input_ids.repeat_interleave(copies, 0), many, salt=salt)
        out = model.generate(input_ids, attention_mask=mask, past_key_values=self, **options)
        if (options.get("num_beams") or 1) > 1:  # a beam's tokens are not those that its sequence ends with
            self._ids = None
        else:
            self.finish(out, many, salt=salt)
        return out

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "") -> int:
        """Makes the cache hold as much as it can of the beginning of a batch, and says how many columns the model need
        not compute (`reused` too). The last column is always left to it. Sequences that are of no use are forgotten."""
        self.reused = 0
        self.settle()
        real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        texts = [row[keep].tolist() for row, keep in zip(input_ids.cpu(), real.cpu(), strict=True)]
        most = [min(len(text), int(keep[:-1].sum())) for text, keep in zip(texts, real, strict=True)]
        pads = [input_ids.shape[1] - len(text) for text in texts]
        if not self.groups:
            return 0
        live = self._continue(texts, most, pads) if salt == self._salt else 0
        kept = self._columns_kept(texts, most, pads, salt) if self.share else 0
        if live and live >= kept:
            for group in self.groups:
                for entry, pad in zip(group.entries, pads, strict=True):
                    group.paged.crop(entry, max(0, live - pad))
            columns = live
        else:
            self.reset()
            columns = kept
            if columns:
                for group in self.groups:
                    assert group.paged.prefix is not None
                    group.entries = [
                        group.paged.prefix.take(text, salt, max(0, columns - pad))
                        for text, pad in zip(texts, pads, strict=True)
                    ]
                self._batch_size = len(texts)
        self._columns_begun = self._columns_before = columns
        self._real = None if bool(real[:, :columns].all()) else real[:, :columns].cpu()
        self._ids = [text[: max(0, columns - pad)] for text, pad in zip(texts, pads, strict=True)] if columns else None
        self._salt = salt
        for group in self.groups:
            group.step = None
        for layer in self.layers:
            layer.columns = columns
        self.reused = columns
        return columns

    def _continue(self, texts: Sequence[list[int]], most: Sequence[int], pads: Sequence[int]) -> int:
        """Columns that the sequences at hand can give to a batch."""
        if self._ids is None or len(self._ids) != len(texts):
            return 0
        columns = []
        for held, text, limit, pad in zip(self._ids, texts, most, pads, strict=True):
            same = 0
            while same < min(len(held), limit) and held[same] == text[same]:
                same += 1
            columns.append(pad + same)
        found = min(columns)
        for group in self.groups:
            for entry, pad in zip(group.entries, pads, strict=True):
                try:
                    group.paged.check_crop(entry, max(0, found - pad))
                except ValueError:  # a sliding window has dropped what would be needed
                    return 0
        return found if any(found > pad for pad in pads) else 0

    def _columns_kept(self, texts: Sequence[list[int]], most: Sequence[int], pads: Sequence[int], salt: str) -> int:
        """Columns that kept pages can give to a batch: every row and every group has to have them."""
        found, before = min(pad + limit for pad, limit in zip(pads, most, strict=True)), -1
        while found != before:
            before = found
            for text, pad in zip(texts, pads, strict=True):
                for group in self.groups:
                    assert group.paged.prefix is not None
                    wanted = max(0, found - pad)
                    held = group.paged.prefix.find(text[:wanted], salt)
                    if held < wanted:
                        found = pad + held
        return found if any(found > pad for pad in pads) else 0

    def finish(self, output_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "") -> None:
        """Tells the tokens of the sequences at hand, prompt included, and with `share=True` keeps their pages under
        them. A mask is that of the prompt; columns behind it are tokens."""
        self.settle()
        if not self.groups or self._batch_size != len(output_ids):
            raise ValueError(f"the cache holds {self._batch_size} sequences, got the tokens of {len(output_ids)}")
        real = torch.ones_like(output_ids).bool()
        if attention_mask is not None:
            real[:, : attention_mask.shape[1]] = attention_mask.bool()
        texts = [row[keep].tolist() for row, keep in zip(output_ids.cpu(), real.cpu(), strict=True)]
        for group in self.groups:
            for text, entry in zip(texts, group.entries, strict=True):
                if len(text) < entry.length:
                    raise ValueError(f"a sequence holds {entry.length} tokens, got {len(text)} token ids")
                if self.share:
                    assert group.paged.prefix is not None
                    group.paged.prefix.keep(entry, text[: entry.length], salt)
        entries = self.groups[0].entries
        self._ids = [text[: entry.length] for text, entry in zip(texts, entries, strict=True)]
        self._salt = salt

    # --- elsewhere -------------------------------------------------------------------------------------------------

    def swap_out(self) -> Preempted:
        """Moves the sequences to host memory and frees their pages: room for others until `swap_in`."""
        self.settle()
        if not self.groups or self._batch_size < 1:
            raise ValueError("the cache holds no sequences to swap out")
        swapped = tuple(swap_out(group.paged, group.entries) for group in self.groups)
        out = Preempted(swapped, self._columns_begun, self._real, self._ids, self._salt)
        for group in self.groups:
            group.entries = []
        self.reset()
        return out

    def swap_in(self, preempted: Preempted) -> None:
        """Brings sequences back as they were: all of them, or PoolFull and none."""
        if self._batch_size > 0:
            raise ValueError(f"the cache holds {self._batch_size} sequences: reset it or swap them out first")
        if len(preempted.groups) != len(self.groups):
            raise ValueError("these sequences come from a cache of another model")
        done: list[Group] = []
        try:
            for group, swapped in zip(self.groups, preempted.groups, strict=True):
                group.entries = swap_in(group.paged, swapped)
                done.append(group)
        except BaseException:
            for group in done:
                for entry in group.entries:
                    group.paged.free(entry)
                group.entries = []
            raise
        self._restored(preempted.columns, preempted.real, preempted.ids, preempted.salt)

    def _restored(self, columns: int, real: Tensor | None, ids: list[list[int]] | None, salt: str) -> None:
        self._batch_size = len(self.groups[0].entries) or -1
        self._real, self._ids, self._salt = real, ids, salt
        self._columns_begun = self._columns_before = columns
        for layer in self.layers:
            layer.columns = columns

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the sequences and kept prefixes to one file, whole or not at all, a few pages at a time."""
        self.settle()
        if not self.groups:
            raise ValueError("there is nothing to save: the cache has not seen a token yet")
        extra = {
            "recipe": self.asked.to_json(),
            "page_tokens": self.layout.page_tokens,
            "order": self.layout.order,
            "dtype": self.layout.dtype,
            "share": self.share,
            "first_position": self.first_position,
            "columns": self._columns_begun,
            "real": None if self._real is None else ["".join("01"[bit] for bit in row) for row in self._real.tolist()],
            "ids": self._ids,
            "salt": self._salt,
            "entries": [[group.paged.sequences.index(entry) for entry in group.entries] for group in self.groups],
        }
        return save(path, [group.paged for group in self.groups], extra)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model_or_config: Any,
        *,
        artifact: Artifact | str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """A cache that goes on where the saved one stopped, for the same model (and artifact). `options` are those of the
        cache but recipe, page_tokens, order, share and first_position, which the file names. A file that is damaged, or of a cache in
        which bytes mean something else, is refused."""
        with Snapshot(path) as snapshot:
            state = snapshot.extra
            try:
                recipe = Recipe.from_json(state["recipe"])
                layout = {key: state[key] for key in ("page_tokens", "order", "first_position")}
                cache: Any = cls(  # type: ignore[call-arg]
                    model_or_config, recipe, artifact=artifact, share=state["share"] is True, **layout, **options
                )
                dtype, columns, ids = str(state["dtype"]), state["columns"], state["ids"]
                masks, entries, salt = state["real"], state["entries"], str(state["salt"])
                real = None if masks is None else torch.tensor([[bit == "1" for bit in row] for row in masks])
            except (AttributeError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"snapshot {snapshot.path!r} is damaged: {type(error).__name__}: {error}") from error
            where = torch.device(device or getattr(model_or_config, "device", None) or "cpu")
            cache.layout = cache._make_layout(dtype, where)
            groups = list(Counter(cache.shape.layers).values())  # layers of every window
            snapshot.check([cache.digest] * len(groups))
            text = getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)
            snapshot.check_room(cache.layout, groups, getattr(text, "max_position_embeddings", None))
            cache._allocate(dtype, where)
            snapshot.load([group.paged for group in cache.groups])
            _check_batch(snapshot.path, cache, columns, real, ids, entries)
            for group, order in zip(cache.groups, entries, strict=True):
                group.entries = [group.paged.sequences[place] for place in order]
            cache._restored(columns, real, ids, salt)
        return cache


def _check_batch(path: str, cache: Any, columns: Any, real: Tensor | None, ids: Any, entries: Any) -> None:
    """Refuses a batch that is not that of the sequences beside it."""
    try:
        right = type(columns) is int and columns >= 0 and len(entries) == len(cache.groups)
        for group, order in zip(cache.groups, entries, strict=False):
            lengths = [group.paged.sequences[place].length for place in order]
            right = right and sorted(order) == list(range(len(group.paged.sequences)))
            tokens = [columns] * len(order) if real is None else [int(row.sum()) for row in real]
            right = right and tokens == lengths and (real is None or tuple(real.shape) == (len(order), columns))
            right = right and (ids is None or [len(text) for text in ids] == lengths)
        right = right and (ids is None or all(type(token) is int for text in ids for token in text))
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError(f"snapshot {path!r} is damaged: its batch is {error}") from error
    if not right:
        raise ValueError(f"snapshot {path!r} is damaged: its batch is not that of its sequences")
