"""The programs that kvant compiles on each kind of GPU, by NVIDIA's compiler: registers and shared memory of their launches within that
GPU's limits. Nothing is run."""

from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.layout import Layout
from kvant.ops.cuda import append, nvrtc, overlay_step, prefill, refusals
from scripts.kernel_resources import DEVICE, GPUS, LAUNCHES, Gpu, ctas, kernels_of, on, overrun, programs, texts
from tests.needs import skip_without_nvrtc

MOST_STACK = 256  # bytes of a thread's stack, which is spilled registers
QUICK = (  # every kernel file, both forms of copies: what depends on the architecture
    "decode saw-int4 group 4 low batch",
    "decode vecinfer-2 group 4 high batch",
    "decode full",
    "transform kvant-2",
    "unpack kvant-2 key",
    "append saw-int4 rows",
    "append kvant-2 a step",
    "append vecinfer-2 4 rows",
    "append kitty-pro",
    "append full",
    "overlay_step",
    "copy_rows",
    "convert_rows",
    "merge_parts",
)
MORE = {
    "sm_80": ("decode kivi-k2v2 group 4 high batch", "nearest centroids saw-int4-kmeans order 1", "fit squat"),
    "sm_86": ("decode kvant-2 group 4 high batch",),
    "sm_100": ("append saw-int4 prompts",),
    "sm_120": ("decode kvant-2 group 4 high batch",),
}
SAME = {"sm_89": "sm_86"}  # architectures with the programs of another: a few are compiled


def check(gpu: Gpu, names: tuple[str, ...] | None) -> set[str]:
    """Compiles programs of these names, or all; the kernels that were compiled."""
    skip_without_nvrtc()
    made = dict(programs(gpu))
    seen = set()
    for name in names or made:
        plan = made[name]
        if isinstance(plan, str):
            assert names is None and "shared memory" in plan, (name, plan)
            continue
        code = nvrtc.compile_text(plan.text, nvrtc.architecture(plan.text, gpu.capability))
        for kernel, found in kernels_of(code).items():
            assert overrun(gpu, plan, kernel, found) is None, (name, kernel)
            assert found["stack"] <= MOST_STACK, (name, kernel, found)
            seen.add(kernel)
    return seen


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "sm_90"])  # that one: test_declared.py
def test_kernels_compile_and_fit(arch: str) -> None:
    seen = check(GPUS[arch], (QUICK[0], QUICK[2]) if arch in SAME else (*QUICK, *MORE[arch]))
    left = {"kvant_rotate_queries", "kvant_rotate_queries_high_batch", "kvant_append_tiles"}
    left |= {"kvant_nearest_centroids", "kvant_subspace_gram", "kvant_fit_subspace"}  # in MORE of some
    assert arch in SAME or set(LAUNCHES) - seen <= left


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_all_kernels_compile_and_fit(arch: str) -> None:
    check(GPUS[arch], None)


def test_architectures_with_the_same_programs() -> None:
    """So that what the emulated tests show of one holds of the other."""
    assert dict(texts(GPUS["sm_86"])) == dict(texts(GPUS["sm_89"]))
    hopper, blackwell, consumer = (dict(texts(GPUS[arch])) for arch in ("sm_90", "sm_100", "sm_120"))
    assert {name for name, text in hopper.items() if "#define WGMMA 1\n" in text} == set(hopper) - set(blackwell)
    for name, text in blackwell.items():  # which unpacks 16 tokens at a time
        assert text == (
            hopper[name].replace(" TILES = 2;", " TILES = 1;") if name.startswith("unpack") else hopper[name]
        )
    assert all(text == blackwell[name] for name, text in consumer.items() if not name.startswith("decode"))
    assert not any("#define WGMMA 1\n" in text for arch in GPUS if arch != "sm_90" for _, text in texts(GPUS[arch]))


def test_a_launch_that_does_not_fit_is_found() -> None:
    a100, consumer = GPUS["sm_80"], GPUS["sm_86"]
    assert ctas(a100, 128, 128, 40 << 10) == 4 and ctas(consumer, 128, 128, 40 << 10) == 2
    assert ctas(a100, 128, 128, 99 << 10) == 1 == ctas(consumer, 128, 128, 99 << 10)
    assert ctas(consumer, 128, 128, (99 << 10) + 1) == 0
    assert ctas(a100, 1024, 64, 0) == 1 and ctas(a100, 1024, 65, 0) == 0 and ctas(a100, 1025, 16, 0) == 0
    plan = dict(programs(consumer))["decode full"]
    found = {"registers": 152, "stack": 0, "shared": 768}
    assert overrun(consumer, plan, "kvant_decode_full", found) is None
    assert "cannot launch" in (overrun(consumer, plan, "kvant_decode_full", {**found, "shared": 4096}) or "")
    assert "static" in (overrun(consumer, plan, "kvant_decode_full", {**found, "shared": 49153}) or "")


def test_what_shared_memory_does_not_hold_is_refused_with_the_reason() -> None:
    def reasons(arch: str, name: str, dim: int) -> list[str | None]:
        layout = Layout.of(recipes.get(name), 8, dim, dtype="bfloat16")
        with on(GPUS[arch]):
            return [refuse(layout, DEVICE) for refuse in (refusals.refuse, append.refuse, prefill.refuse)]

    for arch in ("sm_80", "sm_90", "sm_100"):
        assert reasons(arch, "squat", 128) == reasons(arch, "saw-int4-kmeans", 128) == [None] * 3
        assert reasons(arch, "saw-int4", 256) == [None] * 3
    for arch in ("sm_86", "sm_89", "sm_120"):
        decode, fit, unpack = reasons(arch, "squat", 128)
        assert decode is None and unpack is None and "subspaces are fitted" in (fit or "")
        assert reasons(arch, "squat", 64) == [None] * 3
        decode, centroids, unpack = reasons(arch, "saw-int4-kmeans", 128)
        assert "codebooks" in (decode or "") and "codebooks" in (centroids or "") and unpack is None
        assert "matrix" in (reasons(arch, "saw-int4", 256)[2] or "")
        assert reasons(arch, "kvant-2", 128) == reasons(arch, "oscar", 128) == [None] * 3


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 6357), ("sm_86", 3626), ("sm_90", 9045)])
def test_overlay_rows_that_shared_memory_does_not_hold(arch: str, most: int) -> None:
    with on(GPUS[arch]):
        room = overlay_step.most_shared(DEVICE)
    assert overlay_step._shared_bytes(most, 1) <= room < overlay_step._shared_bytes(most + 1, 1)
    assert overlay_step.most_shared(torch.device("cpu")) == overlay_step.MOST_SHARED
