#!/usr/bin/env python3
"""Instructions and cycles of decode attention on ARM, without an ARM machine: counted under an emulator, not timed.

    scripts/arm_counts.py [--recipes saw-int4 kvant-2] [--dims 64 128] [--functions] [--json FILE]
    scripts/arm_counts.py --isa i8mm --cpu neoverse-v2

A decode call of this machine is written down with all memory that it reads, and linked to the kernels for ARM. qemu runs it: its
output must be this machine's. Then qemu traces one split of 2,048 tokens of one KV head. llvm-mca gives the cycles of the traced
instructions of each function, in their order, as if all memory were in the first-level cache and all branches were foreseen.

`--native` takes the C sources from another directory, to compare two versions of the kernels (of the same structures).
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvant import recipes
from kvant.bench import attention
from kvant.bench.synthetic import Shape, fill
from kvant.ops.cpu import decode, library, structures

ROOT = Path(__file__).resolve().parent.parent
GCC, OBJDUMP, QEMU, MCA = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump", "qemu-aarch64", "llvm-mca"
INSTALL = {
    GCC: "gcc-aarch64-linux-gnu and libc6-dev-arm64-cross",
    OBJDUMP: "binutils-aarch64-linux-gnu",
    QEMU: "qemu-user",
    MCA: "llvm-19",
}
MCA_VERSIONS = range(17, 40)  # of LLVM; Neoverse-N1 is new in 17
# as in setup.py
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wno-psabi"]
EMULATED = {"neon": "neoverse-n1", "i8mm": "max,sve=off"}  # CPU of qemu
QUERIES = {64: 3, 128: 4}  # query heads of the KV head, by head_dim
CONTEXT = 16896  # so long a sequence has splits of 2,048 tokens
SPLIT = 3  # the one that is counted; it has no tokens of the overlay
LIMIT = 1e-4  # largest relative difference between the outputs of two instruction sets
BRANCHES = re.compile(r"(b|bl|br|blr|ret|cbn?z|tbn?z|b\..*)$")


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def version_of(program: str) -> tuple[int, int]:
    found = re.search(r"version (\d+)\.(\d+)", output(program, "--version"))
    assert found, f"{program} --version names no version"
    return int(found[1]), int(found[2])


def newest_mca() -> str:
    """Name of the newest llvm-mca. Exits where a program is missing."""
    names = filter(shutil.which, (MCA, *(f"{MCA}-{n}" for n in MCA_VERSIONS)))
    versions = {version_of(name): name for name in names}
    missing = [name for name in (GCC, OBJDUMP, QEMU) if shutil.which(name) is None]
    if max(versions, default=(0, 0))[0] < MCA_VERSIONS[0]:
        missing.append(MCA)
    if missing:
        wanted = ", ".join(f"{name} (on Debian and Ubuntu in {INSTALL[name]})" for name in missing)
        sys.exit(f"arm_counts: not found: {wanted}. {MCA} must be of LLVM {MCA_VERSIONS[0]} or later.")
    return versions[max(versions)]


# --- a decode call as data --------------------------------------------------------------------------------------------


def pointers(kind: type[ctypes.Structure], at: int = 0) -> Iterator[tuple[int, str]]:
    """Offset and name of every pointer in a structure."""
    for name, field, *_ in kind._fields_:
        offset = at + getattr(kind, name).offset
        if isinstance(field, type) and issubclass(field, ctypes.Structure):
            yield from pointers(field, offset)
        elif ctypes.c_void_p in (field, getattr(field, "_type_", None)):  # one, or an array of them
            yield from ((offset + i, name) for i in range(0, ctypes.sizeof(field), 8))


class Program:
    """Assembly text of structures, and of the memory that they point to: storages of live tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, [".data"]
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.device.type == "cpu"]
        self.storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        self.labels: dict[int, str] = {}  # by address of the storage

    def memory(self, label: str, content: bytes) -> None:
        (self.folder / label).write_bytes(content)
        self.lines += [".balign 64", f".globl {label}", f"{label}:", f'.incbin "{self.folder / label}"']

    def pointer(self, address: int, name: str) -> str:
        """The address in the program."""
        for start, storage in self.storages.items():
            if start <= address < start + storage.nbytes():
                if start not in self.labels:
                    self.labels[start] = f"memory{len(self.labels)}"
                    self.memory(self.labels[start], ctypes.string_at(start, storage.nbytes()))
                return f"{self.labels[start]} + {address - start}"
        raise RuntimeError(f"no tensor holds what {name} points to")

    def structure(self, label: str, made: ctypes.Structure, known: dict[str, str]) -> None:
        """A structure; `known`: values of pointers by their name."""
        words = [str(word) for word in memoryview(bytes(made)).cast("Q")]
        for offset, name in pointers(type(made)):
            if words[offset // 8] != "0":
                words[offset // 8] = known.get(name) or self.pointer(int(words[offset // 8]), name)
        self.lines += [".balign 64", f".globl {label}", f"{label}:", *(f".quad {word}" for word in words)]


def write_call(recipe: str, dim: int, folder: Path) -> Path:
    """Decodes on this machine. Returns an assembly file with the call and its output."""
    shape = Shape(batch=1, context=CONTEXT, heads=QUERIES[dim], kv_heads=1, head_dim=dim, dtype="float32")
    torch.manual_seed(0)
    filled = fill(recipes.get(recipe), shape, "cpu")
    programs: list[Program] = []
    run = library.run

    def written(
        name: str, call: structures.Decode, tasks: int, scratch: torch.Tensor, stride: int, threads: int
    ) -> None:
        library._WORKSPACE.floats.fill_(torch.nan)  # no result of an earlier call is left in it
        program = Program(folder)
        program.structure("batch", library._LAST.made, {})
        program.structure("call", call, {"batch": "batch"})
        program.lines += [".globl scratch", f"scratch: .quad {program.pointer(scratch.data_ptr(), 'scratch')}"]
        programs.append(program)
        run(name, call, tasks, scratch, stride, threads)

    with mock.patch.multiple(library, run=written, is_arm=lambda: True), attention.poisoned():
        out = decode.decode(filled.store, attention.queries(shape, torch.device("cpu")), filled.batch, scale=dim**-0.5)
    (program,) = programs
    program.memory("want", out.numpy().tobytes())
    path = folder / "call.s"
    path.write_text("\n".join([*program.lines, ""]))
    return path


# --- counting ---------------------------------------------------------------------------------------------------------


def disassembled(binary: Path) -> dict[int, tuple[str, str]]:
    """Function and instruction by address."""
    code, function = {}, ""
    for line in output(OBJDUMP, "-d", "--no-show-raw-insn", binary).splitlines():
        if found := re.match(r"[0-9a-f]+ <([^>]+)>:", line):
            function = found[1]
        elif found := re.match(r"\s+([0-9a-f]+):\s+(\S.*)", line):
            code[int(found[1], 16)] = function, found[2].split("//")[0].split(" <")[0].strip()
    return code


def traced(binary: Path, emulated: str, first: str, code: dict[int, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Function and instruction, in the order of execution, from the call of `first` until it returns to main."""
    single = "-one-insn-per-tb" if version_of(QEMU) >= (8, 1) else "-singlestep"
    command = [QEMU, "-cpu", emulated, single, "-d", "exec,nochain", "-D", "/dev/stdout", str(binary), str(SPLIT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = False
        for line in process.stdout:
            if line.startswith("Trace"):
                at = code[int(line[line.index("[") :].split("/")[1], 16)]
                started = started or at[0] == first
                if started and at[0] == "main":
                    process.stdout.read()
                    return
                if started:
                    yield at
    raise RuntimeError(f"{first} did not return")


def cycles(mca: str, cpu: str, instructions: list[str], folder: Path) -> int:
    """Cycles of instructions that follow each other. A branch is a nop, an address of data a constant."""
    path = folder / "trace.s"
    with path.open("w") as file:
        for text in instructions:
            name = text.split()[0]
            print("nop" if BRANCHES.match(name) else "mov x9, #0" if name in ("adr", "adrp") else text, file=file)
    options = ["-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+i8mm,+dotprod,+fullfp16", "-iterations=1", "-noalias=true"]
    printed = output(mca, *options, "-instruction-info=false", "-resource-pressure=false", path)
    found = re.search(r"Total Cycles:\s+(\d+)", printed)
    assert found, "llvm-mca prints no cycles"
    return int(found[1])


def counted(binary: Path, isa: str, mca: str, cpu: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Instructions and cycles of a split by function, most cycles first."""
    functions: dict[str, list[str]] = collections.defaultdict(list)
    for function, text in traced(binary, EMULATED[isa], f"split_{isa}", disassembled(binary)):
        functions[function].append(text)
    found = {name: (len(each), cycles(mca, cpu, each, folder)) for name, each in functions.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["saw-int4", "oscar", "kvant-4", "kvant-2"])
    parser.add_argument("--dims", nargs="+", type=int, default=[*QUERIES], choices=QUERIES, help="head_dim")
    parser.add_argument("--isa", default="neon", choices=EMULATED)
    parser.add_argument("--cpu", default="neoverse-n1", help="CPU of llvm-mca")
    parser.add_argument("--functions", action="store_true", help="print the parts of functions too")
    parser.add_argument("--native", type=Path, default=ROOT / "kvant/ops/cpu/native", metavar="DIR", help="C sources")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    args = parser.parse_args()
    mca, table = newest_mca(), []
    print(f"one split of 2,048 tokens of one KV head, {args.isa}; {args.cpu} by {mca}")
    print(f"{'recipe':14} {'shape':20} {'instructions':>12} {'cycles':>9}  difference from this machine's output")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kernels, binary = folder / "kernels.o", folder / "replay"
        output(GCC, *FLAGS, "-c", args.native / f"{args.isa}.c", "-o", kernels)
        main_file = [f"-DISA=KVANT_{args.isa.upper()}", "-I", args.native, ROOT / "scripts/arm_counts.c"]
        for recipe in args.recipes:
            for dim in args.dims:
                call = write_call(recipe, dim, folder)
                output(GCC, "-O1", "-Wno-psabi", "-static", "-no-pie", *main_file, call, kernels, "-lm", "-o", binary)
                difference = float(output(QEMU, "-cpu", EMULATED[args.isa], binary))
                if not difference <= LIMIT:
                    sys.exit(f"arm_counts: {recipe} x {dim}: the output differs by {difference:.1e}, more than {LIMIT}")
                functions = counted(binary, args.isa, mca, args.cpu, folder)
                total = [sum(each) for each in zip(*functions.values(), strict=True)]
                shape = f"{QUERIES[dim]} queries x {dim}"
                print(f"{recipe:14} {shape:20} {total[0]:12,} {total[1]:9,}  {difference:.1e}", flush=True)
                for function, each in functions.items() if args.functions else ():
                    print(f"{'':14} {function:20} {each[0]:12,} {each[1]:9,}", flush=True)
                row = {"recipe": recipe, "head_dim": dim, "queries": QUERIES[dim], "isa": args.isa, "cpu": args.cpu}
                row |= {"instructions": total[0], "cycles": total[1], "functions": functions, "difference": difference}
                table.append(row)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
