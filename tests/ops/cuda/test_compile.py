"""The CUDA kernels compile, and what the compiler makes of signed numbers. Needs NVRTC and no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import append_groups, append_pq, copy_rows, nearest_centroids, nvrtc, plan, transform_kv, unpack
from tests.conftest import make_layout
from tests.needs import skip_without_nvrtc
from tests.ops.cuda.decode_cases import ROTATED_BEFORE, ROTATED_BY_DECODE
from tests.ops.emulated import H200


@pytest.mark.few(1)
@pytest.mark.parametrize("query", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name",
    [
        *("saw-int4", "quarot-int2-win", "int3:k.bits=8", "int3", "kvant-2", "kvant-3", "oscar"),
        *("vecinfer-2", "vecinfer-2-mixed", "vecinfer-2:rope=block", "kivi-k4v4", "kitty"),
    ],
)
def test_kernels_compile(name: str, query: str, tmp_path: Path) -> None:
    skip_without_nvrtc()
    nvrtc.compile_text(copy_rows.text(), "sm_80")
    layout = make_layout(name, 2, 128)
    made = plan.Plan(layout, 6, query, (2, 1), (1, 128), True, True, H200)
    for arch in ("sm_80", "sm_90"):
        nvrtc.compile_text(dataclasses.replace(made, bulk=arch == "sm_90").text, arch)
    nvrtc.compile_text(
        transform_kv.TransformPlan(layout, "bfloat16", layout.recipe.key.effective_rope_block).text, "sm_90"
    )
    for stream in unpack.STREAMS:
        rotated = 0 if layout.recipe.streams[stream].rope == "post" else 64
        nvrtc.compile_text(unpack.UnpackPlan(layout, stream, "bfloat16", "float16", rotated).text, "sm_80")
    if layout.format("key").is_pq:
        for rows in (append_pq.low_batch_rows(layout), append_pq.high_batch_rows(layout)):
            nvrtc.compile_text(append_pq.AppendPqPlan(layout, ("bfloat16", "float32"), (128, 1), rows).text, "sm_80")
        return
    if layout.recipe.key.groupwise:
        for arch in ("sm_80", "sm_90"):
            nvrtc.compile_text(append_groups.GroupPlan(layout, ("bfloat16", "float32")).text, arch)
        return
    if cuda_append.refuse_layout(layout) is None:
        pairs = cuda_append.AppendPlan(layout, ("bfloat16", "float32"), (128, 1))
        code = nvrtc.cached_code(pairs.text, "sm_90", tmp_path)
        assert [path.read_bytes().endswith(code) for path in tmp_path.iterdir()] == [True]
        banded, types = name in ("kvant-2", "kvant-3"), ("bfloat16", "float16")  # bands always have a matrix
        tiles = cuda_append.AppendPlan(layout, types, (128, 1), (True, False), (0, 2))
        assert not pairs.tiled and tiles.tiled == (
            not banded and not name.startswith("int3")
        )  # nor two planes of codes
        if banded:
            tiles = cuda_append.AppendPlan(layout, types, (1, 1), (True, False), (2, 3), 256)
            assert tiles.tiled
        step = cuda_append.AppendPlan(layout, types, (1, 128), (True, False), (2, 0), 256 if banded else 0, step=True)
        for arch in ("sm_80", "sm_90"):
            nvrtc.compile_text(tiles.text, arch)
            nvrtc.compile_text(step.text, arch)
        nvrtc.compile_text(dataclasses.replace(step, early=True, bulk=True).text, "sm_90")
        warpgroups = dataclasses.replace(tiles, wgmma=True)
        if tiles.tiled:
            assert nvrtc.architecture(warpgroups.text, (9, 0)) == "sm_90a"
        nvrtc.compile_text(warpgroups.text, nvrtc.architecture(warpgroups.text, (9, 0)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["oscar:group=64", "int4:group=32", "saw-int4-kmeans-rot"])
def test_kernels_of_several_scales_and_of_residuals_compile(name: str) -> None:
    skip_without_nvrtc()
    layout, types = make_layout(name, 2, 128), ("bfloat16", "float16")
    made = plan.Plan(layout, 6, "bfloat16", (2, 1), (1, 128), True, True, H200)
    parts = (2, 2) if name.startswith("oscar") else (0, 0)
    tiles = cuda_append.AppendPlan(layout, types, (1, 1), (False, False), parts)
    assert tiles.tiled
    for arch in ("sm_80", "sm_90"):
        nvrtc.compile_text(dataclasses.replace(made, bulk=arch == "sm_90").text, arch)
        nvrtc.compile_text(tiles.text, arch)
        if nearest_centroids.serves(layout):
            for order in (1, 128):
                found = nearest_centroids.NearestPlan(layout, types, (order, 1), (False, False))
                nvrtc.compile_text(found.text, arch)


def ptx_of(text: str, arch: str) -> str:
    compiler, program, size = nvrtc.compiler(), nvrtc.create_program(text), ctypes.c_size_t()
    options = [option.encode() for option in (*nvrtc.OPTIONS, f"--gpu-architecture={arch}")]
    assert not compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert not compiler.nvrtcGetPTXSize(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    assert not compiler.nvrtcGetPTX(program, found)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return found.value.decode()


@pytest.mark.few(2)
@pytest.mark.parametrize(("group", "dim"), [(3, 128), (5, 64), (6, 64), (7, 128), (9, 256)])
def test_numbers_that_may_be_negative_keep_their_sign(group: int, dim: int) -> None:
    """In the addresses of queries that are rotated: NVVM took a constant out of `row % TILE_HEADS` and widened what was left as if
    it had no sign, so that half of the rows for the windows went 2^40 bytes astray. The emulated kernels cannot show that."""
    skip_without_nvrtc()
    layout = make_layout("kvant-2:rope_block=64", 2, dim)
    made = plan.Plan(layout, group, "bfloat16", (2, 1), (2, 1), False, True, H200, ROTATED_BEFORE)
    inside = dataclasses.replace(made, tuned=ROTATED_BY_DECODE if dim <= 128 else ())
    assert inside.rotated_queries == (dim <= 128)
    text = ptx_of(made.text, "compute_90")
    less: set[str] = set()  # registers that a constant was taken off
    assert made.high_batch_warps and ".entry kvant_rotate_queries_high_batch" in text
    for line in [*text.splitlines(), *ptx_of(inside.text, "compute_90").splitlines()]:
        if ".entry" in line:
            less.clear()
        if taken := re.match(r"\s+(?:add\.s32\s+(%r\d+), %r\d+, -\d+|sub\.s32\s+(%r\d+), (%r\d+), %r\d+);", line):
            constant, difference, whole = taken.groups()
            if constant or whole in less:
                less.add(constant or difference)
        widened = re.match(r"\s+(?:mul\.wide\.u32|mad\.wide\.u32|cvt\.u64\.u32)\s+%rd\d+, (%r\d+)", line)
        assert not widened or widened[1] not in less, line


def test_a_text_that_does_not_compile_says_so() -> None:
    skip_without_nvrtc()
    with pytest.raises(RuntimeError, match="does not compile for sm_90"):
        nvrtc.compile_text("nonsense", "sm_90")


@pytest.mark.slow
def test_programs_of_gpu_tests_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    skip_without_nvrtc()
    root = Path(__file__).parent.parent.parent.parent
    command = [sys.executable, "scripts/gpu_programs.py", "--out", str(tmp_path), "--processes", "1"]
    command += ["--", "tests/ops/cuda/test_decode.py", "-k", "every_recipe and int8 and 64"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = list((tmp_path / "kvant" / "kernels").iterdir())
    assert f"{len(files)} programs for sm_90 in {tmp_path}" in done.stdout and "0 failed" in done.stdout
    assert any(b"kvant_decode" in file.read_bytes() for file in files)
