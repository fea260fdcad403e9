"""CUDA graphs on a CPU: operations of torch are recorded while a graph is captured, and done again on the same tensors when it is
replayed. Nothing that capturing did stays, and what would wait for a GPU, or bring numbers to it, is refused as a GPU refuses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {
    *("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "repeat_interleave", "bincount"),
    *("unique_dim", "_unique2", "unique_consecutive", "lift_fresh"),  # the last one brings numbers from the host
}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: its bytes, and those before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        masks = [
            x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.ndim
        ]
        if name in WAITS or (name.startswith("index") and masks and name != "index_select"):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for argument, value in [
            *zip(func._schema.arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
        ]:
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.saved:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self.saved[storage.data_ptr()] = whole, whole.clone()
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class Graph:
    """As torch.cuda.CUDAGraph."""

    replays = 0

    def __init__(self) -> None:
        self.recorder = Recorder()

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.recorder.calls:
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            if made and not writes and all(x.untyped_storage().data_ptr() in given for x in made):
                continue  # a view of what has been computed already
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for old, new in zip(made, again, strict=True):
                if old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


class Stream:
    cuda_stream, device = 0, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


def install(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Makes torch.cuda's graphs recorded ones; the list has those that were captured."""
    captured: list[Graph] = []
    capturing = [False]

    @contextlib.contextmanager
    def graph(made: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert isinstance(stream, Stream) and capture_error_mode == "thread_local"
        capturing[0] = True
        try:
            with made.recorder:
                yield
        finally:
            capturing[0] = False
            for whole, before in made.recorder.saved.values():
                whole.copy_(before)
        captured.append(made)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return captured
