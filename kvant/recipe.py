"""Recipes: which numbers a cache keeps, and which of its tokens beside the codes.

Recipe = key Stream + value Stream
Stream = transforms -> (corrector) -> codec, and a Window of tokens kept in full precision, or values of them in fp8
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from kvant.codecs import Codec
from kvant.correctors import Corrector
from kvant.spec import Spec, parse_value
from kvant.transforms import Transform

N = TypeVar("N", int, torch.Tensor)
MOST_TOKENS = 1 << 20  # of a field of a window: rows of a window are allocated when a cache is made
OF_A_STREAM = ("rope", "rope_block")  # fields of a stream that are its own, not a part's


@dataclasses.dataclass(frozen=True)
class Window(Spec):
    """Tokens that are not read from codes: the first `sink` and the last `recent`.

    Tokens enter the packed region `flush` at a time; a codec that codes groups of tokens needs a flush of whole groups.
    `rollback` more tokens are held than are read, so that the window is still exact when so many tokens are taken back.
    `shift` says where the groups of a group-wise stream begin: after the sinks, which are then in no group; or at the first token,
    where the sinks are coded with the others and read from the overlay all the same. A server whose blocks begin at the first token
    needs the latter.
    `window_dtype` is "model", the model's type with 16 bits, or, for values alone, "fp8" (e4m3, without a scale): half the memory.
    The error is 2.6 % of a number, root mean square, where two bits have more than ten times that; 6 % at a standard deviation of
    0.01, and more below. What is beyond 448 becomes 448. Keys may have channels with large means, which eight bits do not hold.
    """

    sink: int = 0
    recent: int = 0
    flush: int = 1
    rollback: int = 0
    shift: bool = True
    window_dtype: Literal["model", "fp8"] = "model"

    def __post_init__(self) -> None:
        for name, least in (("sink", 0), ("recent", 0), ("flush", 1), ("rollback", 0)):
            if not least <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(f"{name} must be from {least} to {MOST_TOKENS} tokens, got {getattr(self, name)}")

    def packed_end(self, n: N) -> N:
        """Of n tokens, [min(n, sink), packed_end) are read from packed pages; n is a number or a tensor of numbers.

        packed_end = min(n, first) + floor(max(0, n - first - recent) / flush) * flush
        """
        past_first = n - self.first
        waiting = past_first - self.recent  # a product with x > 0 is max(0, x), of numbers and of tensors alike
        return n - past_first * (past_first > 0) + waiting * (waiting > 0) // self.flush * self.flush

    @property
    def first(self) -> int:
        """Position of the first token that is packed, where groups of tokens are: the others are counted from it."""
        return self.sink if self.shift else 0

    def to_dict(self) -> dict[str, Any]:
        out = super().to_dict()
        # digests and artifacts of windows with these values are those from before there was a choice
        if self.shift:
            del out["shift"]
        if self.window_dtype == "model":
            del out["window_dtype"]
        return out

    @property
    def in_model_dtype(self) -> Window:
        """The same tokens in the model's type: what decides where a token is read from."""
        return dataclasses.replace(self, window_dtype="model")

    @property
    def ring(self) -> int:
        """Full-precision tokens after the sinks that a sequence has to hold."""
        needed = self.recent + (self.flush if self.flush > 1 else 0)
        return needed + self.rollback if needed else 0


