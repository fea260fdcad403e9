"""What Python and C++ have to agree on: `struct Config` and the argument structs of the kernels."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.arguments import Arguments, float32, int32, int64, optional, pointer
from kvant.ops.cuda.config import CONSTANTS, STREAM_CONSTANTS, ElementType, config_text
from scripts.kernel_resources import GPUS, kernels_of, overrun, programs
from tests.needs import needs_compiler, skip_without_nvrtc
from tests.ops import emulated

COMPILED = ("copy_rows", "decode kvant-2 group 4 high batch", "decode full", "transform kvant-2", "unpack kvant-2 key")
COMPILED += (
    "decode kvant-2 rotated before high batch",
    "append kvant-2 prompts",
    "append vecinfer-2 4 rows",
    "nearest centroids saw-int4-kmeans order 1",
    "append kitty-pro",
    "fit squat",
    "overlay_step",
    "append full",
    "convert_rows",
    "merge_parts",
)
KERNEL = re.compile(r"(kvant_\w+)\(const (\w+) a\)")


def placed() -> str:
    """Assertions of C++ about every declared struct."""
    lines = []
    for name, declared in Arguments.declared.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(declared.structure)});\n")
        for field in declared.fields:
            offset = getattr(declared.structure, field).offset
            lines.append(f"static_assert(__builtin_offsetof({name}, {field}) == {offset});\n")
    return nvrtc.program(arguments=list(Arguments.declared.values())) + "".join(lines)


def parameter_bytes(code: bytes) -> Iterator[tuple[str, int]]:
    """Kernels of compiled code with the bytes of their only parameter (EIATTR_KPARAM_INFO of .nv.info.<kernel>)."""
    start, size, count, names_at = (*struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HHH", code, 58))
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    for header in headers:
        offset = headers[names_at][4] + header[0]
        name = code[offset : code.index(b"\0", offset)].decode()
        if not name.startswith(".nv.info.kvant_"):
            continue
        at, end, found = header[4], header[4] + header[5], list[int]()
        while at < end:
            form, attribute, value = struct.unpack_from("<BBH", code, at)
            at += 4
            if (form, attribute) == (4, 0x17):
                found.append(struct.unpack_from("<I", code, at + 8)[0] >> 18)
            at += value if form == 4 else 0
        assert len(found) == 1, name
        yield name.removeprefix(".nv.info."), found[0]


def test_the_device_compiler_places_fields_as_ctypes_does() -> None:
    skip_without_nvrtc()
    try:
        nvrtc.compile_text("struct S { int x; }; static_assert(__builtin_offsetof(S, x) == 0);", "sm_80")
    except RuntimeError:
        pytest.skip("this NVRTC has no __builtin_offsetof: 13.2 has none, 13.4 has it")
    nvrtc.compile_text(placed(), "sm_80")
    with pytest.raises(RuntimeError, match="static assertion failed"):
        nvrtc.compile_text(placed().replace("source) == 8", "source) == 12"), "sm_80")


@needs_compiler
def test_the_host_compiler_places_fields_as_ctypes_does(tmp_path: Path) -> None:
    assert emulated.COMPILER is not None
    (tmp_path / "placed.cpp").write_text(placed())
    command = [emulated.COMPILER, "-std=c++20", "-w", "-fsyntax-only", f"-I{emulated.HERE}", "placed.cpp"]
    subprocess.run(command, check=True, cwd=tmp_path)


def test_compiled_kernels_take_as_many_bytes_as_are_passed() -> None:
    skip_without_nvrtc()
    structs = dict(KERNEL.findall("".join(nvrtc.headers().values())))
    seen, gpu = set(), GPUS["sm_90"]
    made = dict(programs(gpu))
    assert set(COMPILED) <= set(made)
    for name, plan in made.items():
        if name not in COMPILED:
            continue
        code = nvrtc.compile_text(plan.text, gpu.arch)
        for kernel, size in parameter_bytes(code):
            if structs[kernel] in Arguments.declared:
                assert size == ctypes.sizeof(Arguments.declared[structs[kernel]].structure), kernel
                seen.add(structs[kernel])
        for kernel, found in kernels_of(code).items():  # and as much as an H200 has
            assert overrun(gpu, plan, kernel, found) is None, (name, kernel)
    assert seen == set(Arguments.declared)


def test_arguments_are_filled_by_name_alone() -> None:
    made = Arguments(
        "TestedArguments", x=pointer("u8", "x"), y=optional("u8", "y"), n=int32("n"), m=int64("m"), f=float32("f")
    )
    del Arguments.declared["TestedArguments"]
    x = torch.zeros(3)
    filled = made.fill(n=1, f=0.5, m=2, y=None, x=x)
    assert (filled.x, filled.y, filled.n, filled.m, filled.f) == (x.data_ptr(), None, 1, 2, 0.5)
    for wrong in ({"n": 1}, {"n": 1, "f": 0.5, "m": 2, "y": None, "x": x, "z": 1}):
        with pytest.raises(TypeError, match="argument"):
            made.fill(**wrong)
    with pytest.raises(TypeError, match="positional"):
        made.fill(x, None, 1, 2, 0.5)


def test_config_is_a_struct_of_documented_constants() -> None:
    text = config_text({"HEAD_DIM": 128, "Key": {"IN_TYPE": ElementType.FP16, "CodeBands": "Bands<>"}})
    assert "  static constexpr int HEAD_DIM = 128;  // channels of a head\n" in text
    assert "    static constexpr int IN_TYPE = ElementType::FP16;" in text
    assert "    using CodeBands = Bands<>;" in text and "template <class...> struct Bands;" in text
    with pytest.raises(ValueError, match="no constant 'HEADDIM'"):
        config_text({"HEADDIM": 128})
    for table in (CONSTANTS, STREAM_CONSTANTS):
        assert all(about.doc and about.type in ("int", "float", "double", "type") for about in table.values())
