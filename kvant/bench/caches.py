"""Decode speed of one real model with several caches: transformers' caches, llama.cpp's where it is installed, and kvant's.

Every cache is warmed up: one like it reads a few tokens untimed. Then every cache is filled with the same tokens once, and all
decode the same next tokens, a few steps each in turn, so that their contexts stay equal and other load on the machine affects all
of them alike.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from kvant.artifact import Artifact
from kvant.bench.timing import HOPELESS, Run, compared, timed
from kvant.recipe import Recipe

Tensor = torch.Tensor
WARM_UP = 256  # tokens of an untimed prompt: more than QuantizedCache and recipes keep in full precision
LLAMA_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml's type numbers


class Reader(Protocol):
    """A model with one cache, to which tokens are fed."""

    name: str
    by: str

    def warm_up(self, tokens: Sequence[int]) -> None:
        """Reads tokens, and the last one as a decode step, without leaving anything in the cache."""

    def read(self, tokens: Sequence[int]) -> None:
        """Feeds more tokens to the model, up to the logits of the last one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""


@dataclasses.dataclass
class Result:
    name: str
    by: str  # implementation of attention
    context: int
    prompt_seconds: float
    tokens_per_second: float = 0.0
    low: float = 0.0  # quartiles of tokens_per_second
    high: float = 0.0
    disturbed: int = 0  # steps during which other processes took a core
    times: float = 0.0  # speed relative to DynamicCache
    append: float | None = None  # shares of a step
    decode: float | None = None
    cache_bytes: int = 0


class OfTransformers:
    """The model in transformers, with one of its caches, which `make` makes."""

    def __init__(self, model: Any, name: str, make: Callable[[], Any]) -> None:
        self.model, self.name, self.make, self.by = model, name, make, "sdpa"
        self.cache = make()

    def warm_up(self, tokens: Sequence[int]) -> None:
        own, self.cache = self.cache, self.make()
        self.read(tokens[:-1])
        self.read(tokens[-1:])
        self.cache = own

    def read(self, tokens: Sequence[int]) -> None:
        self.model.config._attn_implementation = self.by  # another cache may have changed it
        ids = torch.tensor([list(tokens)])
        self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(vars(layer)) for layer in self.cache.layers)


def _nbytes(found: Any) -> int:
    """Bytes of all tensors in nested containers, including those that quanto's tensors wrap."""
    if isinstance(found, torch.Tensor):
        inner = [getattr(found, name) for name in ("_data", "_scale", "_shift") if hasattr(found, name)]
        return sum(map(_nbytes, inner)) if inner else found.nbytes
    if isinstance(found, dict):
        return sum(map(_nbytes, found.values()))
    return sum(map(_nbytes, found)) if isinstance(found, list | tuple) else 0


class Packed(OfTransformers):
    """The model in transformers, with a recipe's cache; measures the time in append and decode."""

    def __init__(self, model: Any, recipe: Recipe, artifact: Artifact | None, implementation: str | None) -> None:
        from kvant.engines.hf import Cache

        made = functools.partial(Cache, model, recipe, artifact=artifact, implementation=implementation)
        super().__init__(model, recipe.name, made)
        self.by = "kvant"
        self.seconds = {"append": 0.0, "decode": 0.0}

    def read(self, tokens: Sequence[int]) -> None:
        fresh = not self.cache.groups
        super().read(tokens)
        if fresh:
            for group in self.cache.groups:
                for name in self.seconds:
                    setattr(group.paged, name, self._clocked(name, getattr(group.paged, name)))

    def _clocked(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            out = run(*args, **options)
            self.seconds[name] += time.perf_counter() - start
            return out

        return clocked

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes_used)


class OfLlama:
    """The model in llama.cpp, from a GGUF file."""

    by = "llama.cpp"

    def __init__(self, path: Path, kind: str, context: int) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self.name, self.context, self.kind = f"llama.cpp {kind}", context, kind
        self.model = Llama(
            model_path=str(path),
            n_ctx=context,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=LLAMA_TYPES[kind],
            type_v=LLAMA_TYPES[kind],
            flash_attn=True,  # llama.cpp needs it for a quantized cache
            verbose=False,
        )

    def warm_up(self, tokens: Sequence[int]) -> None:
        self.read(tokens[:-1])
        self.read(tokens[-1:])
        self.model.reset()

    def read(self, tokens: Sequence[int]) -> None:
        self.model.eval(list(tokens))

    @property
    def nbytes(self) -> int:
        return 0  # llama.cpp does not report it


