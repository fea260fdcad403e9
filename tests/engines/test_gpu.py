"""The transformers engine on a GPU: the kernels are taken, and the model says what it says with the reference."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant.engines import graphs
from tests.conftest import relative_error
from tests.engines.test_graphs import assert_same_cache, made_up_artifact, ragged
from tests.engines.test_hf import make_model

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def model(dtype: torch.dtype) -> Any:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.02}
    return make_model("qwen3", vocab_size=300, hidden_size=256, intermediate_size=384, num_hidden_layers=3, **shape).to(
        "cuda", dtype
    )


@pytest.mark.parametrize(("recipe", "limit"), [("int8", 5e-3), ("saw-int4", 2e-2), ("quarot-int2-win", 5e-2)])
def test_steps_are_those_of_the_reference(recipe: str, limit: float) -> None:
    """A padded batch, prefilled in two chunks and then fed a few tokens one by one. A code that falls to the other side in one
    layer moves all layers after it, the more the fewer bits it has."""
    net = model(torch.float32)
    ids = torch.randint(0, 300, (2, 430), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    outputs = []
    for implementation in (None, "reference"):
        cache = kvant.Cache(net, recipe, implementation=implementation)
        logits = []
        with torch.no_grad():
            for first, last in [(0, 300), (300, 420), *((i, i + 1) for i in range(420, 430))]:
                step = net(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True)
                logits.append(step.logits[:, -1])
        names = {op: chosen.name for op, chosen in cache.groups[0].paged.ops.items()}
        expected = {"append": "cuda", "decode": "cuda", "prefill": "cuda"}
        assert names == (expected if implementation is None else dict.fromkeys(expected, "reference"))
        outputs.append(torch.stack(logits))
    assert relative_error(outputs[0], outputs[1]) < limit


def test_generate_in_16_bits() -> None:
    net = model(torch.bfloat16)
    ids = torch.randint(0, 300, (3, 90), device="cuda")
    out = net.generate(ids, past_key_values=kvant.Cache(net, "saw-int4"), max_new_tokens=8, do_sample=False)
    assert out.shape == (3, 98)


@pytest.mark.filterwarnings("ignore:prefill of recipe .* is the plain torch reference:UserWarning")  # of groups
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("saw-int4", torch.float32),
        ("saw-int4", torch.bfloat16),
        ("oscar", torch.bfloat16),
        ("oscar:sink=3,recent=10", torch.bfloat16),
        ("kvant-2", torch.bfloat16),
        ("kivi-k2v2:k.flush=32,v.recent=32", torch.bfloat16),
        ("kitty-pro:k.group=32,k.flush=32,v.recent=32,sink=3", torch.bfloat16),
        ("squat", torch.bfloat16),
        ("squat-pre", torch.bfloat16),
    ],
)
def test_generation_in_a_graph_is_generation(recipe: str, dtype: torch.dtype) -> None:
    """Tokens and page bytes: with the engine's steps, with steps whose bookkeeping is on the device, and with those in a graph.
    Prompts are padded, one is a single token; pages, sinks and rings are crossed."""
    net = model(dtype)
    artifact = made_up_artifact(net, recipe)
    batch = {name: x.cuda() for name, x in ragged([150, 70, 1]).items()}
    caches, said = [], []
    for method in ("engine", "device", "graph"):
        cache = kvant.Cache(net, recipe, artifact=artifact)
        options: dict[str, Any] = {"max_new_tokens": 80, "do_sample": False, "attention_mask": batch["attention_mask"]}
        if method == "device":
            options["custom_generate"] = functools.partial(graphs.sample, capture=False)
        out = cache.generate(net, batch["inputs"], graph=method == "graph", **options)
        assert {cache.implementation(op, net.device) for op in ("append", "decode")} == {"cuda"}
        caches.append(cache)
        said.append(out)
    assert torch.equal(said[1], said[2])
    assert_same_cache(caches[2], caches[1])
    assert torch.equal(said[0], said[1])
    assert_same_cache(caches[1], caches[0])


def test_a_graph_is_captured_once_and_replayed() -> None:
    net = model(torch.bfloat16)
    cache, eager = (kvant.Cache(net, "saw-int4", max_tokens=512) for _ in range(2))
    ids = torch.randint(0, 300, (4, 100), device="cuda")
    with torch.no_grad():
        net(ids, past_key_values=cache)
        net(ids, past_key_values=eager)
        with cache.decoder(net, 28) as decode, eager.decoder(net, 28, graph=False) as plain:
            for step in range(28):
                token = torch.randint(0, 300, (4,), device="cuda")
                assert torch.equal(decode(token), plain(token))
                run = decode._run
                assert isinstance(run, graphs.Replay)
                assert (run.graph is not None) == (step >= graphs.WARM_UP)
    assert_same_cache(cache, eager)


def test_kernels_that_wait_for_the_gpu_are_refused() -> None:
    net = model(torch.bfloat16)
    ids = torch.randint(0, 300, (2, 50), device="cuda")
    with pytest.raises(ValueError, match="append of recipe saw-int4 is 'reference' here"):
        kvant.Cache(net, "saw-int4", implementation="reference").generate(net, ids, graph=True, max_new_tokens=9)


WAITING = """
import os, torch, kvant
from kvant.engines import graphs
from tests.engines.test_gpu import model

net = model(torch.bfloat16)
net.model.layers[1].register_forward_hook(lambda *args: float(args[2].sum()) and None)
cache = kvant.Cache(net, "saw-int4")
try:
    cache.generate(net, torch.randint(0, 300, (2, 50), device="cuda"), graph=True, max_new_tokens=9, do_sample=False)
except RuntimeError as error:
    print(error, flush=True)
assert cache.get_seq_length() == 50 + graphs.WARM_UP, cache
os._exit(0)  # whatever torch may have to say about it at the end
"""


def test_a_model_that_waits_for_the_gpu_is_refused_with_its_reason() -> None:
    """In a process of its own: torch does not get over a capture that failed."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "a step of this qwen3 cannot be captured in a CUDA graph" in done.stdout
