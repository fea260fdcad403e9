#!/usr/bin/env python3
"""Packs torch and vLLM for a GPU machine without network, where nothing can be installed and files travel in parts.

    scripts/gpu_overlay.py --out DIR [--vllm 0.33.0] [--torch 2.14.0] [--only torch|vllm] [--arch 90] [--part-mib 50]

The other machine runs Python 3.12 on x86-64 and has an older torch, whose CUDA libraries serve the newer one. DIR/torch holds torch,
triton, torchvision and NCCL, DIR/vllm holds vLLM and what it imports, each as part.00, part.01, ... of one archive. torch is
the version that vLLM's wheel names, unless --torch says otherwise. DIR/take.sh and DIR/setup.sh run there; CONTRIBUTING.md says how.

Machine code for other GPUs and the symbols for debuggers are overwritten with zeros, which pack to nothing: a loader finds every
header and address where the linker put them. What a 16-bit model on one GPU does not run is left out (`WITHOUT`).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + ["manylinux2014_x86_64", "linux_x86_64"]
SHARED = Path(__file__).with_name("gpu_overlay")  # the scripts of the other machine

# Files that are left out of the wheels, as patterns of paths.
WITHOUT = [
    *("torch/bin/protoc*", "torch/lib/*.a", "torch/test/*"),
    *("triton/backends/nvidia/lib/cupti*", "triton/backends/nvidia/bin/ptxas-blackwell", "triton/_C/libproton.so"),
    *("triton/instrumentation/*", "triton/FileCheck"),
    *("nvidia/nccl/include/*", "nvidia/nccl/lib/*.bc", "nvidia/nccl/lib/*.a"),
    *(
        "vllm/vllm-rs",
        "vllm/_qutlass_C.*",
        "vllm/_deepselect_C.*",
        "vllm/_flashmla*_C.*",
        "vllm/kernels/helion/configs/*",
    ),
    *("vllm/vllm_flash_attn/_vllm_fa2_C.*", "vllm/vllm_flash_attn/cute/*"),
    *("vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*"),
    *("*/tests/*", "*/__pycache__/*"),
]

# Packages that vLLM asks for and text models in 16 bits do not import; those that come with torch; those that the machine has.
NOT_CARRIED = [
    *(
        "flashinfer-python",
        "tilelang",
        "nvtx",
        "quack-kernels",
        "tokenspeed-mla",
        "humming-kernels",
        "numba",
        "mistral-common",
    ),
    *(
        "pynvvideocodec",
        "torchaudio",
        "torchcodec",
        "opencv-python-headless",
        "fastsafetensors",
        "instanttensor",
        "sentry-sdk",
    ),
    *("opentelemetry-exporter-otlp", "fastapi-cli", "fastapi-cloud-cli", "fastar", "rignore", "rich-toolkit"),
    *("detect-installer", "agent-detector", "torch", "torchvision", "triton", "nvidia-*", "cuda-*"),
    *(
        "numpy",
        "transformers",
        "tokenizers",
        "huggingface-hub",
        "hf-xet",
        "safetensors",
        "sentencepiece",
        "tiktoken",
        "ninja",
    ),
    *("setuptools", "certifi", "sympy", "mpmath", "networkx"),
]
TOOLS = ["pytest", "pytest-xdist", "hypothesis>=6.100", "gguf>=0.17", "httpx"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def carried(name: str) -> bool:
    return not any(fnmatch.fnmatch(canonical(name), pattern) for pattern in NOT_CARRIED)


def pip(*arguments: str) -> None:
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--python-version", PYTHON, *platforms]
    subprocess.run([sys.executable, "-m", "pip", arguments[0], *options, *arguments[1:]], check=True)


def download(requirement: str, cache: Path) -> Path:
    """The wheel of one exact requirement; three equals signs ask for a version without a local label, which is torch's CUDA build."""
    name, version = requirement.split("===")
    pattern = f"{canonical(name).replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        pip("download", "--no-deps", "--dest", str(cache), requirement)
    (wheel,) = cache.glob(pattern)
    return wheel


