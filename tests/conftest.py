"""What all tests share. Memory that nothing has written is poisoned, so that reading it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from kvant import models
from kvant.cache import growth
from kvant.layout import Layout
from kvant.ops import LayerStore
from tests.order import OtherOrder

settings.register_profile("kvant", deadline=None, max_examples=25, derandomize=True)  # the same at every run
settings.load_profile("kvant")
torch.set_num_threads(1)  # tiny tensors: threads cost more than they give


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, help="so many random examples of the cache's state machine")
    parser.addoption("--schedules", type=int, default=500, help="random schedules of two tenants' requests")
    parser.addoption("--all", action="store_true", help="the slow tests too: ./scripts/test --all")
    parser.addoption("--other-order", action="store_true", help="torch adds in another order: see tests/order.py")
    parser.addoption(
        "--model-runner-v2",
        action="store_true",
        help="tests marked runner_v2, with vLLM's model runner V2, and no others",
    )
    parser.addoption(
        "--vllm-device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where engines of tests/engines/vllm run; with cuda, tests marked cell and no others",
    )
    parser.addoption(
        "--vllm-table", metavar="FILE", help="write what became of the tests marked cell to FILE (JSON) and FILE.md"
    )
    parser.addoption(
        "--vllm-timeout", type=float, metavar="S", help="seconds of a test inside vLLM (default with cuda: 240)"
    )
    parser.addoption(
        "--mutations", type=int, help="damaged snapshots and artifacts that are read: 10000 with --all, else 1000"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick tier: no test that is marked slow; of one that is marked few(n), n cases; of any other with several parameters, as
    many combinations as it takes for every value of each to occur. --all runs everything; so does asking for a test by its name.
    --model-runner-v2 runs tests that are marked runner_v2(n) alone, and n cases of each in the quick tier."""
    if config.getoption("--vllm-device") != "cpu":
        return  # tests/engines/vllm/conftest.py chooses
    v2 = config.getoption("--model-runner-v2")
    chosen = [item for item in items if not v2 or item.get_closest_marker("runner_v2")]
    if not config.getoption("--all") and not any("::" in str(arg) for arg in config.args):
        cases: dict[str, list[pytest.Item]] = {}
        for item in chosen:
            if v2 or item.get_closest_marker("slow") is None:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        quick = {id(item) for same in cases.values() for item in covering(same, "runner_v2" if v2 else "few")}
        chosen = [item for item in chosen if id(item) in quick]
    left = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = chosen


def covering(cases: list[pytest.Item], mark: str = "few") -> list[pytest.Item]:
    """The cases of a test that the quick tier runs; `mark` says how many, where it is there."""
    few = cases[0].get_closest_marker(mark)
    if few is not None:  # from end to end of its list
        count = min(few.args[0], len(cases))
        return [cases[i * len(cases) // count] for i in range(count)]
    values = {id(item): values_of(item) for item in cases}
    missing, out = set().union(*values.values()), []
    if len(cases) == 1 or not missing:
        return cases
    while missing:
        best = max(cases, key=lambda item: len(values[id(item)] & missing))  # the first of equals
        missing -= values[id(best)]
        out.append(best)
    return out


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """A case's value of each parameter; those that one `parametrize` gives together are one."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    out = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        out.add((names, repr([params.pop(name.strip()) for name in names.split(",")])))
    return out | {(name, repr(value)) for name, value in params.items()}  # of fixtures


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _other_order(request: pytest.FixtureRequest) -> Iterator[None]:
    with OtherOrder() if request.config.getoption("--other-order") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh pages are 0xFF, fresh overlays NaN."""
    allocate, grown = LayerStore.allocate, growth.resized

    def poisoned(*args: object, **kwargs: object) -> LayerStore:
        store = allocate(*args, **kwargs)  # type: ignore[arg-type]
        poison(store)
        return store

    def poisoned_grown(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        out = grown(tensor, rows)
        out[len(tensor) :] = 0xFF if out.dtype == torch.uint8 else float("nan")
        return out

    monkeypatch.setattr(LayerStore, "allocate", staticmethod(poisoned))
    monkeypatch.setattr(growth, "resized", poisoned_grown)


def poison(store: LayerStore) -> None:
    store.pages.fill_(0xFF)
    for owned in store.owned:
        owned.fill_(float("nan"))


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last len(q) of len(k) tokens, one query at a time in float64: [tokens, heads, dim] each."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        stop = len(k) - len(q) + i + 1
        start = 0 if sliding_window is None else max(0, stop - sliding_window)
        for head in range(q.shape[1]):
            scores = k[start:stop, head // group] @ q[i, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[i, head] = torch.softmax(scores, 0) @ v[start:stop, head // group]
    return out


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def make_layout(recipe: object, heads: int = 2, head_dim: int = 64, **options: object) -> Layout:
    from kvant import recipes

    return Layout.of(recipes.get(recipe), heads, head_dim, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def smollm2() -> tuple[object, object]:
    """The real model and its tokenizer."""
    if not (models.cache_dir() / "smollm2-135m-instruct" / "config.json").exists():
        pytest.skip("SmolLM2 has not been fetched: run ./scripts/test, or any kvant command with --model smollm2")
    return models.load("smollm2")
