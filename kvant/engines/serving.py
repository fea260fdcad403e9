"""What a server does with a cache between calls: takes up what is stored, keeps it, moves it to host memory or disk.

The model's `generate` sees keys and values, never token ids, so these are told: `generate` of the cache wraps that of the
model and tells them; `start` and `finish` are its two halves for those who call the model themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from kvant.artifact import Artifact
from kvant.cache import Snapshot, Swapped, save, swap_in
from kvant.cache.swap import copied
from kvant.engines import graphs
from kvant.layout import Layout
from kvant.recipe import Recipe

if TYPE_CHECKING:
    from kvant.engines.layers import Group
    from kvant.engines.ownership import Ownership

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Preempted:
    """The sequences of a cache in host memory, and how far their batch had come."""

    groups: tuple[Swapped, ...]
    columns: int
    real: Tensor | None
    ids: list[list[int]] | None
    salt: str
    told: list[list[int]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


class _Texts:
    """The tokens of a batch, padding left out, and how many of them each row has in its first columns."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids must be [sequences, columns] with at least one of each, got {list(input_ids.shape)}"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got {list(attention_mask.shape)}"
            )
        self.real = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
        self.ids: list[list[int]] = [row[keep].tolist() for row, keep in zip(input_ids.cpu(), self.real, strict=True)]
        for row, text in enumerate(self.ids):
            if not text:
                raise ValueError(f"row {row} of attention_mask is all padding: every sequence needs at least one token")
        self._counts: list[list[int]] = [[0, *row] for row in self.real.cumsum(1).tolist()]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, columns: int) -> list[int]:
        """Tokens that the first columns hold, of every row."""
        return [counts[columns] for counts in self._counts]

    def columns(self, tokens: Sequence[int]) -> int:
        """Columns that can be left out where so many tokens of every row are known; never the last one. 0 where they would
        hold no token at all."""
        last = self.real.shape[1] - 1
        found = [bisect_right(counts, known) - 1 for counts, known in zip(self._counts, tokens, strict=True)]
        columns = min([last, *found])
        return columns if any(self.tokens(columns)) else 0


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
        _owner: Ownership
        _ids: list[list[int]] | None
        _told: list[list[int]] | None
        _salt: str
        _real: Tensor | None
        _batch_size: int
        _columns_begun: int
        _columns_before: int

        def _forget(self) -> None: ...
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
        holds (a chat that goes on), and with `share=True` those of earlier ones. Padding goes to the left. The cache belongs
        to this thread from start to end, and then to nobody; a generation within a generation is refused.

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
        settings = options.get("generation_config") or getattr(model, "generation_config", None)
        asked = {
            name: options.get(name) or getattr(settings, name, None) or 1
            for name in ("num_return_sequences", "num_beams")
        }
        copies = max(asked.values())
        with self._owner.generation():
            many = mask.repeat_interleave(copies, 0)
            self._start(_Texts(input_ids.repeat_interleave(copies, 0), many), salt)
            out = model.generate(input_ids, attention_mask=mask, past_key_values=self, **options)
            if asked["num_beams"] > 1:  # a beam's tokens are not those that its sequence ends with
                self._ids = None
            else:
                self._finish(out if isinstance(out, Tensor) else out.sequences, many, salt)
        return out  # type: ignore[no-any-return]

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "") -> int:
        """Makes the cache hold as much as it can of the beginning of a batch, and says how many columns the model need
        not compute (`reused` too). The last column is always left to it. Sequences that are of no use are forgotten. The cache
        belongs to this thread until `finish` or `reset`."""
        texts = _Texts(input_ids, attention_mask)
        with self._owner.claimed(keep=True):
            return self._start(texts, salt)

    def _start(self, texts: _Texts, salt: str) -> int:
        self.reused = 0
        self.settle()
        live = self._continue(texts) if salt == self._salt else 0
        kept = self._columns_kept(texts, salt) if self.share else 0
        columns = max(live, kept)
        lengths = texts.tokens(columns)
        continued = bool(live) and live >= kept
        if columns and not continued:  # room first: where there is none, the sequences at hand stay
            for group in self.groups:
                group.paged.reserve(0, max(0, len(texts) - len(group.sequences)))
        try:
            if continued:
                for group in self.groups:
                    for seq, length in zip(group.sequences, lengths, strict=True):
                        group.paged.crop(seq, length)
            else:
                self._forget()
                for group in self.groups if columns else ():
                    assert group.paged.prefix is not None
                    for text, length in zip(texts.ids, lengths, strict=True):
                        group.sequences.append(group.paged.prefix.take(text, salt, length))
        except BaseException:
            self._forget()
            raise
        self._batch_size = len(texts) if columns else -1
        self._columns_begun = self._columns_before = columns
        real = texts.real[:, :columns]
        self._real = None if bool(real.all()) else real
        self._ids = [text[:length] for text, length in zip(texts.ids, lengths, strict=True)] if columns else None
        self._told, self._salt = texts.ids, salt
        for layer in self.layers:
            layer.columns = columns
        self.reused = columns
        return columns

    def _continue(self, texts: _Texts) -> int:
        """Columns that the sequences at hand can give to a batch."""
        if self._ids is None or len(self._ids) != len(texts):
            return 0
        found = texts.columns([_agree(held, text) for held, text in zip(self._ids, texts.ids, strict=True)])
        for group in self.groups:
            for seq, length in zip(group.sequences, texts.tokens(found), strict=True):
                try:
                    group.paged.check_crop(seq, length)
                except ValueError:  # a sliding window has dropped what would be needed
                    return 0
        return found

    def _columns_kept(self, texts: _Texts, salt: str) -> int:
        """Columns that kept pages can give to a batch: every row and every group has to have them."""
        found, before = texts.columns([len(text) for text in texts.ids]), -1
        while found != before:
            before = found
            for group in self.groups:
                assert group.paged.prefix is not None
                wanted = texts.tokens(found)
                held = [
                    group.paged.prefix.find(text[:length], salt) for text, length in zip(texts.ids, wanted, strict=True)
                ]
                if held != wanted:
                    found = texts.columns(held)
        return found if self.groups else 0

    def finish(self, output_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "") -> None:
        """Tells the tokens of the sequences at hand, prompt included, and with `share=True` keeps their pages under
        them. A mask is that of the prompt; columns behind it are tokens. Tokens and salt must go on from those that `start`
        was told. Any thread may take the cache afterwards."""
        with self._owner.claimed():
            self._finish(output_ids, attention_mask, salt)
        self._owner.release()

    def _finish(self, output_ids: Tensor, attention_mask: Tensor | None, salt: str) -> None:
        self.settle()
        if output_ids.ndim != 2 or not output_ids.numel():
            raise ValueError(
                f"output_ids must be [sequences, columns] with at least one of each, got {list(output_ids.shape)}"
            )
        if not self.groups or self._batch_size != len(output_ids):
            held = max(0, self._batch_size)
            raise ValueError(f"the cache holds {held} sequences, got the tokens of {len(output_ids)}")
        real = torch.ones_like(output_ids).bool()
        if attention_mask is not None:
            width = attention_mask.shape[-1]
            if attention_mask.shape != (len(output_ids), width) or width > output_ids.shape[1]:
                raise ValueError(
                    f"attention_mask must be that of the prompt of output_ids, {list(output_ids.shape)}, "
                    f"got {list(attention_mask.shape)}"
                )
            real[:, :width] = attention_mask.bool()
        texts = [row[keep].tolist() for row, keep in zip(output_ids.cpu(), real.cpu(), strict=True)]
        self._check_told(texts, salt)
        for group in self.groups if self.share else ():
            assert group.paged.prefix is not None
            for text, seq in zip(texts, group.sequences, strict=True):
                group.paged.prefix.keep(seq, text[: seq.length], salt)
        sequences = self.groups[0].sequences
        self._ids = [text[: seq.length] for text, seq in zip(texts, sequences, strict=True)]
        self._told, self._salt = None, salt

    def _check_told(self, texts: Sequence[list[int]], salt: str) -> None:
        """Refuses tokens that cannot be those of the sequences at hand: pages kept under them would be found by others."""
        lengths = [seq.length for seq in self.groups[0].sequences]
        for text, length in zip(texts, lengths, strict=True):
            if len(text) < length:
                raise ValueError(f"a sequence holds {length} tokens, got {len(text)} token ids")
        for known in (self._told, self._ids):
            if known is None:
                continue
            if salt != self._salt:
                raise ValueError("salt must be the one that these sequences were started or last finished with")
            if len(known) != len(texts):
                continue  # samples of a prompt that `start` was told once
            for row, (mine, text, length) in enumerate(zip(known, texts, lengths, strict=True)):
                same = _agree(mine[:length], text)
                if same < min(len(mine), length):
                    raise ValueError(
                        f"output_ids are not those of the sequences at hand: row {row} has token {text[same]} at position "
                        f"{same}, the cache was told {mine[same]}"
                    )

    # --- elsewhere -------------------------------------------------------------------------------------------------

    def swap_out(self) -> Preempted:
        """Moves the sequences to host memory and frees their pages: room for others until `swap_in`. All of them, or an error
        and they are where they were."""
        with self._owner.claimed():
            self.settle()
            if not self.groups or self._batch_size < 1:
                raise ValueError("the cache holds no sequences to swap out")
            moved = tuple(copied(group.paged, group.sequences) for group in self.groups)
            out = Preempted(moved, self._columns_begun, self._real, self._ids, self._salt, self._told)
            self._forget()
        self._owner.release()
        return out

    def swap_in(self, preempted: Preempted) -> None:
        """Brings sequences back as they were: all of them, or an error (PoolFull, or torch's where memory runs out) and
        none."""
        with self._owner.claimed(keep=True):
            self.settle()
            if self._batch_size > 0:
                raise ValueError(f"the cache holds {self._batch_size} sequences: reset it or swap them out first")
            if len(preempted.groups) != len(self.groups):
                raise ValueError("these sequences come from a cache of another model")
            try:
                for group, swapped in zip(self.groups, preempted.groups, strict=True):
                    group.sequences = swap_in(group.paged, swapped)
            except BaseException:
                self._forget()
                raise
            self._restored(preempted.columns, preempted.real, preempted.ids, preempted.salt)
            self._told = preempted.told

    def _restored(self, columns: int, real: Tensor | None, ids: list[list[int]] | None, salt: str) -> None:
        self._batch_size = len(self.groups[0].sequences) or -1
        self._real, self._ids, self._salt = real, ids, salt
        self._columns_begun = self._columns_before = columns
        for layer in self.layers:
            layer.columns = columns

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the sequences and kept prefixes to one file, whole or not at all, a few pages at a time."""
        with self._owner.claimed():
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
                "real": None
                if self._real is None
                else ["".join("01"[bit] for bit in row) for row in self._real.tolist()],
                "ids": self._ids,
                "salt": self._salt,
                "entries": [[group.paged.sequences.index(seq) for seq in group.sequences] for group in self.groups],
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
                masks, sequences, salt = state["real"], state["entries"], str(state["salt"])
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
            _check_batch(snapshot.path, cache, columns, real, ids, sequences)
            for group, order in zip(cache.groups, sequences, strict=True):
                group.sequences = [group.paged.sequences[place] for place in order]
            cache._restored(columns, real, ids, salt)
        return cache


def _agree(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning of two texts that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _check_batch(path: str, cache: Any, columns: Any, real: Tensor | None, ids: Any, sequences: Any) -> None:
    """Refuses a batch that is not that of the sequences beside it."""
    try:
        right = type(columns) is int and columns >= 0 and len(sequences) == len(cache.groups)
        for group, order in zip(cache.groups, sequences, strict=False):
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