@dataclasses.dataclass(frozen=True)
class Stream(Spec):
    """What happens to the keys, or to the values.

    corrector  codes groups of tokens with an eye on the request's queries; its state belongs to the sequence.
    rope       "post" stores keys after RoPE. "pre" stores them before RoPE: they are rotated
               back by their position before the transforms and rotated again after decoding. "block" unrotates them
               to the start of their block of `rope_block` positions only, so that keys look alike at every position and a
               query has to be rotated once a block. A token's position is its place among the sequence's tokens.
    """

    codec: Codec
    transforms: tuple[Transform, ...] = ()
    window: Window = Window()
    corrector: Corrector | None = None
    rope: Literal["post", "pre", "block"] = "post"
    rope_block: int = 256

    def __post_init__(self) -> None:
        if self.rope_block < 1:
            raise ValueError(f"rope_block must be at least 1 position, got {self.rope_block}")
        group, flush = self.codec.group_tokens, self.window.flush
        if group == 1 and flush != 1:
            raise ValueError(f"flush must be 1 where every token is coded alone, got {flush}")
        if flush % group:
            raise ValueError(f"flush must be a multiple of the codec's group of {group} tokens, got {flush}")
        if self.corrector is not None:
            if group == 1:
                raise ValueError(f"{type(self.corrector).__name__} needs a codec that codes groups of tokens")
            self.corrector.check(self.codec)
        elif self.codec.ranked:
            raise ValueError(f"{type(self.codec).__name__} needs a corrector that says which tokens are salient")

    @property
    def groupwise(self) -> bool:
        return self.codec.group_tokens > 1

    @property
    def raw_window(self) -> bool:
        """Whether windows hold keys as the model gave them, after RoPE, instead of as they are coded: where keys are coded unrotated,
        a query then meets them as it is. The tail of a group is what will be coded, so it holds keys as they are coded."""
        return self.rope != "post" and not self.groupwise

    @property
    def effective_rope_block(self) -> int:
        """Positions of a block to whose start keys are unrotated; 0 where they are stored after RoPE."""
        return {"post": 0, "pre": 1, "block": self.rope_block}[self.rope]

    @property
    def parts(self) -> dict[str, Spec]:
        """Every part with fields of its own, under the name of its place."""
        named: dict[str, Spec] = {f"transforms[{i}]": part for i, part in enumerate(self.transforms)}
        named |= {"codec": self.codec, "window": self.window}
        return named if self.corrector is None else {**named, "corrector": self.corrector}

    def with_parts(self, parts: dict[str, Spec], **own: Any) -> Stream:
        """The stream made of parts under the names that `parts` gives them, and with other fields of its own."""
        transforms = tuple(part for place, part in parts.items() if place.startswith("transforms["))
        rest = {place: part for place, part in parts.items() if not place.startswith("transforms[")}
        return dataclasses.replace(self, transforms=transforms, **rest, **own)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Recipe(Spec):
    """A method. `name`, `paper` and `summary` are for people; everything else decides bytes.

    >>> import dataclasses, kvant
    >>> from kvant.recipe import Recipe, Stream, Window
    >>> int4 = kvant.recipe("int4").key.codec
    >>> keys = Stream(int4, window=Window(sink=4, recent=64))
    >>> values = Stream(dataclasses.replace(int4, bits=2), window=Window(sink=4, recent=64))
    >>> mine = Recipe("mine", key=keys, value=values, summary="keys of 4 bits, values of 2")
    >>> mine.calibrated, Recipe.from_dict(mine.to_dict()) == mine
    (False, True)
    """

    name: str
    key: Stream
    value: Stream
    paper: str = ""
    summary: str = ""

    def __post_init__(self) -> None:
        sinks = self.key.window.sink, self.value.window.sink
        if sinks[0] != sinks[1]:
            raise ValueError(f"keys and values must keep the same sink tokens, got k.sink={sinks[0]} v.sink={sinks[1]}")
        if self.key.window.shift != self.value.window.shift:
            raise ValueError("keys and values must begin their pages with the same token, got two values of shift")
        if self.value.rope != "post":
            raise ValueError("only keys are rotated by RoPE: a value stream cannot be stored before it")
        if self.key.window.window_dtype != "model":
            raise ValueError(
                "only windows of values may be fp8 (v.window_dtype=fp8): keys have channels that eight bits do not hold"
            )
        if self.value.window.window_dtype != "model" and (self.key.groupwise or self.value.groupwise):
            raise ValueError(
                "v.window_dtype=fp8 needs tokens that are coded one by one: the tail of a group is still to be coded"
            )
        if self.wants_rope and any(stream.codec.ranked for stream in self.streams.values()):
            raise ValueError("saliency is attention after RoPE: the keys cannot be stored before it")
        if self.value.corrector is not None and self.value.window != self.key.window:
            raise ValueError(
                "a corrector of the values looks at the same tokens' keys: both streams must have the same windows, "
                f"got {self.key.window} and {self.value.window}"
            )

    @property
    def origin(self) -> int:
        """Position of the first token of the first page. Sinks shift the grid of group-wise streams, unless `shift` is off."""
        return self.key.window.first if self.key.groupwise or self.value.groupwise else 0

    @property
    def digest(self) -> str:
        """Names what decides the stored bytes and how they are read."""
        data = {"key": self.key.to_dict(), "value": self.value.to_dict()}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether it needs an artifact that `kvant calibrate` fits."""
        return any(part.calibrated for stream in self.streams.values() for part in stream.parts.values())

    @property
    def fits(self) -> dict[str, str]:
        """Place of every calibrated part, e.g. "key.codec" -> a digest of what decides its tensors: the part and the
        parts of its stream before it. Windows come after, so recipes that differ in them alone share an artifact; so do
        those that differ in fields that a part lists in `fit_free`, where no other part was fitted behind it."""
        out: dict[str, str] = {}
        for name, stream in self.streams.items():
            before: list[object] = [stream.effective_rope_block] if stream.effective_rope_block else []
            for place, part in stream.parts.items():
                data = part.to_dict()
                if part.calibrated:
                    own = {key: value for key, value in data.items() if key not in getattr(part, "fit_free", ())}
                    text = json.dumps([*before, own], sort_keys=True)
                    out[f"{name}.{place}"] = hashlib.sha256(text.encode()).hexdigest()
                before.append(data)
        return out

    @property
    def not_prefix_safe(self) -> str | None:
        """Why pages may not be shared between requests, or None where they may: a page's bytes depend only on the
        tokens before its end, on the recipe and on the artifact."""
        for name, stream in self.streams.items():
            for part in stream.parts.values():
                reason = getattr(part, "fitted_on_request", None)
                if reason:
                    return f"{name} {type(part).__name__}: {reason}"
        return None

    @property
    def wants_queries(self) -> bool:
        """Whether new tokens have to come with their queries."""
        return any(stream.corrector is not None for stream in self.streams.values())

    @property
    def wants_rope(self) -> bool:
        """Whether keys are stored unrotated, so that the model's rotation has to be known."""
        return self.key.rope != "post"

    @property
    def attention_weighted(self) -> bool:
        """Whether calibration has to weigh tokens by what attention reads of them."""
        return any(
            getattr(part, "attention_weighted", False)
            for stream in self.streams.values()
            for part in stream.parts.values()
        )

    @property
    def streams(self) -> dict[Literal["key", "value"], Stream]:
        return {"key": self.key, "value": self.value}

    @property
    def geometry(self) -> tuple[tuple[Window, int, Corrector | None], ...]:
        """What decides where a token is read from, of keys and of values: window, tokens of a group, corrector."""
        return tuple((s.window.in_model_dtype, s.codec.group_tokens, s.corrector) for s in self.streams.values())

    @property
    def overridable(self) -> dict[str, str]:
        """Fields that `with_fields` accepts -> the type of each."""
        found: dict[str, str] = {}
        for stream in self.streams.values():
            hints = typing.get_type_hints(type(stream))
            found.update({name: _type_name(hints[name]) for name in OF_A_STREAM})
            for part in stream.parts.values():
                hints = typing.get_type_hints(type(part))
                found.update({field.name: _type_name(hints[field.name]) for field in dataclasses.fields(part)})
        return found

    def at(self, layer: int) -> Recipe:
        """The recipe of one layer."""
        return self

    def with_fields(self, fields: dict[str, str]) -> Recipe:
        """A copy with fields of its parts replaced, as a command line names them.

        `order=16` replaces every part's field of that name, in both streams; `k.order=16` or `v.order=16` in one.
        """
        sides: dict[str, tuple[Literal["key", "value"], ...]] = {
            "": ("key", "value"),
            "k": ("key",),
            "v": ("value",),
        }
        parts = {name: stream.parts for name, stream in self.streams.items()}
        changes: dict[tuple[Literal["key", "value"], str], dict[str, object]] = {}
        own: dict[str, dict[str, Any]] = {name: {} for name in self.streams}  # a stream's own fields
        for name, text in fields.items():
            side, _, field = name.rpartition(".")
            hits = 0
            for which in sides.get(side, ()):
                if field in OF_A_STREAM and (side or which == "key"):  # only keys know positions
                    hint = typing.get_type_hints(Stream)[field]
                    own[which][field] = parse_value(text, hint, field)
                    hits += 1
                for place, part in parts[which].items():
                    if any(f.name == field for f in dataclasses.fields(part)):
                        hint = typing.get_type_hints(type(part))[field]
                        changes.setdefault((which, place), {})[field] = parse_value(text, hint, field)
                        hits += 1
            if not hits:
                known = ", ".join(f"{key} ({kind})" for key, kind in sorted(self.overridable.items()))
                raise ValueError(
                    f"recipe {self.name} has no field {name!r}; it has {known}; a prefix k. or v. names one stream"
                )
        for (which, place), values in changes.items():  # a part's fields at once: they may only fit together
            parts[which][place] = dataclasses.replace(parts[which][place], **values)  # type: ignore[arg-type]
        label = ",".join(f"{key}={value}" for key, value in fields.items())
        return dataclasses.replace(
            self,
            name=f"{self.name}:{label}" if label else self.name,
            key=self.key.with_parts(parts["key"], **own["key"]),
            value=self.value.with_parts(parts["value"], **own["value"]),
        )


