"""Specs: frozen dataclasses that describe a part of a recipe and round-trip through JSON.

A spec holds numbers and names only; tensors live in the objects that a spec is bound to. Every concrete spec registers
itself under its class name, so that a new codec or transform can be read from JSON without further registration.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import types
import typing
from typing import Any, ClassVar, Literal, NamedTuple, Self


def discover(package: str) -> None:
    """Imports every module of a package, so that what it defines registers itself. A broken import raises."""
    module = importlib.import_module(package)
    for info in pkgutil.iter_modules(module.__path__):
        importlib.import_module(f"{package}.{info.name}")


def split_names(text: str) -> list[str]:
    """The items of a comma-separated list of names with options: "a:x=1,y=2,b" -> ["a:x=1,y=2", "b"]. An option's value may have a
    colon, a name no equals sign."""
    out: list[str] = []
    for item in text.split(","):
        if out and "=" in item.partition(":")[0]:
            out[-1] += f",{item}"
        elif item.strip():
            out.append(item.strip())
    return out


def parse_json(text: str | bytes) -> Any:
    """As json.loads; whatever is wrong with the text raises ValueError, lists in lists without end too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class Expected(NamedTuple):
    """A calibrated tensor as a part needs it. All of them are floating-point numbers and finite.

    being  any; nonzero: not all of them zero; weights: that, and none negative; positive: all of them; ratio: in (0, 1];
           invertible, orthogonal: of the last two dimensions.
    """

    shape: tuple[int, ...]
    being: Literal["any", "nonzero", "weights", "positive", "ratio", "invertible", "orthogonal"] = "any"


@dataclasses.dataclass(frozen=True)
class Spec:
    """Base of all parts of a recipe."""

    registry: ClassVar[dict[str, type[Spec]]] = {}
    calibrated: ClassVar[bool] = False  # whether it needs tensors from an artifact

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        other = Spec.registry.setdefault(cls.__name__, cls)
        if other is not cls and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"two specs are called {cls.__name__}: in {other.__module__} and {cls.__module__}")
        Spec.registry[cls.__name__] = cls

    def expects(self, heads: int, head_dim: int) -> dict[str, Expected]:
        """The tensors that this part needs from an artifact for one layer, by name."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"kind": class name, field: value, ...}."""
        out: dict[str, Any] = {"kind": type(self).__name__}
        for field in dataclasses.fields(self):
            out[field.name] = _plain(getattr(self, field.name))
        return out

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads what `to_dict` wrote; refuses anything else by name."""
        if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
            raise ValueError(f"a spec is an object with a 'kind', got {data!r}")
        kind = data["kind"]
        found = Spec.registry.get(kind)
        if found is None or not issubclass(found, cls):
            known = sorted(name for name, spec in Spec.registry.items() if issubclass(spec, cls))
            raise ValueError(f"unknown {cls.__name__} kind {kind!r}; known: {', '.join(known)}")
        fields = {field.name for field in dataclasses.fields(found)}
        unknown = sorted(set(data) - fields - {"kind"})
        if unknown:
            raise ValueError(f"{kind} has no field {', '.join(unknown)}; it has {', '.join(sorted(fields))}")
        hints = typing.get_type_hints(found)
        values = {name: _read(value, hints[name], f"{kind}.{name}") for name, value in data.items() if name != "kind"}
        return found(**values)  # type: ignore[return-value]

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_json(text))


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _read(value: Any, hint: Any, where: str) -> Any:
    """A JSON value as the type that a field declares."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, dict):
        for option in options:
            if isinstance(option, type) and issubclass(option, Spec):
                return option.from_dict(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_read(item, typing.get_args(hint)[0], where) for item in value)
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{where} must be one of {', '.join(map(str, typing.get_args(hint)))}, got {value!r}")
        return value
    if float in options and isinstance(value, int) and not isinstance(value, bool) and int not in options:
        return float(value)
    allowed = tuple(option for option in options if isinstance(option, type))
    if allowed and not (isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed)):
        raise ValueError(f"{where} must be {' or '.join(a.__name__ for a in allowed)}, got {value!r}")
    return value


def parse_tokens(text: str) -> int:
    """A number of tokens from a command line: "8192", "32k" with k = 1024, or "1M" with M = 1024 k."""
    unit = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower())
    try:
        return int(text) if unit is None else int(text[:-1]) * unit
    except ValueError:
        raise ValueError(f"expected a number of tokens such as 8192 or 32k, got {text!r}") from None


def parse_value(text: str, hint: Any, name: str) -> Any:
    """Text from a command line as the type that a field declares."""
    if typing.get_origin(hint) is typing.Literal:
        for option in typing.get_args(hint):
            if text == str(option):
                return option
        raise ValueError(f"{name} must be one of {', '.join(map(str, typing.get_args(hint)))}, got {text!r}")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    if bool in options:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise ValueError(f"{name} must be true or false, got {text!r}")
    for kind in (int, float):
        if kind in options:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in options:
        return text
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{name} must be {names}, got {text!r}")
