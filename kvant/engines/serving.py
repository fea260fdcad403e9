"""What a server does with a `kvant.Cache` between calls of the model: re-use stored prefixes, swap sequences to host memory, save
them to disk.

The model's `generate` passes keys and values to a cache, never token ids. `Cache.generate` wraps it and tells the cache the token
ids; `start` and `finish` are its two halves for those who call the model themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from kvant.artifact import Artifact
from kvant.cache import Snapshot, Swapped, save, swap_in
from kvant.cache.swap import copied
from kvant.engines import graphs
from kvant.engines.batch_state import BatchState, Group
from kvant.engines.ownership import Ownership
from kvant.layouts import Layouts
from kvant.ops import Implementation
from kvant.ops.registry import Op
from kvant.recipe import Recipe

Tensor = torch.Tensor
# Options of transformers' generate, of which each asks for assisted generation.
ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


@dataclasses.dataclass(frozen=True, eq=False)
class Preempted:
    """The sequences of a cache in host memory, and what its BatchState said of them."""

    groups: tuple[Swapped, ...]
    columns: int
    padding_mask: Tensor | None
    token_ids: list[list[int]] | None
    salt: str
    told_ids: list[list[int]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


class _Texts:
    """The token ids of a batch without padding (`ids`), and how many of them lie in the first columns of each row.

    padding_mask  bool [sequences, columns], True where a column is a token, as in transformers' attention_mask
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids must be [sequences, columns] with at least one of each, got {list(input_ids.shape)}"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got {list(attention_mask.shape)}"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.padding_mask = mask.bool().cpu()
        rows = zip(input_ids.cpu(), self.padding_mask, strict=True)
        self.ids: list[list[int]] = [row[keep].tolist() for row, keep in rows]
        for row, text in enumerate(self.ids):
            if not text:
                raise ValueError(f"row {row} of attention_mask is all padding: every sequence needs at least one token")
        self._counts: list[list[int]] = [[0, *row] for row in self.padding_mask.cumsum(1).tolist()]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, columns: int) -> list[int]:
        """How many tokens of every row lie in the first `columns` columns."""
        return [counts[columns] for counts in self._counts]

    def columns(self, tokens: Sequence[int]) -> int:
        """How many columns the model need not compute where the first `tokens[row]` tokens of each row are stored. The last column
        is always computed. 0 where the columns would hold no token."""
        last = self.padding_mask.shape[1] - 1
        found = [bisect_right(counts, known) - 1 for counts, known in zip(self._counts, tokens, strict=True)]
        columns = min([last, *found])
        return columns if any(self.tokens(columns)) else 0