@dataclasses.dataclass(frozen=True)
class MixedRecipe(Recipe):
    """A recipe for every layer of one model, as `kvant tune` chooses them.

    recipes  the recipes that layers have, each once.
    layers   of every layer, the index of its recipe.

    All of them have the windows, groups of tokens and correctors of `key` and `value`, the streams of the recipe that the layers
    were tuned from: a token is then in the windows of all layers or of none, and layers share block tables. Layers differ in
    codecs, transforms and the type of windows, so their pages have different sizes.
    """

    recipes: tuple[Recipe, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or {*self.layers} != {*range(len(self.recipes))}:
            raise ValueError(
                "a mixed recipe names one of its recipes for every layer, and each of them at least once; got "
                f"{len(self.recipes)} recipes and the layers {list(self.layers)}"
            )
        if any(isinstance(recipe, MixedRecipe) for recipe in self.recipes):
            raise ValueError("a layer of a mixed recipe has one recipe, got a mixed one")
        for recipe in self.recipes:
            if recipe.geometry != self.geometry:
                raise ValueError(
                    "layers of a mixed recipe must have the same windows, groups of tokens and correctors, got "
                    f"{recipe.geometry} for {recipe.name} and {self.geometry} for {self.name}"
                )

    @staticmethod
    def of(name: str, base: Recipe, layers: Sequence[Recipe]) -> MixedRecipe:
        """The mixed recipe of these recipes, one for each layer."""
        distinct = tuple(dict.fromkeys(layers))
        index = {recipe: i for i, recipe in enumerate(distinct)}
        summary = f"{len(distinct)} recipes for {len(layers)} layers, chosen by kvant tune"
        return MixedRecipe(
            name, base.key, base.value, base.paper, summary, distinct, tuple(index[recipe] for recipe in layers)
        )

    def at(self, layer: int) -> Recipe:
        return self.recipes[self.layers[layer]]

    def __iter__(self) -> Iterator[Recipe]:
        """The recipe of every layer."""
        return (self.recipes[i] for i in self.layers)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([recipe.digest for recipe in self]).encode()).hexdigest()

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        return any(recipe.calibrated for recipe in self.recipes)

    @property
    def fits(self) -> dict[str, str]:
        return {f"layers[{layer}].{place}": digest for layer, r in enumerate(self) for place, digest in r.fits.items()}

    @property
    def not_prefix_safe(self) -> str | None:
        return next((reason for r in self.recipes if (reason := r.not_prefix_safe) is not None), None)

    @property
    def wants_queries(self) -> bool:
        return any(recipe.wants_queries for recipe in self.recipes)

    @property
    def wants_rope(self) -> bool:
        return any(recipe.wants_rope for recipe in self.recipes)

    @property
    def attention_weighted(self) -> bool:
        return any(recipe.attention_weighted for recipe in self.recipes)

    def with_fields(self, fields: dict[str, str]) -> Recipe:
        """A copy with fields replaced in the recipe of every layer."""
        layers = [recipe.with_fields(fields) for recipe in self]
        base = Recipe(self.name, self.key, self.value, self.paper, self.summary).with_fields(fields)
        return MixedRecipe.of(base.name, base, layers)


def _type_name(hint: object) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint))


class Span(NamedTuple):
    """Tokens [start, stop) of a sequence, and where their keys and values are read from."""

    start: int
    stop: int
    key: Literal["packed", "full"]
    value: Literal["packed", "full"]


def spans(recipe: Recipe, n: int) -> tuple[Span, ...]:
    """Where each of the n tokens of a sequence is read from: a pure function of the length, at most four spans."""
    edges = {0, n}
    packed: dict[str, tuple[int, int]] = {}
    for name, stream in recipe.streams.items():
        packed[name] = (min(n, stream.window.sink), stream.window.packed_end(n))
        edges.update(packed[name])
    ordered = sorted(edges)

    def place(name: str, start: int) -> Literal["packed", "full"]:
        first, last = packed[name]
        return "packed" if first <= start < last else "full"

    out: list[Span] = []
    for start, stop in itertools.pairwise(ordered):
        span = Span(start, stop, place("key", start), place("value", start))
        if out and out[-1][2:] == span[2:]:
            span = Span(out.pop().start, *span[1:])
        out.append(span)
    return tuple(out)