def requirements(wheel: Path) -> list[str]:
    """What a wheel asks for without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return [
            line
            for line in message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
            if "extra ==" not in line
        ]


def required(wheel: Path, name: str) -> str:
    """The requirement of a wheel by the name of a package: the version it names."""
    for line in requirements(wheel):
        if match := re.match(rf"{re.escape(name)} ?[(]?(?:==|~=)([\w.]+)", line):
            return match[1]
    raise ValueError(f"{wheel.name} names no version of {name}; it asks for {requirements(wheel)}")


def unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if not item.is_dir() and not any(fnmatch.fnmatch(item.filename, pattern) for pattern in WITHOUT):
                path = Path(archive.extract(item, directory))
                path.chmod(item.external_attr >> 16 & 0o777 or 0o644)
    for purelib in directory.glob("*.data/*lib"):
        shutil.copytree(purelib, directory, dirs_exist_ok=True)
    for data in directory.glob("*.data"):
        shutil.rmtree(data)


def sections(elf: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Offset and bytes of each section of a 64-bit ELF file that has contents, but for the section of their names."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + index * size) for index in range(count)]
    found = {}
    for index, (name, kind, _, _, offset, length, *_) in enumerate(headers):
        start = headers[names][4] + name
        if kind not in (0, 8) and index != names:  # 8: no contents in the file
            found[elf[start : elf.find(b"\0", start)].decode()] = (offset, length)
    return found


class Image(NamedTuple):
    """One image of a fat binary: machine code or PTX."""

    machine_code: bool
    architecture: int
    start: int  # of its header
    stop: int


class FatBinary(NamedTuple):
    start: int  # of its header
    first: int  # of its first image
    stop: int
    images: list[Image]


def fat_binaries(elf: mmap.mmap, start: int, length: int) -> Iterator[FatBinary]:
    """The fat binaries of a section: a header with their size, then images, each behind a header of its own."""
    position, end = start, start + length
    while (position := elf.find(b"\x50\xed\x55\xba", position, end)) >= 0:
        header, size = struct.unpack_from("<HQ", elf, position + 6)
        entry, stop = position + header, position + header + size
        if stop > end:
            raise ValueError(f"a fat binary of {size} bytes at {position} ends behind its section at {end}")
        found = FatBinary(position, entry, stop, [])
        while entry < stop:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", elf, entry)
            (architecture,) = struct.unpack_from("<I", elf, entry + 28)
            after = entry + entry_header + entry_size
            if kind not in (1, 2) or not 50 <= architecture < 1000 or after > stop:
                raise ValueError(
                    f"unknown image in the fat binary at {position}: kind {kind}, architecture {architecture}"
                )
            found.images.append(Image(kind == 2, architecture, entry, after))
            entry = after
        yield found
        position = stop


def keep_own(elf: mmap.mmap, binary: FatBinary, architecture: int) -> int:
    """Keeps the images that a GPU reads and puts zeros behind them; says how many. A GPU takes machine code of its generation, or
    compiles the newest PTX that it knows. Where there is neither, the smallest image stays: no fat binary is empty."""
    known = [image for image in binary.images if image.architecture <= architecture]
    own = [image for image in known if image.machine_code and image.architecture // 10 == architecture // 10]
    own = own or sorted((image for image in known if not image.machine_code), key=lambda image: image.architecture)[-1:]
    own = own or sorted(binary.images, key=lambda image: image.stop - image.start)[:1]
    contents = b"".join(elf[image.start : image.stop] for image in own)
    struct.pack_into("<Q", elf, binary.start + 8, len(contents))
    elf[binary.first : binary.stop] = contents.ljust(binary.stop - binary.first, b"\0")
    return binary.stop - binary.first - len(contents)


def slim(path: Path, architecture: int) -> int:
    """Overwrites with zeros what a shared library holds for other GPUs and for debuggers; says how many bytes."""
    zeros = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as elf:
        for name, (start, length) in sections(elf).items():
            if name in (".symtab", ".strtab") or name.startswith(".debug_"):
                elf[start : start + length] = bytes(length)
                zeros += length
            elif name in (".nv_fatbin", "__nv_relfatbin"):
                zeros += sum(keep_own(elf, binary, architecture) for binary in list(fat_binaries(elf, start, length)))
    return zeros


def is_library(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(5) == b"\x7fELF\x02"


def pack(staged: Path, target: Path, architecture: int, part_bytes: int) -> None:
    """One archive in parts, with their checksums; parts of an earlier archive go."""
    for path in sorted(staged.rglob("*")):
        if path.is_file() and not path.is_symlink() and is_library(path):
            zeros = slim(path, architecture)
            if path.stat().st_size > 20e6:
                print(
                    f"  {path.relative_to(staged)}: {path.stat().st_size / 2**20:.0f} MiB, of which {zeros / 2**20:.0f} zeros",
                    flush=True,
                )
    target.mkdir(parents=True, exist_ok=True)
    archive = target / "archive.tar.xz"
    command = 'tar --sort=name --owner=0 --group=0 -C "$1" -cf - . | xz -T0 -0 >"$2"'
    subprocess.run(["bash", "-c", f"set -o pipefail; {command}", "bash", str(staged), str(archive)], check=True)
    for old in target.glob("part.*"):
        old.unlink()
    with open(archive, "rb") as file:
        sums = []
        for index, part in enumerate(iter(lambda: file.read(part_bytes), b"")):
            name = f"part.{index:02d}"
            (target / name).write_bytes(part)
            sums.append(f"{hashlib.sha256(part).hexdigest()}  {name}\n")
    archive.unlink()
    (target / "SHA256SUMS").write_text("".join(sums))
    print(
        f"{target}: {len(sums)} parts, {sum(part.stat().st_size for part in target.glob('part.*')) / 1e6:.0f} MB",
        flush=True,
    )


def stage_torch(version: str, cache: Path, staged: Path) -> None:
    torch = download(f"torch==={version}", cache)
    vision = f"0.{int(version.split('.')[1]) + 15}.{version.split('.')[2]}"
    unpack(torch, staged)
    unpack(download(f"torchvision==={vision}", cache), staged)
    unpack(download(f"triton==={required(torch, 'triton')}", cache), staged)
    unpack(download(f"nvidia-nccl-cu13==={required(torch, 'nvidia-nccl-cu13')}", cache), staged)


def stage_vllm(wheel: Path, cache: Path, staged: Path) -> None:
    """vLLM and, at versions that go together, the packages that it asks for and the other machine may not have."""
    unpack(wheel, staged)
    wanted = [line for line in requirements(wheel) if carried(re.match(r"[\w.-]+", line)[0])]  # type: ignore[index]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        resolve = ["--dry-run", "--ignore-installed", "--target", temporary, "--report", str(report)]
        pip("install", *resolve, *wanted, *TOOLS)
        chosen = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = [f"{item['name']}=={item['version']}" for item in chosen if carried(item["name"])]
    print(f"with vLLM: {' '.join(pins)}", flush=True)
    wheels = cache / f"with-{wheel.name}"
    wheels.mkdir(exist_ok=True)
    pip("download", "--no-deps", "--dest", str(wheels), *pins)
    for pin in wheels.glob("*.whl"):
        unpack(pin, staged)


def write_setup(out: Path) -> None:
    """The scripts for the other machine, with the checksums of the parts."""
    for script in SHARED.iterdir():
        text = script.read_text()
        sums = {path.parent.name: path.read_text() for path in sorted(out.glob("*/SHA256SUMS"))}
        lines = [
            f"{line.split()[0]}  {name}/{line.split()[1]}"
            for name, text_sums in sums.items()
            for line in text_sums.splitlines()
        ]
        written = out / script.name
        written.write_text(text.replace("@SHA256SUMS@", "\n".join(lines)))
        written.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the parts")
    parser.add_argument("--cache", type=Path, help="directory of downloaded wheels (default: DIR/wheels)")
    parser.add_argument("--vllm", default="0.33.0", help="version of vLLM")
    parser.add_argument("--torch", help="version of torch (default: the one that vLLM's wheel names)")
    parser.add_argument("--only", choices=["torch", "vllm"], help="build one of the two archives")
    parser.add_argument("--arch", type=int, default=90, help="architecture of the GPU")
    parser.add_argument("--part-mib", type=int, default=50, help="MiB of a part")
    arguments = parser.parse_args()
    cache = arguments.cache or arguments.out / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    wheel = download(f"vllm==={arguments.vllm}", cache)
    for name in [arguments.only] if arguments.only else ["torch", "vllm"]:
        with tempfile.TemporaryDirectory(dir=arguments.out, prefix=f"{name}-") as staged:
            if name == "torch":
                stage_torch(arguments.torch or required(wheel, "torch"), cache, Path(staged))
            else:
                stage_vllm(wheel, cache, Path(staged))
            os.chmod(staged, 0o755)
            pack(Path(staged), arguments.out / name, arguments.arch, arguments.part_mib * 2**20)
    write_setup(arguments.out)


if __name__ == "__main__":
    main()
