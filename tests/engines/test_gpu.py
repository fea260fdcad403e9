"""The transformers engine on a GPU: the kernels are taken, and the model says what it says with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvant
from tests.conftest import relative_error
from tests.engines.test_hf import make_model

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