class Serving:
    """Mixed into `kvant.Cache`."""

    reused = 0  # columns that the last `start` took up

    if TYPE_CHECKING:
        state: BatchState
        ownership: Ownership
        layers: list[Any]
        share: bool
        first_position: int
        asked: Recipe
        recipe: Recipe
        layouts: Layouts
        as_decoded: bool
        on_attend: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None

        @property
        def groups(self) -> list[Group]: ...
        def settle(self) -> None: ...
        def chosen(self, op: Op, device: torch.device) -> list[Implementation]: ...

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
        """`model.generate` from this cache. It re-uses the pages of sequences that the cache still holds (a chat that goes on), and
        with `share=True` those of earlier sequences. Assisted generation re-uses nothing: transformers feeds it the whole prompt.
        Padding goes to the left. The cache belongs to the calling thread until this returns, and then to no thread; a generation
        within a generation is refused.

        salt   only sequences with the same salt share pages.
        graph  decode in steps that a CUDA graph replays: the batch stays as it is, and pages for `max_new_tokens` are taken
               at once. Greedy search and sampling work, with transformers' logits processors and stopping criteria. What
               cannot be captured is refused before anything is computed.
        """
        if graph:
            reason = graphs.refuse(model, self)
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
        assisted = any(options.get(name) or getattr(settings, name, None) for name in ASSISTED)

        def run() -> Any:
            many = mask.repeat_interleave(copies, 0)
            self._start(_Texts(input_ids.repeat_interleave(copies, 0), many), salt, reuse=not assisted)
            self.state.expect_no_crop()
            out = model.generate(input_ids, attention_mask=mask, past_key_values=self, **options)
            if (
                asked["num_beams"] > 1
            ):  # the text that is returned need not be that of the beam at its place in the batch
                self.state.token_ids = None
            else:
                self._finish(out if isinstance(out, Tensor) else out.sequences, many, salt)
            return out

        return self.ownership.generation(run)  # type: ignore[no-any-return]

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "") -> int:
        """Makes the cache hold as much of the beginning of a batch as is stored, and returns how many columns the model need
        not compute (also `reused`). It always computes the last one. Sequences that cannot be re-used are freed. The cache
        belongs to this thread until `finish` or `reset`."""
        texts = _Texts(input_ids, attention_mask)
        with self.ownership.claimed(keep=True):
            return self._start(texts, salt)

    def _start(self, texts: _Texts, salt: str, reuse: bool = True) -> int:
        self.reused = 0
        self.settle()
        held = self._columns_held(texts) if reuse and salt == self.state.salt else 0
        kept = self._columns_kept(texts, salt) if reuse and self.share else 0
        columns = max(held, kept)
        self.state.whole(lambda: self._take_up(texts, salt, columns, bool(held) and held >= kept))
        self.reused = columns
        return columns

    def _take_up(self, texts: _Texts, salt: str, columns: int, continued: bool) -> None:
        """The batch becomes the first `columns` of these texts: of the sequences at hand, or from the prefix caches."""
        lengths = texts.tokens(columns)
        if continued:
            for group in self.groups:
                for seq, length in zip(group.sequences, lengths, strict=True):
                    group.paged.crop(seq, length)
        else:
            self.state.forget()
            for group in self.groups if columns else ():
                prefix = group.paged.prefix
                assert prefix is not None
                taken = zip(texts.ids, lengths, strict=True)
                group.sequences = [prefix.take(text, salt, length) for text, length in taken]
        state, padding_mask = self.state, texts.padding_mask[:, :columns]
        state.batch_size = len(texts) if columns else -1
        state.set_columns(columns)
        state.padding_mask = None if bool(padding_mask.all()) else padding_mask
        stored = [text[:length] for text, length in zip(texts.ids, lengths, strict=True)]
        state.token_ids = stored if columns else None
        state.told_ids, state.salt = texts.ids, salt

    def _columns_held(self, texts: _Texts) -> int:
        """Columns of a batch that the sequences at hand hold: all rows have to begin with the same tokens."""
        known = self.state.token_ids
        if known is None or len(known) != len(texts):
            return 0
        found = texts.columns([_common(held, text) for held, text in zip(known, texts.ids, strict=True)])
        for group in self.groups:
            for seq, length in zip(group.sequences, texts.tokens(found), strict=True):
                try:
                    group.paged.check_crop(seq, length)
                except ValueError:  # a sliding window has dropped what would be needed
                    return 0
        return found

    def _columns_kept(self, texts: _Texts, salt: str) -> int:
        """Columns of a batch that the prefix caches hold, for every row and in every group."""
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
        """Tells the cache the token ids of its sequences, prompt included; with `share=True` their pages are kept in the prefix
        cache under these ids. `attention_mask` is that of the prompt; columns after it are tokens. Token ids must begin with those
        that `start` was told, and the salt must be the same. Any thread may use the cache afterwards."""
        with self.ownership.claimed():
            self._finish(output_ids, attention_mask, salt)
        self.ownership.release()

    def _finish(self, output_ids: Tensor, attention_mask: Tensor | None, salt: str) -> None:
        self.settle()
        if output_ids.ndim != 2 or not output_ids.numel():
            raise ValueError(
                f"output_ids must be [sequences, columns] with at least one of each, got {list(output_ids.shape)}"
            )
        if not self.groups or self.state.batch_size != len(output_ids):
            held = max(0, self.state.batch_size)
            raise ValueError(f"the cache holds {held} sequences, got the tokens of {len(output_ids)}")
        padding_mask = torch.ones_like(output_ids).bool()
        if attention_mask is not None:
            width = attention_mask.shape[-1]
            if attention_mask.shape != (len(output_ids), width) or width > output_ids.shape[1]:
                raise ValueError(
                    f"attention_mask must be that of the prompt of output_ids, {list(output_ids.shape)}, "
                    f"got {list(attention_mask.shape)}"
                )
            padding_mask[:, :width] = attention_mask.bool()
        texts = [row[keep].tolist() for row, keep in zip(output_ids.cpu(), padding_mask.cpu(), strict=True)]
        self._check_told(texts, salt)
        self.state.whole(lambda: self._keep(texts, salt))

    def _keep(self, texts: Sequence[list[int]], salt: str) -> None:
        """Notes the token ids of the sequences at hand, and keeps their pages under them where pages are shared."""
        for group in self.groups if self.share else ():
            assert group.paged.prefix is not None
            for text, seq in zip(texts, group.sequences, strict=True):
                group.paged.prefix.keep(seq, text[: seq.length], salt)
        self.state.token_ids = [text[:length] for text, length in zip(texts, self.state.lengths, strict=True)]
        self.state.told_ids, self.state.salt = None, salt

    def _check_told(self, texts: Sequence[list[int]], salt: str) -> None:
        """Refuses token ids that cannot be those of the sequences at hand: other requests would find pages under wrong ids."""
        lengths = self.state.lengths
        for text, length in zip(texts, lengths, strict=True):
            if len(text) < length:
                raise ValueError(f"a sequence holds {length} tokens, got {len(text)} token ids")
        for known in (self.state.told_ids, self.state.token_ids):
            if known is None:
                continue
            if salt != self.state.salt:
                raise ValueError("salt must be the one that these sequences were started or last finished with")
            if len(known) != len(texts):
                continue  # several samples of a prompt that `start` was told once
            for row, (mine, text, length) in enumerate(zip(known, texts, lengths, strict=True)):
                same = _common(mine[:length], text)
                if same < min(len(mine), length):
                    raise ValueError(
                        f"output_ids are not those of the sequences at hand: row {row} has token {text[same]} at position "
                        f"{same}, the cache was told {mine[same]}"
                    )

    # --- host memory and disk --------------------------------------------------------------------------------------

    def swap_out(self) -> Preempted:
        """Moves the sequences to host memory and frees their pages. Where it fails, all of them are where they were."""
        with self.ownership.claimed():
            self.settle()
            if not self.groups or self.state.batch_size < 1:
                raise ValueError("the cache holds no sequences to swap out")
            moved = tuple(copied(group.paged, group.sequences) for group in self.groups)
            state = self.state
            out = Preempted(moved, state.columns_begun, state.padding_mask, state.token_ids, state.salt, state.told_ids)
            self.state.forget()
        self.ownership.release()
        return out

    def swap_in(self, preempted: Preempted) -> None:
        """Brings sequences back as they were: all of them, or none and an error (PoolFull, or torch's where memory runs out)."""
        with self.ownership.claimed(keep=True):
            self.settle()
            if self.state.batch_size > 0:
                raise ValueError(f"the cache holds {self.state.batch_size} sequences: reset it or swap them out first")
            if len(preempted.groups) != len(self.groups):
                raise ValueError("these sequences come from a cache of another model")

            def move() -> None:
                for group, swapped in zip(self.groups, preempted.groups, strict=True):
                    group.sequences = swap_in(group.paged, swapped)
                self.state.restore(preempted.columns, preempted.padding_mask, preempted.token_ids, preempted.salt)
                self.state.told_ids = preempted.told_ids

            self.state.whole(move)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the sequences and the prefix cache to one file, whole or not at all, a few pages at a time."""
        with self.ownership.claimed():
            self.settle()
            if not self.groups:
                raise ValueError("there is nothing to save: the cache has not seen a token yet")
            padding_mask = self.state.padding_mask
            extra = {  # the names are part of the file format
                "recipe": self.asked.to_json(),
                "page_tokens": self.layouts.first.page_tokens,
                "order": self.layouts.order,
                "dtype": self.layouts.first.dtype,
                "share": self.share,
                "first_position": self.first_position,
                "columns": self.state.columns_begun,
                "real": None
                if padding_mask is None
                else ["".join("01"[bit] for bit in row) for row in padding_mask.tolist()],
                "ids": self.state.token_ids,
                "salt": self.state.salt,
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
        """The cache that was saved, for the same model and artifact. `options` are those of the constructor except recipe,
        page_tokens, order, share and first_position, which the file names. A file is refused where it is damaged, or where its
        digest is not that of this model, recipe, layout and artifact."""
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
                padding_mask = None if masks is None else torch.tensor([[bit == "1" for bit in row] for row in masks])
            except (AttributeError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"snapshot {snapshot.path!r} is damaged: {type(error).__name__}: {error}") from error
            where = torch.device(device or getattr(model_or_config, "device", None) or "cpu")
            cache.layouts = cache._make_layouts(dtype, where)
            windows = cache.shape.layers
            groups = [  # layouts of the layers of every group
                Layouts(
                    tuple(layout for layout, own in zip(cache.layouts.layers, windows, strict=True) if own == window)
                )
                for window in dict.fromkeys(windows)
            ]
            snapshot.check([cache.digest] * len(groups))
            text = getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)
            snapshot.check_room(groups, getattr(text, "max_position_embeddings", None))
            cache._allocate(dtype, where)
            snapshot.load([group.paged for group in cache.groups])
            _check_batch(snapshot.path, cache, columns, padding_mask, ids, sequences)
            for group, order in zip(cache.groups, sequences, strict=True):
                group.sequences = [group.paged.sequences[place] for place in order]
            cache.state.restore(columns, padding_mask, ids, salt)
        return cache


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _check_batch(path: str, cache: Any, columns: Any, padding_mask: Tensor | None, ids: Any, sequences: Any) -> None:
    """Refuses a description of a batch that does not agree with the sequences of the file."""
    try:
        right = type(columns) is int and columns >= 0 and len(sequences) == len(cache.groups)
        for group, order in zip(cache.groups, sequences, strict=False):
            lengths = [group.paged.sequences[place].length for place in order]
            right = right and sorted(order) == list(range(len(group.paged.sequences)))
            tokens = [columns] * len(order) if padding_mask is None else [int(row.sum()) for row in padding_mask]
            shape = None if padding_mask is None else tuple(padding_mask.shape)
            right = right and tokens == lengths and shape in (None, (len(order), columns))
            right = right and (ids is None or [len(text) for text in ids] == lengths)
        right = right and (ids is None or all(type(token) is int for text in ids for token in text))
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError(f"snapshot {path!r} is damaged: its batch is {error}") from error
    if not right:
        raise ValueError(f"snapshot {path!r} is damaged: its batch is not that of its sequences")
