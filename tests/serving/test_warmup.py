"""Warm-up calls every operation as a step of vLLM does, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.bench.synthetic import Shape, fitted
from kvant.layout import Layout
from kvant.ops import OPS, LayerStore, choose
from kvant.serving.overlay import from_first_token, without_windows
from kvant.serving.warmup import LargestStep, warm_up
from tests.calibrate.synthetic import rope_of


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        *((name, windows) for name in ("saw-int4", "oscar", "kvant-2", "vecinfer-2") for windows in (True, False)),
        *((name, True) for name in ("kitty-pro", "squat")),
    ],
)
def test_every_operation_is_called_and_nothing_stays(name: str, windows: bool) -> None:
    recipe = from_first_token(recipes.get(name)) if windows else without_windows(recipes.get(name))
    layout = Layout.of(recipe, 2, 64, dtype="float32")
    tensors = fitted(recipe, Shape(1, 1, 4, 2, 64, "float32"), "cpu")
    store = LayerStore.allocate(layout, 0, 0, "cpu", tensors, rope_of(64) if recipe.wants_rope else None)
    called = list[tuple[str, int, bool]]()

    def heard(op: Any) -> Any:
        found = choose(op, layout, torch.device("cpu"), None)

        def run(store: LayerStore, x: torch.Tensor, *rest: Any, **options: Any) -> Any:
            out = found.run(store, x, *rest, **options)
            called.append((op, len(x), not isinstance(out, torch.Tensor) or bool(torch.isfinite(out).all())))
            return out

        return dataclasses.replace(found, run=run)

    largest = LargestStep(sequences=3, tokens=1000, new=70)
    assert warm_up({op: heard(op) for op in OPS}, store, 4, torch.float32, largest, history=150) == 0
    expected = [("append", 150), ("append", 1), ("decode", 1), ("decode", 3), ("prefill", 70)]
    assert called == [(*call, True) for call in expected]
    warm_up({op: heard(op) for op in OPS}, store, 4, torch.float32, largest, history=150, reads=False)
    assert [call[:2] for call in called[len(expected) :]] == expected[:2]
    assert store.pages.numel() == 0 and not store.derived and not any(state.numel() for state in store.states.values())


@pytest.mark.parametrize(("heads", "sequences", "counts"), [(2, 3, [1, 3]), (2, 70, [1, 64, 70]), (200, 2, [1, 2])])
def test_decode_is_warm_at_every_size_that_may_have_kernels_of_its_own(
    heads: int, sequences: int, counts: list[int]
) -> None:
    """The largest low batch allocates more than a high one where a kernel makes its queries (kvant-2)."""
    layout = Layout.of(recipes.get("saw-int4"), heads, 64, dtype="float32")
    store = LayerStore.allocate(layout, 0, 0, "cpu", {}, None)
    called: list[int] = []
    ops = {op: choose(op, layout, torch.device("cpu"), None) for op in OPS}
    decode = ops["decode"]

    def run(store: LayerStore, x: torch.Tensor, *rest: Any, **options: Any) -> Any:
        called.append(len(x))
        return decode.run(store, x, *rest, **options)

    ops["decode"] = dataclasses.replace(decode, run=run)
    warm_up(ops, store, heads, torch.float32, LargestStep(sequences, 80, 3), history=64)
    assert called == counts


def test_with_a_sliding_window_both_ways_of_prefill_are_warm() -> None:
    """Prefill on a GPU has other kernels for sequences that the window covers than for longer ones."""
    layout = Layout.of(recipes.get("saw-int4"), 2, 64, dtype="float32")
    store = LayerStore.allocate(layout, 0, 0, "cpu", {}, None)
    windows: dict[str, list[int | None]] = {op: [] for op in OPS}

    def heard(op: Any) -> Any:
        found = choose(op, layout, torch.device("cpu"), None)

        def run(*args: Any, **options: Any) -> Any:
            windows[op].append(options.get("sliding_window"))
            return found.run(*args, **options)

        return dataclasses.replace(found, run=run)

    largest = LargestStep(sequences=1, tokens=1000, new=70)
    warm_up({op: heard(op) for op in OPS}, store, 4, torch.float32, largest, history=150, sliding_window=100)
    assert windows["decode"] == [100] and windows["prefill"] == [100, None]
