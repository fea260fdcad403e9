#!/usr/bin/env python3
"""Registers, stack (spills) and shared memory of the CUDA kernels, read from the code that NVRTC makes. Needs no GPU.

    scripts/kernel_resources.py [--arch sm_90] [--json FILE] [--digests]

A change of a kernel is compared with the version before by running this on both. `--digests` prints a digest of the machine code
too: after a change of names or of files alone it must stay as it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvant import recipes
from kvant.layout import Layout
from kvant.ops.cuda import (
    append,
    append_groups,
    append_pq,
    fit_subspace,
    full,
    nearest_centroids,
    nvrtc,
    overlay_step,
    plan,
    transform_kv,
    unpack,
)

H200 = (227 * 1024, 228 * 1024)  # shared memory of a thread block and of a multiprocessor
FRAME_SIZE, REGCOUNT = 0x11, 0x2F  # attributes of a kernel in .nv.info


def texts() -> Iterator[tuple[str, str]]:
    """What is compiled, by name: heads of 128 channels, 8 KV heads, bfloat16 queries."""
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
        if name in ("saw-int4", "kvant-2", "oscar"):
            windows = Layout.of(recipes.get(f"{name}:rollback=3"), 8, 128, dtype="bfloat16")
            made = plan.Plan(windows, 4 * group, "bfloat16", dual, inverse, False, True, H200, queries=4)
            yield f"decode {name} 4 queries high batch", made.text
        for low_batch in (False, True):
            made = plan.Plan(layout, group, "bfloat16", dual, inverse, False, True, H200, (), low_batch=low_batch)
            yield f"decode {name} group {group} {'low' if low_batch else 'high'} batch", made.text
            if made.rotated_queries:  # where decode does not rotate queries itself
                before = dataclasses.replace(made, tuned=(("QUERY_TRANSFORM", 2),))
                yield f"decode {name} rotated before {'low' if low_batch else 'high'} batch", before.text
        if name in ("oscar", "kvant-2", "vecinfer-2", "kvant-4-fast"):
            block = layout.recipe.key.effective_rope_block
            yield f"transform {name}", transform_kv.TransformPlan(layout, "bfloat16", block).text
        for stream in unpack.STREAMS:
            rotated = 64 if layout.recipe.streams[stream].rope == "block" else 0
            yield f"unpack {name} {stream}", unpack.UnpackPlan(layout, stream, "bfloat16", "float16", rotated).text
        if layout.recipe.key.groupwise:
            yield f"append {name}", append_groups.GroupPlan(layout, ("bfloat16", "bfloat16")).text
            continue
        if layout.format("key").is_pq:
            for rows in (append_pq.low_batch_rows(layout), append_pq.high_batch_rows(layout)):
                made_pq = append_pq.AppendPqPlan(layout, ("bfloat16", "bfloat16"), (128, 1), rows)
                yield f"append {name} {rows} rows", made_pq.text
            continue
        if nearest_centroids.serves(layout):
            for order in (1, 128):
                found = nearest_centroids.NearestPlan(layout, ("bfloat16", "bfloat16"), (order, 1), (False, False))
                yield f"nearest centroids {name} order {order}", found.text
        if append.refuse_layout(layout) is None:
            types = ("bfloat16", "bfloat16")
            yield f"append {name} rows", append.AppendPlan(layout, types, (128, 1)).text
            if name.startswith(("oscar", "turboquant")) or layout.recipe.key.effective_rope_block:
                block = layout.recipe.key.effective_rope_block
                step = append.AppendPlan(layout, types, (1, 1), (block > 0, False), (2, 2), block, step=True)
                yield f"append {name} a step", step.text
            tiled = append.AppendPlan(layout, types, (128, 1), (True, False), (0, 2))
            if name.startswith(("oscar", "turboquant")) or layout.recipe.key.effective_rope_block:
                block = layout.recipe.key.effective_rope_block
                tiled = append.AppendPlan(layout, types, (1, 1), (block > 0, False), (2 if block else 3, 3), block)
                yield f"append {name} prompts, warpgroups", dataclasses.replace(tiled, wgmma=True).text
            if tiled.tiled:
                yield f"append {name} prompts", tiled.text
    for name in ("squat", "squat-pre"):
        layout = Layout.of(recipes.get(name), 8, 128, dtype="bfloat16")
        if name == "squat":
            yield f"append {name}", append_groups.GroupPlan(layout, ("bfloat16", "bfloat16")).text
        yield f"fit {name}", fit_subspace.FitPlan(layout, 4, "bfloat16").text
    yield "overlay_step", overlay_step.text(64)
    layout = Layout.of(recipes.get("full"), 8, 128, dtype="bfloat16")
    yield "decode full", full.FullPlan(layout, 4, False, True, H200).text


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--json", metavar="FILE", help="write the table there")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--digests", action="store_true", help="print a digest of the machine code of every text")
    args = parser.parse_args()
    table = []
    for name, text in texts():
        if args.only not in name:
            continue
        code = nvrtc.compile_text(text, args.arch + ("a" if "#define WGMMA 1\n" in text else ""))
        for kernel, found in sorted(kernels_of(code).items()):
            table.append({"text": name, "kernel": kernel, **found})
            line = f"{name:36} {kernel:20} registers {found['registers']:4} stack {found['stack']:5} shared {found['shared']:6}"
            print(line + f" code {found['code']:7}" + (f" {found['digest']}" if args.digests else ""), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
