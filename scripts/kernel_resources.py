#!/usr/bin/env python3
"""Registers, stack (spills) and shared memory of the CUDA kernels, read from the code that NVRTC makes. Needs no GPU.

    scripts/kernel_resources.py [--arch sm_90] [--json FILE] [--digests]

Programs are those that kvant would compile on a GPU of the architecture (GPUS). A kernel that such a GPU could not launch is named,
and the script fails. What the GPU is refused for is printed with the reason.

A change of a kernel is compared with the version before by running this on both. `--digests` prints a digest of the machine code
too: after a change of names or of files alone it must stay as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvant import recipes
from kvant.layout import Layout
from kvant.ops.cuda import (
    append,
    append_full,
    append_groups,
    append_pq,
    convert_rows,
    copy_rows,
    decode,
    device,
    fit_subspace,
    full,
    merge_parts,
    nearest_centroids,
    nvrtc,
    overlay_step,
    plan,
    prefill,
    refusals,
    transform_kv,
    unpack,
)

FRAME_SIZE, REGCOUNT = 0x11, 0x2F  # attributes of a kernel in .nv.info
DEVICE = torch.device("cuda", 0)


# --- GPUs -------------------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """Limits of a compute capability (CUDA C++ Programming Guide, "Compute Capabilities"). A multiprocessor of all of them has
    65,536 registers."""

    name: str
    capability: tuple[int, int]
    shared: tuple[int, int]  # bytes of shared memory of a CTA, by opt-in, and of a multiprocessor
    warps: int  # of a multiprocessor
    ctas: int  # of a multiprocessor

    @property
    def arch(self) -> str:
        return "sm_{}{}".format(*self.capability)


GPUS = {
    gpu.arch: gpu
    for gpu in (
        Gpu("A100", (8, 0), (163 << 10, 164 << 10), 64, 32),
        Gpu("A10, RTX 3090", (8, 6), (99 << 10, 100 << 10), 48, 16),
        Gpu("L4, L40S, RTX 4090", (8, 9), (99 << 10, 100 << 10), 48, 24),
        Gpu("H100, H200", (9, 0), (227 << 10, 228 << 10), 64, 32),
        Gpu("B200", (10, 0), (227 << 10, 228 << 10), 64, 32),
        Gpu("RTX 5090, RTX PRO 6000", (12, 0), (99 << 10, 100 << 10), 48, 24),
    )
}
H200 = GPUS["sm_90"].shared
REGISTERS, THREAD_REGISTERS, CTA_WARPS = 65536, 255, 32
STATIC_SHARED, RESERVED_SHARED = 48 << 10, 1 << 10  # bytes: of a kernel's own, at most; that CUDA takes of every CTA


@dataclasses.dataclass
class Launch:
    """In place of `nvrtc.Kernel`: what a launch asks for."""

    text: str
    name: str
    device: torch.device
    threads: int
    shared: int = 0  # dynamic


@contextlib.contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """kvant sees this GPU as DEVICE: its limits decide plans and refusals. Kernels are not compiled."""
    properties = SimpleNamespace(
        shared_memory_per_block_optin=gpu.shared[0], shared_memory_per_multiprocessor=gpu.shared[1]
    )
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu.capability),
        mock.patch.object(nvrtc, "missing", return_value=None),
        mock.patch.object(nvrtc, "Kernel", Launch),
    ):
        yield


LAUNCHES: dict[str, Callable[[Any, str], Any]] = {
    "kvant_decode": lambda made, name: decode._kernel.__wrapped__(made, DEVICE),
    "kvant_transform_queries": lambda made, name: decode._transform_kernel.__wrapped__(made, name, DEVICE),
    "kvant_transform_outputs": lambda made, name: decode._transform_kernel.__wrapped__(made, name, DEVICE),
    "kvant_rotate_queries": lambda made, name: decode._rotate_kernel.__wrapped__(made, DEVICE),
    "kvant_rotate_queries_high_batch": lambda made, name: decode._high_batch_kernel.__wrapped__(made, DEVICE),
    "kvant_decode_full": lambda made, name: full._kernel.__wrapped__(made, DEVICE),
    "kvant_append": lambda made, name: append._kernel.__wrapped__(made, DEVICE, False),
    "kvant_append_step": lambda made, name: append._kernel.__wrapped__(made, DEVICE, False),
    "kvant_append_tiles": lambda made, name: append._kernel.__wrapped__(made, DEVICE, True),
    "kvant_append_groups": lambda made, name: append_groups._kernel.__wrapped__(made, name, DEVICE),
    "kvant_append_tokens": lambda made, name: append_groups._kernel.__wrapped__(made, name, DEVICE),
    "kvant_append_sequences": lambda made, name: append_groups._kernel.__wrapped__(made, name, DEVICE),
    "kvant_append_full": lambda made, name: append_full._kernel.__wrapped__(made, DEVICE),
    "kvant_append_pq": lambda made, name: append_pq._kernel.__wrapped__(made, DEVICE),
    "kvant_nearest_centroids": lambda made, name: nearest_centroids._kernel.__wrapped__(made, DEVICE),
    "kvant_subspace_gram": lambda made, name: fit_subspace._kernel.__wrapped__(made, name, DEVICE),
    "kvant_fit_subspace": lambda made, name: fit_subspace._kernel.__wrapped__(
        made, name, DEVICE, made.shared(made.columns(1 << 20))
    ),
    "kvant_transform_kv": lambda made, name: transform_kv._kernel.__wrapped__(made, DEVICE),
    "kvant_unpack": lambda made, name: unpack._kernel.__wrapped__(made, DEVICE),
    "kvant_overlay_step": lambda made, name: overlay_step._kernel.__wrapped__(
        DEVICE, 64, 1, overlay_step.most_shared(DEVICE)
    ),
    "kvant_merge_parts": lambda made, name: merge_parts._kernel.__wrapped__(128, torch.float16, torch.bfloat16, DEVICE),
    "kvant_convert_rows": lambda made, name: convert_rows._kernel.__wrapped__(torch.bfloat16, torch.float16, DEVICE),
    "kvant_copy_rows": lambda made, name: copy_rows._kernel.__wrapped__(DEVICE),
}
"""How kvant launches a kernel of a plan at its largest. A new kernel needs its line here."""


def launch_of(gpu: Gpu, made: Any, kernel: str) -> Launch:
    with on(gpu):
        found: Launch = LAUNCHES[kernel](made, kernel)
    assert found.name == kernel and found.text == made.text, (found.name, kernel)
    return found


def ctas(gpu: Gpu, threads: int, registers: int, shared: int) -> int:
    """CTAs that a multiprocessor holds; 0 where a kernel cannot be launched. Registers are given to warps in units of 256, shared
    memory in units of 128 bytes."""
    warps = -(-threads // 32)
    if warps > CTA_WARPS or registers > THREAD_REGISTERS or shared > gpu.shared[0]:
        return 0
    by_registers = REGISTERS // (-(-max(registers, 1) * 32 // 256) * 256) // 4 * 4 // warps
    by_shared = gpu.shared[1] // (-(-shared // 128) * 128 + RESERVED_SHARED)
    return min(by_registers, by_shared, gpu.warps // warps, gpu.ctas)


# --- programs ---------------------------------------------------------------------------------------------------------


def programs(gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """What is compiled on a GPU, name and plan, or the reason (a str) why it is refused there: heads of 128 channels, 8 KV heads,
    bfloat16 queries, and some others."""
    with on(gpu):
        yield from list(_programs())


def texts(gpu: Gpu = GPUS["sm_90"]) -> Iterator[tuple[str, str]]:
    """The texts of `programs`."""
    return ((name, made.text) for name, made in programs(gpu) if not isinstance(made, str))


def _programs() -> Iterator[tuple[str, Any]]:
    bulk, shared, narrow = device.copies_in_bulk(DEVICE), device.shared_memory(DEVICE), unpack.narrow(DEVICE)
    for name, group, dual, inverse in (
        ("saw-int4", 4, (1, 128), (1, 128)),
        ("kvant-4-fast", 4, (2, 1), (2, 1)),
        ("oscar", 4, (2, 1), (0, 1)),
        ("oscar:group=64", 4, (2, 1), (0, 1)),
        ("oscar:group=32", 4, (2, 1), (0, 1)),
        ("int4:group=32", 4, (0, 1), (0, 1)),
        ("saw-int4-kmeans", 4, (0, 1), (0, 1)),
        ("int2", 4, (0, 1), (0, 1)),
        ("int3", 4, (0, 1), (0, 1)),
        ("kvant-2", 4, (2, 1), (0, 1)),
        ("kvant-3", 4, (2, 1), (0, 1)),
        ("kvant-4", 4, (2, 1), (0, 1)),
        ("kivi-k2v2", 4, (0, 1), (0, 1)),
        ("kitty-pro", 4, (0, 1), (0, 1)),
        ("squat-pre", 4, (0, 1), (0, 1)),
        ("vecinfer-2", 4, (2, 1), (2, 1)),
        ("million-2:books=space", 4, (0, 1), (0, 1)),
        ("turboquant-4", 4, (2, 1), (2, 1)),
        ("turboquant-3", 4, (2, 1), (2, 1)),
        ("int4", 8, (0, 1), (0, 1)),
    ):
        layout = Layout.of(recipes.get(name), 8, 128, dtype="bfloat16")
        refused = refusals.refuse(layout, DEVICE)
        if refused is not None:
            yield f"decode {name}", refused
        if refused is None and name in ("saw-int4", "kvant-2", "oscar"):
            windows = Layout.of(recipes.get(f"{name}:rollback=3"), 8, 128, dtype="bfloat16")
            made = plan.Plan(windows, 4 * group, "bfloat16", dual, inverse, False, bulk, shared, queries=4)
            yield f"decode {name} 4 queries high batch", made
            yield f"decode {name} 4 queries sink logits high batch", dataclasses.replace(made, sink_logits=True)
        for low_batch in () if refused else (False, True):
            made = plan.Plan(layout, group, "bfloat16", dual, inverse, False, bulk, shared, (), low_batch=low_batch)
            yield f"decode {name} group {group} {'low' if low_batch else 'high'} batch", made
            if name in ("saw-int4", "kvant-2", "oscar"):
                with_sinks = dataclasses.replace(made, sink_logits=True)
                yield f"decode {name} sink logits {'low' if low_batch else 'high'} batch", with_sinks
            if made.rotated_queries:  # where decode does not rotate queries itself
                before = dataclasses.replace(made, tuned=(("QUERY_TRANSFORM", 2),))
                yield f"decode {name} rotated before {'low' if low_batch else 'high'} batch", before
        refused = prefill.refuse(layout, DEVICE)
        if refused is not None:
            yield f"unpack {name}", refused
        for stream in () if refused else unpack.STREAMS:
            rotated = 64 if layout.recipe.streams[stream].rope == "block" else 0
            made_unpack = unpack.UnpackPlan(layout, stream, "bfloat16", "float16", rotated, narrow=narrow)
            yield f"unpack {name} {stream}", made_unpack
        refused = append.refuse(layout, DEVICE)
        if refused is not None:
            if append.refuse_layout(layout) is None:
                yield f"append {name}", refused
            continue
        if name in ("oscar", "kvant-2", "vecinfer-2", "kvant-4-fast"):
            block = layout.recipe.key.effective_rope_block
            yield f"transform {name}", transform_kv.TransformPlan(layout, "bfloat16", block)
        if layout.recipe.key.groupwise:
            yield f"append {name}", append_groups.GroupPlan(layout, ("bfloat16", "bfloat16"))
            continue
        if layout.format("key").is_pq:
            for rows in (append_pq.low_batch_rows(layout), append_pq.high_batch_rows(layout)):
                made_pq = append_pq.AppendPqPlan(layout, ("bfloat16", "bfloat16"), (128, 1), rows)
                yield f"append {name} {rows} rows", made_pq
            continue
        if nearest_centroids.serves(layout):
            for order in (1, 128):
                found = nearest_centroids.NearestPlan(layout, ("bfloat16", "bfloat16"), (order, 1), (False, False))
                yield f"nearest centroids {name} order {order}", found
        types = ("bfloat16", "bfloat16")
        yield f"append {name} rows", append.AppendPlan(layout, types, (128, 1))
        if name.startswith(("oscar", "turboquant")) or layout.recipe.key.effective_rope_block:
            block = layout.recipe.key.effective_rope_block
            step = append.AppendPlan(layout, types, (1, 1), (block > 0, False), (2, 2), block, step=True)
            yield f"append {name} a step", step
            if bulk:
                yield f"append {name} a step, early", dataclasses.replace(step, early=True, bulk=True)
        tiled = append.AppendPlan(layout, types, (128, 1), (True, False), (0, 2))
        if name.startswith(("oscar", "turboquant")) or layout.recipe.key.effective_rope_block:
            block = layout.recipe.key.effective_rope_block
            tiled = append.AppendPlan(layout, types, (1, 1), (block > 0, False), (2, 2), block)
            if torch.cuda.get_device_capability(DEVICE) == append.WARPGROUPS:
                yield f"append {name} prompts, warpgroups", dataclasses.replace(tiled, wgmma=True)
        if tiled.tiled:
            yield f"append {name} prompts", tiled
    for name, group, dim, query in (
        ("saw-int4", 8, 256, "bfloat16"),
        ("kvant-2", 4, 256, "bfloat16"),
        ("kvant-4", 16, 128, "float32"),
        ("kitty-pro", 16, 128, "float32"),
        ("vecinfer-4", 8, 128, "float32"),
        ("million-2:k.bits=10,v.bits=9", 4, 256, "bfloat16"),
    ):
        layout, about = Layout.of(recipes.get(name), 8, dim, dtype="bfloat16"), f"{name} dim {dim}"
        refused, matrix = refusals.refuse(layout, DEVICE), (2, 1) if layout.recipe.key.effective_rope_block else (0, 1)
        for low_batch in (False, True):
            made = plan.Plan(layout, group, query, matrix, (0, 1), False, bulk, shared, (), low_batch=low_batch)
            yield f"decode {about} {query} group {group} {'low' if low_batch else 'high'} batch", refused or made
        refused = prefill.refuse(layout, DEVICE)
        for stream in unpack.STREAMS:
            rotated = dim // 2 if layout.recipe.streams[stream].rope == "block" else 0
            made_unpack = unpack.UnpackPlan(layout, stream, "bfloat16", "float16", rotated, narrow=narrow)
            yield f"unpack {about} {stream}", refused or made_unpack
        refused = append.refuse(layout, DEVICE)
        if layout.format("key").is_pq:
            rows, types = append_pq.high_batch_rows(layout), ("float32", "float32")
            yield f"append {about} {rows} rows", refused or append_pq.AppendPqPlan(layout, types, (128, 1), rows)
        elif layout.recipe.key.groupwise:
            yield f"append {about}", refused or append_groups.GroupPlan(layout, ("float32", "float32"))
        else:
            yield f"append {about} rows", refused or append.AppendPlan(layout, ("float32", "float32"), (1, 1))
    layout = Layout.of(recipes.get("full"), 8, 256, dtype="bfloat16")
    yield "decode full dim 256", full.refuse(layout, DEVICE) or full.FullPlan(layout, 16, False, bulk, shared)
    for name in ("squat", "squat-pre"):
        layout = Layout.of(recipes.get(name), 8, 128, dtype="bfloat16")
        refused = append.refuse(layout, DEVICE)
        if name == "squat":
            yield f"append {name}", refused or append_groups.GroupPlan(layout, ("bfloat16", "bfloat16"))
        yield f"fit {name}", refused or fit_subspace.FitPlan(layout, 4, "bfloat16")
    yield "overlay_step", SimpleNamespace(text=overlay_step.text(64))
    yield "copy_rows", SimpleNamespace(text=copy_rows.text())
    yield "convert_rows", SimpleNamespace(text=convert_rows.text("bfloat16", "float16"))
    yield "merge_parts", SimpleNamespace(text=merge_parts.text(128, "float16", "bfloat16"))
    layout = Layout.of(recipes.get("full"), 8, 128, dtype="bfloat16")
    yield "decode full", full.refuse(layout, DEVICE) or full.FullPlan(layout, 4, False, bulk, shared)
    yield (
        "decode full sink logits",
        full.refuse(layout, DEVICE) or full.FullPlan(layout, 4, False, bulk, shared, sink_logits=True),
    )
    yield "append full", append_full.refuse(layout, DEVICE) or append_full.AppendFullPlan(layout)


def kernels_of(code: bytes) -> dict[str, dict[str, int]]:
    """Of an ELF file of NVIDIA's: registers of a thread, bytes of its stack, bytes of static shared memory, by kernel."""
    start, size, count, names_at = (*struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HHH", code, 58))
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    strings = headers[names_at][4]

    def text_at(offset: int) -> str:
        return code[offset : code.index(b"\0", offset)].decode()

    sections = {text_at(strings + header[0]): header for header in headers}
    symbols, symbol_names = sections[".symtab"], sections[".strtab"][4]
    found = {name.removeprefix(".text."): {} for name in sections if name.startswith(".text.")}  # type: dict[str, dict[str, int]]
    data = sections[".nv.info"]
    at, end = data[4], data[4] + data[5]
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", code, at)
        at += 4
        if form == 4:
            if attribute in (FRAME_SIZE, REGCOUNT) and value == 8:
                symbol, number = struct.unpack_from("<II", code, at)
                name = text_at(symbol_names + struct.unpack_from("<I", code, symbols[4] + 24 * symbol)[0])
                if name in found:
                    found[name]["stack" if attribute == FRAME_SIZE else "registers"] = number
            at += value
    for name, kernel in found.items():
        shared = sections.get(f".nv.shared.{name}")
        kernel["shared"] = shared[5] if shared else 0
        offset, length = sections[f".text.{name}"][4:6]
        kernel["code"] = length
        kernel["digest"] = hashlib.sha256(code[offset : offset + length]).hexdigest()[:12]  # type: ignore[assignment]
    return found


def overrun(gpu: Gpu, made: Any, kernel: str, found: dict[str, int]) -> str | None:
    """Why a GPU could not launch a compiled kernel as kvant does, or None. From sm_100 on, static shared memory seems to include what
    CUDA reserves; it is counted nevertheless."""
    launch, static = launch_of(gpu, made, kernel), found["shared"]
    shared = static + launch.shared
    about = (
        f"{launch.threads} threads of {found['registers']} registers, {static} + {launch.shared} bytes of shared memory"
    )
    if static > STATIC_SHARED:
        return f"{about}: more than {STATIC_SHARED} bytes are static"
    return None if ctas(gpu, launch.threads, found["registers"], shared) else f"{about}: {gpu.arch} cannot launch it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", choices=GPUS)
    parser.add_argument("--json", metavar="FILE", help="write the table there")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--digests", action="store_true", help="print a digest of the machine code of every text")
    args = parser.parse_args()
    gpu, table, failed = GPUS[args.arch], [], 0
    for name, made in programs(gpu):
        if args.only not in name:
            continue
        if isinstance(made, str):
            print(f"{name:36} refused: {made}")
            continue
        code = nvrtc.compile_text(made.text, nvrtc.architecture(made.text, gpu.capability))
        for kernel, found in sorted(kernels_of(code).items()):
            launch = launch_of(gpu, made, kernel)
            held = ctas(gpu, launch.threads, found["registers"], found["shared"] + launch.shared)
            table.append({"text": name, "kernel": kernel, **found, "dynamic": launch.shared, "ctas": held})
            line = f"{name:36} {kernel:20} registers {found['registers']:4} stack {found['stack']:5} shared {found['shared']:6}"
            line += f" + {launch.shared:6} CTAs {held:2} code {found['code']:7}"
            print(line + (f" {found['digest']}" if args.digests else ""), flush=True)
            reason = overrun(gpu, made, kernel, found)
            if reason is not None:
                failed += 1
                print(f"  {reason}")
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
