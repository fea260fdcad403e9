"""Generation in a CUDA graph, all of it on a CPU: the kernels' own text by emulation, and graphs by recording."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kvant
from kvant.engines import graphs
from kvant.ops import registry
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import counters, refusals
from tests.engines import recorded
from tests.engines.test_graphs import assert_same_cache, made_up_artifact, ragged
from tests.engines.test_hf import make_model, prompt
from tests.needs import needs_compiler
from tests.ops.emulated.conftest import device  # noqa: F401  (kernels run here)

pytestmark = needs_compiler


@pytest.fixture
def captured(device: None, monkeypatch: pytest.MonkeyPatch) -> list[recorded.Graph]:  # noqa: F811
    """The CUDA kernels serve a CPU, and what they serve can be captured."""
    for op, refuse in (("append", cuda_append.refuse_layout), ("decode", refusals.refuse_layout)):
        found = registry._FOUND[op, "cuda"]  # type: ignore[index]
        here = dataclasses.replace(found, refuse=lambda layout, _, refuse=refuse: refuse(layout), rank=99)  # type: ignore[misc]
        monkeypatch.setitem(registry._FOUND, (op, "cuda"), here)  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    return recorded.install(monkeypatch)


def served(recipe: str) -> tuple[Any, kvant.Cache]:
    model = make_model("qwen3", num_hidden_layers=2, num_attention_heads=4)
    return model, kvant.Cache(model, recipe, artifact=made_up_artifact(model, recipe), order="fragment")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "recipe",
    [
        "saw-int4",
        "oscar:sink=3,recent=10",
        "kvant-2",
        "kivi-k2v2:k.flush=32,v.recent=32",  # a group is completed on the way
        "kitty-pro:k.group=32,k.flush=32,v.recent=32,sink=3",
    ],
)
def test_a_replayed_graph_generates_what_steps_do(recipe: str, captured: list[recorded.Graph]) -> None:
    """Ragged prompts, across pages, sinks and rings; the graph is captured once, with no word to the host."""
    outputs, caches = [], []
    for graph in (False, True):
        model, cache = served(recipe)
        batch = ragged([60, 1])
        options: dict[str, Any] = {"attention_mask": batch["attention_mask"], "max_new_tokens": 8, "do_sample": False}
        outputs.append(cache.generate(model, batch["inputs"], graph=graph, **options))
        assert {cache.implementation(op, model.device) for op in ("append", "decode")} == {"cuda"}
        caches.append(cache)
    assert len(captured) == 1 and captured[0].replays == 7 - graphs.WARM_UP
    assert torch.equal(*outputs)
    assert_same_cache(caches[1], caches[0])


def test_counters_of_a_graph_are_its_own(captured: list[recorded.Graph]) -> None:
    """A graph for every generation takes nothing from what all graphs share."""
    model, cache = served("saw-int4")
    taken = []
    for _ in range(2):
        cache.generate(model, prompt(2, 3), graph=True, max_new_tokens=5, do_sample=False)
        taken.append(counters._POOLS[torch.device("cpu")].taken)
    assert len(captured) == 2 and taken[0] == taken[1]


def test_a_step_that_waits_for_the_device_is_named(captured: list[recorded.Graph]) -> None:
    model, cache = served("saw-int4")
    hook = model.model.layers[1].register_forward_hook(lambda *args: float(args[2].sum()) and None)
    message = "a step of this qwen3 cannot be captured in a CUDA graph .*not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match=message):
        cache.generate(model, prompt(2, 3), graph=True, max_new_tokens=6, do_sample=False)
    hook.remove()
    assert not captured and cache.get_seq_length() == 3 + graphs.WARM_UP
    longer = cache.generate(model, prompt(2, 3), graph=True, max_new_tokens=6, do_sample=False)
    assert len(captured) == 1 and longer.shape == (2, 9)
