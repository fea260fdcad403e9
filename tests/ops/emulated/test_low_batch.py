"""Emulated decode of few sequences: CTAs of more warps, which transform queries and outputs themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant.bench import attention
from kvant.ops import reference
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import geometry, plan
from kvant.ops.cuda.decode_matrices import DecodeTransforms
from tests.conftest import relative_error
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.decode_checks import check_outputs
from tests.ops.emulated.checks import filled
from tests.ops.scores import head_errors, some_sinks, with_sinks

pytestmark = needs_compiler


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("saw-int4", 4, 128, {}),
        ("oscar:sink=3,recent=20", 4, 128, {"sliding_window": 150}),
        ("kvant-2:rope_block=64", 4, 128, {"softcap": 5.0}),
        ("kvant-2:rope=post", 3, 128, {"softcap": 5.0}),
        ("int3", 4, 128, {}),
        ("int4:group=32", 3, 128, {"softcap": 5.0}),
        ("turboquant-4:sink=3,recent=20", 4, 64, {}),
        ("million-2:books=space,bits=6", 4, 64, {}),
        ("saw-int4-kmeans-rot:centroids=40,sink=3,recent=20", 4, 64, {"sliding_window": 150}),
        ("kivi-k2v2", 4, 64, {}),
        ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {"softcap": 5.0}),
        ("squat-pre:sink=3", 4, 64, {}),
        ("squat-pre", 3, 128, {}),
        ("vecinfer-2", 4, 64, {}),
    ],
)
def test_decode_of_a_low_batch(name: str, group: int, dim: int, options: dict[str, float], few: None) -> None:
    """By blocks of more warps, windows after pages."""
    cache, seqs = filled(name, 2, group, dim, [1, 63, 0, 1500])
    if dim == 128 and group == 4:
        made = plan.Plan(cache.layout, 4, "bfloat16", (1, 128), (0, 1), False, True, emulated.H200, (), True)
        assert (made.warps, made.constants["MIN_CTAS"]) == (geometry.LOW_BATCH_WARPS, 2)
    check_outputs(cache, seqs, group, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype", "softcap"),
    [
        ("oscar:sink=3,recent=20", 4, 128, torch.bfloat16, None),
        ("oscar:per_head=true", 5, 64, torch.float16, None),
        ("oscar", 9, 96, torch.bfloat16, None),
        ("oscar:group=64,sink=3,recent=20", 4, 128, torch.float16, None),
        ("kvant-2:rope=post", 17, 64, torch.bfloat16, 5.0),
        ("turboquant-4", 4, 128, torch.bfloat16, None),
        ("turboquant-3:v.bits=2", 5, 64, torch.float16, None),
    ],
)
def test_a_low_batch_transforms_its_queries_in_the_decode_kernel(
    name: str,
    group: int,
    dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    few: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[int, int]] = []
    launch = emulated.Kernel.launch
    monkeypatch.setattr(emulated.Kernel, "launch", lambda self, *args: launched.append(args[0]) or launch(self, *args))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 0, 900])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = (torch.randn(len(seqs), 2 * group, dim) * 300.0).to(dtype)
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch, scale=dim**-0.5 / 300.0, softcap=softcap)
    assert len(launched) == 1
    expected = reference.decode(store, q.double(), batch, scale=dim**-0.5 / 300.0, softcap=softcap)
    assert relative_error(found, expected) < (2e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [6, 60])  # so that a block has whole (sequence, head)s, or blocks share them
@pytest.mark.parametrize(
    ("name", "group", "dim", "dtype"),
    [
        ("oscar:per_head=true", 4, 64, torch.float16),
        ("oscar:sink=3,recent=20", 9, 96, torch.bfloat16),
        ("kvant-2:rope=post", 3, 128, torch.bfloat16),
        ("kvant-2:rope_block=64,sink=5", 4, 128, torch.float16),
        ("oscar", 17, 64, torch.bfloat16),
    ],
)
def test_a_low_batch_transforms_its_outputs_in_the_decode_kernel(
    name: str, group: int, dim: int, dtype: torch.dtype, blocks: int, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they are what the kernel after gives, and the reference; also where something is added to them."""
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    multiplied: list[object] = []
    multiply = cuda_decode._transform_outputs
    monkeypatch.setattr(cuda_decode, "_transform_outputs", lambda *args: multiplied.append(args) or multiply(*args))
    cache, seqs = filled(name, 2, group, dim, [1, 63, 900])
    batch, store = cache.batch(seqs), cache.stores[0]
    transforms = store.derive(DecodeTransforms)
    inverse = transforms.inverse
    assert inverse.tensor is not None
    offset = torch.randn(len(inverse.tensor), dim)
    store.derived[DecodeTransforms] = dataclasses.replace(
        transforms, inverse=dataclasses.replace(inverse, offset=offset)
    )
    q = (torch.randn(len(seqs), 2 * group, dim) * 300.0).to(dtype)
    scale = dim**-0.5 / 300.0
    with attention.poisoned():
        found, lse = cuda_decode.decode_with_lse(store, q, batch, scale=scale)
    assert not multiplied
    after, lse_after = cuda_decode.decode_with_lse(store, q, batch, scale=scale, tuned=(("OUTPUT_TRANSFORM", 2),))
    assert multiplied
    expected = reference.decode(store, q.double(), batch, scale=scale)
    expected += offset.double().expand(2, dim).repeat_interleave(group, 0)
    tolerance = 2e-3 if dtype == torch.bfloat16 else 5e-4
    assert relative_error(found, expected) < tolerance
    assert relative_error(found, after.double()) < tolerance * 2
    torch.testing.assert_close(lse, lse_after, rtol=1e-6, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("blocks", [6, 60])
@pytest.mark.parametrize("after", [False, True])  # a kernel after decode transforms the outputs, or decode does
@pytest.mark.parametrize("name", ["oscar:per_head=true", "oscar:sink=3,recent=20"])
def test_the_mean_of_values_reaches_as_far_as_their_probabilities(
    name: str, after: bool, blocks: int, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.Kernel, "blocks", blocks)
    cache, seqs = filled(name, 2, 5, 64, [1, 63, 900])
    batch, store = cache.batch(seqs), cache.stores[0]
    transforms = store.derive(DecodeTransforms)
    assert transforms.inverse.tensor is not None
    offset = torch.randn(len(transforms.inverse.tensor), 64)
    store.derived[DecodeTransforms] = dataclasses.replace(
        transforms, inverse=dataclasses.replace(transforms.inverse, offset=offset)
    )
    q, sinks = torch.randn(3, 10, 64).half(), some_sinks(10)
    tuned = (("OUTPUT_TRANSFORM", 2),) if after else ()
    with attention.poisoned():
        found, _ = cuda_decode.decode_with_lse(store, q, batch, scale=0.125, sink_logits=sinks, tuned=tuned)
    expected, sums = with_sinks(store, q, batch, sinks, scale=0.125)
    share = 1 - (sinks.double() - sums).exp()
    expected += share[..., None] * offset.double().expand(2, 64).repeat_interleave(5, 0)
    assert max(head_errors(found, expected)) < 1e-3