def contenders(
    model: Any,
    recipes: Sequence[Recipe],
    artifacts: Mapping[str, Artifact | None],
    implementation: str | None,
    context: int,
    gguf: Callable[[], Path] | None,
) -> tuple[list[Reader], dict[str, str]]:
    """All readers, DynamicCache first, and the missing ones with the reason."""
    from transformers import DynamicCache, QuantizedCache

    found: list[Reader] = [OfTransformers(model, "DynamicCache", functools.partial(DynamicCache, config=model.config))]
    missing = {}
    for backend, package in (("hqq", "hqq"), ("quanto", "optimum.quanto")):
        name = f"QuantizedCache {backend}"
        if importlib.util.find_spec(package.split(".")[0]) is None:
            missing[name] = f"not installed: pip install {package.replace('.', '-')}"
            continue
        axis = 1 if backend == "hqq" else 0
        made = functools.partial(QuantizedCache, backend, model.config, axis_key=axis, axis_value=axis)
        found.append(OfTransformers(model, name, made))
    if importlib.util.find_spec("llama_cpp") is None:
        missing["llama.cpp"] = "not installed: pip install llama-cpp-python"
    elif gguf is None:
        missing["llama.cpp"] = "there is no GGUF file of this model"
    else:
        found += [OfLlama(gguf(), kind, context) for kind in LLAMA_TYPES]
    found += [Packed(model, recipe, artifacts[recipe.name], implementation) for recipe in recipes]
    return found, missing


def _hopeless(readers: Sequence[Reader], steps: Mapping[str, Sequence[Run]]) -> list[Reader]:
    """Caches of others whose fastest step is HOPELESS times slower than the first reader's."""
    fastest = {name: min(seconds for seconds, _ in runs) for name, runs in steps.items()}
    limit = HOPELESS * fastest[readers[0].name]
    return [reader for reader in readers if not isinstance(reader, Packed) and fastest[reader.name] >= limit]


@torch.inference_mode()
def measure(
    readers: Sequence[Reader],
    tokens: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int,
    repeat: int,
    say: Callable[[str], None],
) -> list[Result]:
    """Times decode steps after each of `contexts` tokens: `repeat` rounds, in each `new_tokens` steps of every reader. After the
    first round, caches of others that are ten times slower than DynamicCache, the first reader, are left out, which `say` is
    told."""
    results = []
    readers = list(readers)
    at = 0
    for reader in readers:
        reader.warm_up(tokens[: min(WARM_UP + 1, *contexts)])
    for context in sorted(contexts):
        if context <= at:
            raise ValueError(f"contexts must be {repeat * new_tokens} tokens apart, got {list(contexts)}")
        found = []
        for reader in readers:
            say(f"{reader.name} reads {context - at} tokens")
            start = time.perf_counter()
            reader.read(tokens[at:context])
            found.append(Result(reader.name, reader.by, context, time.perf_counter() - start))
        say(f"{repeat} times {new_tokens} steps of each after {context} tokens, in turn")
        at = context
        steps: dict[str, list[Run]] = {reader.name: [] for reader in readers}
        spent: dict[str, dict[str, float]] = {}
        for reader in readers:
            if isinstance(reader, Packed):
                reader.seconds = spent[reader.name] = dict.fromkeys(reader.seconds, 0.0)
        for _ in range(repeat):
            for reader in readers:
                for token in tokens[at : at + new_tokens]:
                    steps[reader.name].append(timed(functools.partial(reader.read, [token])))
            at += new_tokens
            for reader in _hopeless(readers, steps):
                say(f"left out, since it is at least {HOPELESS:.0f} times slower than {readers[0].name}: {reader.name}")
                del found[readers.index(reader)], steps[reader.name]
                readers.remove(reader)
        times = compared(steps)
        for result, reader in zip(found, readers, strict=True):
            took = times[reader.name]
            result.tokens_per_second, result.low, result.high = 1 / took.median, 1 / took.high, 1 / took.low
            result.times, result.disturbed = times[readers[0].name].median / took.median, took.disturbed
            result.cache_bytes = reader.nbytes
            if isinstance(reader, Packed):
                result.by = reader.cache.groups[0].paged.ops["decode"].name
                total = sum(seconds for seconds, _ in steps[reader.name])
                result.append, result.decode = (spent[reader.name][name] / total for name in ("append", "decode"))
        results += found
    return results
