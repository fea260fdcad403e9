"""Which layouts the CUDA kernels serve, and why they refuse the others. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.layout import Layout
from kvant.ops import OPS, choose, implementations
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import geometry, plan, refusals
from kvant.ops.cuda import prefill as cuda_prefill
from tests.conftest import make_layout


def test_nothing_is_offered_on_a_cpu() -> None:
    layout = make_layout("saw-int4")
    for op in OPS:
        names = {i.name: i.refuse(layout, torch.device("cpu")) for i in implementations(op)}
        if "cuda" in names:
            assert names["cuda"] == "it runs on CUDA devices, not on cpu"
    assert choose("decode", layout, "cpu").name == "reference"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kivi-k2v2", None),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", None),
        ("kitty-pro", None),
        ("squat", None),
        ("squat-pre", None),
        (
            "squat-pre:rope=block",
            "it rotates keys that are coded per channel one by one, and they are stored unrotated by blocks",
        ),
        ("kivi-k2v2:k.group=8", "it reads groups of at least 16 tokens, and those of the keys have 8"),
        ("kivi-k2v2:k.meta=bfloat16", "it reads the scales of channels as float16, and they are bfloat16"),
        (
            "kivi-k2v2:v.meta=bfloat16",
            "of values with several scales it reads scales and minima as float16, and theirs are others",
        ),
        (
            "kivi-k2v2:v.group=8",
            "it reads at most 8 scales a token, each of a multiple of 16 channels, and the values have 8",
        ),
        ("kvant-2:k.flag=true", "it reads keys that keep their mean, and theirs may be taken off token by token"),
        ("full", "it reads token-wise affine codes and keys coded per channel, and the keys are coded by Raw"),
        ("int4:group=32", None),
        ("oscar:group=32", None),
        (
            "int4:group=16",
            "it reads scales of a multiple of 32 channels of 2, 4 or 8 bits, and the keys have 4 others a token",
        ),
        ("int4:k.group=32,v.group=16", None),
        (
            "int3:group=32",
            "it reads scales of a multiple of 32 channels of 2, 4 or 8 bits, and the keys have 2 others a token",
        ),
        (
            "int4:k.group=0,v.group=8",
            "it reads scales of a multiple of 16 channels of 2, 4 or 8 bits, and the values have 8 others a token",
        ),
        (
            "int4:group=32,k.rope=block",
            "it reads one scale a token of keys that are unrotated by RoPE blocks, and they have 2",
        ),
        ("saw-int4-kmeans", None),
        ("saw-int4-kmeans-rot:centroids=1", None),
        (
            "saw-int4-kmeans:centroids=2048",
            "it holds at most 256 centroids a head in shared memory, and the keys have 2048",
        ),
        (
            "saw-int4-kmeans:k.rope=block",
            "it reads residuals of centroids beside keys that are stored rotated, and theirs are unrotated by RoPE blocks",
        ),
        ("int2:k.recent=3", "keys and values have different windows"),
        ("int2:sink=4,v.window_dtype=fp8", None),
        (
            "vecinfer-2:v.window_dtype=fp8",
            "beside indices of centroids it reads windows of values in 16 bits, and theirs are fp8",
        ),
        ("saw-int4", None),
        ("oscar", None),
        ("kvant-2", None),
        ("vecinfer-2", None),
        ("million-2:bits=6", None),
        ("million-2:bits=5", "it reads indices of 3, 4, 6, 8, 9, 10 or 12 bits, and those of the keys have 5"),
        ("vecinfer-2:dim=2,bits=3", None),
        (
            "vecinfer-2:dim=8,bits=16",
            "it holds a codebook of a head in shared memory, and one of the keys takes 1048576 bytes",
        ),
        ("million-2:books=space", None),
        (
            "million-3:v.books=space",
            "it holds the codebooks of a head in shared memory, and those of the values take 524288 bytes",
        ),
        ("turboquant-4:k.bits=3,v.bits=2", None),
        ("turboquant-4:v.bits=1", "it reads tables of 4, 8 or 16 levels, and that of the values has 2"),
        (
            "turboquant-2:rope=block",
            "it reads evenly spaced levels of keys that are unrotated by RoPE blocks, and theirs are not",
        ),
        (
            "kvant-2:rope=pre",
            "it rotates queries for blocks of positions, and the keys are stored unrotated one by one",
        ),
    ],
)
def test_layouts_are_refused_with_a_reason(name: str, reason: str | None) -> None:
    assert refusals.refuse_layout(make_layout(name)) == reason
    assert refusals.refuse_layout(Layout.of(recipes.get("int4"), 2, 64, order="plain")) is not None


def test_boosted_channels_that_a_word_does_not_hold_are_refused() -> None:
    assert refusals.refuse_layout(make_layout("kitty:k.boost=0.5", 2, 128)) is None
    reason = "it reads the high bits of at most 64 channels, and 68 are boosted"
    assert refusals.refuse_layout(make_layout("kitty:k.boost=0.53", 2, 128)) == reason
    assert cuda_append.refuse_layout(make_layout("kitty:k.boost=0.53", 2, 128)) == reason


def test_prefill_refuses_what_it_cannot_unpack() -> None:
    served = ("saw-int4-kv", "oscar", "oscar:group=32", "kvant-2", "kvant-3", "int3", "vecinfer-2", "million-1.5")
    served += "turboquant-3", "saw-int4-kmeans-rot", "million-2:books=space"
    for name in (*served, "kivi-k2v2-sink", "kitty-pro", "squat", "squat-pre"):
        assert cuda_prefill.refuse_layout(make_layout(name, 2, 128)) is None, name
    for name, reason in (
        ("gear", "the keys are coded by LowRank"),
        ("zipcache", "the keys are coded by Salient"),
    ):
        assert reason in (cuda_prefill.refuse_layout(make_layout(name, 2, 128)) or ""), name
    assert "fragment order" in (cuda_prefill.refuse_layout(make_layout("int2", 2, 80)) or "")


def test_append_refuses_what_it_cannot_write() -> None:
    assert "all of a batch share one" in (cuda_append.refuse_layout(make_layout("squat:shared=true")) or "")
    assert "the head dim is 256" in (cuda_append.refuse_layout(make_layout("squat", 2, 256)) or "")
    assert "the rank is 65" in (cuda_append.refuse_layout(make_layout("squat:rank=65", 2, 128)) or "")
    assert "coded by Salient" in (cuda_append.refuse_layout(make_layout("zipcache")) or "")
    assert "clipped, searched" in (cuda_append.refuse_layout(make_layout("kivi-k2v2:v.search=3")) or "")
    assert "of 16 or a multiple of 32" in (cuda_append.refuse_layout(make_layout("kivi-k2v2:v.group=48", 2, 96)) or "")
    assert "2, 3, 4 or 8 bits, and the keys have 1" in (
        cuda_append.refuse_layout(make_layout("kvant-2:k.bits=4/1/0")) or ""
    )
    for name in ("int3", "kvant-2:k.bits=3/2/0"):
        assert cuda_append.refuse_layout(make_layout(name, 2, 256)) is None and not cuda_append.tileable(
            make_layout(name, 2, 64 if name == "int3" else 128)
        )
    assert "fragment order" in (cuda_append.refuse_layout(make_layout("int3", 2, 96)) or "")
    assert "1, 2, 4 or 8 scales" in (cuda_append.refuse_layout(make_layout("int4:group=32", 2, 96)) or "")
    uneven = "the 12 sub-vectors of the values cannot be shared evenly by 8 lanes"
    assert cuda_append.refuse_layout(make_layout("million-1.5", 2, 96)) == uneven
    names = "saw-int4-kv", "oscar", "kvant-2", "vecinfer-2", "million-1.5", "kivi-k2v2", "kitty-pro"
    for name in (
        *names,
        "squat",
        "squat-pre",
        "oscar:group=32",
        "int4:group=32",
        "saw-int4-kmeans",
        "saw-int4-kmeans-rot",
        "turboquant-4",
        "turboquant-2:k.bits=3",
        "million-2:books=space",
    ):
        assert cuda_append.refuse_layout(make_layout(name)) is None


@pytest.mark.parametrize("there", [99 * 1024, 163 * 1024, 227 * 1024])  # of GPUs of compute capability 8.9, 8.0 and 9.0
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("saw-int4-kmeans", 256),
        ("saw-int4-kmeans", 128),
        ("saw-int4-kmeans:centroids=64", 256),
        ("saw-int4-kmeans:bits=8,group=64", 128),
        ("million-2:books=space", 128),
        ("million-4:books=space", 128),
        ("vecinfer-3", 128),
        ("turboquant-4", 256),
        ("kivi-k4v4", 256),
        ("int8:page=128", 256),
    ],
)
def test_what_is_not_refused_fits_into_shared_memory(
    name: str, dim: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every number of query heads; what is refused does not fit for some."""
    monkeypatch.setattr(refusals, "refuse_machine", lambda device, reason: reason)
    monkeypatch.setattr(refusals, "shared_memory", lambda device: (there, there + 1024))
    name, _, page = name.partition(":page=")
    layout = Layout.of(recipes.get(name), 2, dim, page_tokens=int(page) if page else None, dtype="bfloat16")
    needed = []
    for group in range(1, 34):
        for low_batch in (False, True):
            way = layout, group, "bfloat16", (0, 1), (0, 1), True, True, (there, there + 1024), (), low_batch
            made = plan.Plan(*way)
            needed.append(made.dynamic_bytes + (made._static_bytes if made.residual else 8192))
            assert made.dynamic_bytes >= made.least_bytes - made._static_bytes
    reason = refusals.refuse(layout, torch.device("cuda"))
    if reason is None:
        assert max(needed) <= there
    else:
        assert str(geometry.least_shared_bytes(layout)) in reason and geometry.least_shared_bytes(layout) > there
    if there == 227 * 1024:
        assert reason is None
    if there == 99 * 1024 and (name, dim) in {("saw-int4-kmeans", 128), ("million-4:books=space", 128)}:
        assert reason is not None


@pytest.mark.parametrize("dim", [64, 128])
def test_every_recipe_has_kernels_but_those_that_keep_the_reference(dim: int) -> None:
    """The part that does not look at the machine. `full` has kernels of its own (test_full.py)."""
    refused = {op: set[str]() for op in ("append", "decode", "prefill")}
    for name in recipes.names():
        layout = Layout.of(recipes.get(name), 8, dim, dtype="bfloat16", device="cuda")
        checks = cuda_append.refuse_layout, refusals.refuse_layout, cuda_prefill.refuse_layout
        for found, refuse in zip(refused.values(), checks, strict=True):
            if refuse(layout) is not None:
                found.add(name)
    kept = {"full", "gear", "gear-l", "zipcache"}
    assert all(found == kept for found in refused.values()), refused
