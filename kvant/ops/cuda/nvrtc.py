"""From a text of CUDA C++ to a function that launches: NVRTC and the driver by their C interfaces, nothing to install or build.

Compiled code is kept in the user's cache directory under a digest of the text, the GPU's architecture and the compiler, so
that a kernel is compiled once on a machine. A file there is code that will run: it has to belong to the user, nobody else may
write to it, and it begins with a digest of its content; one that does not is compiled anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import stat
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch

from kvant.files import cache_dir, collect, open_regular, replacing
from kvant.ops.cuda.arguments import Arguments
from kvant.ops.cuda.config import config_text
from kvant.ops.streams import stream_handle

P = TypeVar("P")
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")  # the latter for lambdas
_MAGIC = b"kvant-kernel-1\n"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_unkept: dict[str, bytes] = {}  # compiled code that could not be written, by name
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def headers() -> dict[str, str]:
    """Every CUDA file of this directory by the name that `#include` gives it, such as "include/ptx.cuh"."""
    root = Path(__file__).parent
    files = sorted(path for part in ("include", "codecs", "kernels") for path in (root / part).glob("*.cu*"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}


def headers_digest(text: str) -> str:
    """Names the content of all headers that a text includes, directly or not: code that was compiled from others is not taken from
    the cache directory."""
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = headers()[name]
            waiting += _included(name)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@functools.cache
def _included(name: str) -> list[str]:
    return _INCLUDE.findall(headers()[name])


def program(
    *files: str,
    config: Mapping[str, object] | None = None,
    arguments: Sequence[Arguments] = (),
    defines: Mapping[str, object] | None = None,
) -> str:
    """The text that includes these files, after `struct Config` of `config` (kvant/ops/cuda/config.py) and the structs of its
    kernels' `arguments`. `defines` are for the preprocessor alone: code that a compiler must not see, such as PTX that an older GPU
    lacks."""
    assert all(name in headers() for name in files), files
    parts = ['#include "include/ptx.cuh"\n'] if config or arguments else []  # the names of types
    parts += [config_text(config)] if config else []
    parts += [about.text for about in arguments]
    parts += [f"#define {name} {value}\n" for name, value in (defines or {}).items()]
    return "".join([*parts, *(f'#include "{name}"\n' for name in files)])


def _candidates() -> list[str]:
    """Where libnvrtc may lie: beside PyTorch's other libraries, in a CUDA toolkit, or where the loader looks."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    found = [str(Path(root, "nvidia", part, "lib", name)) for root in sys.path for part in (f"cu{major}", "cuda_nvrtc")]
    found.append(str(Path(torch.__file__).parent / "lib" / name))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found += [str(Path(home, "lib64", name)), name, "libnvrtc.so"]
    return [path for path in found if "/" not in path or Path(path).exists()]


@functools.cache
def compiler() -> ctypes.CDLL:
    """NVRTC; OSError where there is none."""
    for path in _candidates():
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if "/" in path else ():
                ctypes.CDLL(str(builtins))  # NVRTC opens it by name, and finds what is open
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError("NVRTC was not found beside PyTorch or in a CUDA toolkit (libnvrtc.so)")


@functools.cache
def driver() -> ctypes.CDLL:
    """NVIDIA's driver; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def missing() -> str | None:
    """Why kernels cannot be compiled and run on this machine, or None."""
    for part in (driver, compiler):
        try:
            part()
        except OSError as error:
            return str(error)
    return None


def compile_text(text: str, arch: str) -> bytes:
    """Machine code for an architecture such as "sm_90". A text that does not compile raises with the compiler's log."""
    nvrtc = compiler()
    program = create_program(text)
    try:
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}")]
        array = (ctypes.c_char_p * len(options))(*options)
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        if status:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"a kernel does not compile for {arch}:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        _checked(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def create_program(text: str) -> ctypes.c_void_p:
    """NVRTC's handle of a text and the headers that it may include."""
    found, names = ctypes.c_void_p(), list(headers())
    contents = (ctypes.c_char_p * len(names))(*(headers()[name].encode() for name in names))
    paths = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
    status = compiler().nvrtcCreateProgram(ctypes.byref(found), text.encode(), b"kvant.cu", len(names), contents, paths)
    _checked(status, "nvrtcCreateProgram")
    return found


def compiler_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def cached_code(text: str, arch: str, directory: Path | None = None) -> bytes:
    """As `compile_text`, from the cache directory where it is there; written whole or not at all. Where it cannot be written,
    that is said once, and the code serves this process."""
    if directory is None:
        directory = cache_dir() / "kernels"
    name = hashlib.sha256(repr((text, headers_digest(text), arch, compiler_version(), OPTIONS)).encode()).hexdigest()
    path = directory / f"{name}.cubin"
    code = _unkept.get(name) or _read_code(path, name)
    if code is None:
        code = compile_text(text, arch)
        try:
            _write_code(path, name, code)
        except OSError as error:
            if not _unkept:
                warnings.warn(
                    f"compiled kernels cannot be kept in {directory}, every process compiles: {error}", stacklevel=2
                )
            _unkept[name] = code
    return code


def _digest(name: str, code: bytes) -> bytes:
    """Names compiled code together with the text that it was compiled from."""
    return hashlib.sha256(_MAGIC + name.encode() + code).digest()


def _read_code(path: Path, name: str) -> bytes | None:
    """Compiled code as `_write_code` wrote it, or None: nothing is there, or nothing that can be trusted."""
    try:
        with open(open_regular(path, getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            for about in (os.stat(path.parent), os.fstat(file.fileno())):
                if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return None
            data = file.read()
    except (OSError, ValueError):
        return None
    start = len(_MAGIC) + 32
    code = data[start:]
    return code if data[:start] == _MAGIC + _digest(name, code) else None


def _write_code(path: Path, name: str, code: bytes) -> None:
    """Keeps compiled code in a directory that is the user's alone."""
    directory = path.parent
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.stat(directory).st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    os.chmod(directory, 0o700)
    collect(directory)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # what is there was not trusted, nor are its permissions
    with replacing(path, private=True) as temporary:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:
            file.write(_MAGIC + _digest(name, code) + code)


def half_of(batch: int) -> int:
    """The largest power of two below a number of sequences, or 0: where a search among them begins."""
    return 1 << (batch - 1).bit_length() >> 1


def architecture(text: str, capability: tuple[int, int]) -> str:
    """What a text is compiled for. Products of warpgroups are instructions of one architecture alone, which later ones lack."""
    return "sm_{}{}".format(*capability) + ("a" if "#define WGMMA 1\n" in text else "")


class Numbered(Generic[P]):
    """Plans of kernels by number: a custom operator of torch takes integers, not plans."""

    def __init__(self) -> None:
        self._plans: list[P] = []
        self._numbers: dict[P, int] = {}

    def number(self, plan: P) -> int:
        if plan not in self._numbers:
            self._numbers[plan] = len(self._plans)
            self._plans.append(plan)
        return self._numbers[plan]

    def __getitem__(self, number: int) -> P:
        return self._plans[number]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Configuration(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """A kernel on one device. Arguments are passed as one C structure."""

    def __init__(self, text: str, name: str, device: torch.device, threads: int, shared: int = 0) -> None:
        code = cached_code(text, architecture(text, torch.cuda.get_device_capability(device)))
        self.threads, self.shared = threads, shared
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # torch's context is the current one from here on
            cuda = driver()
            _driver(cuda.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
            _driver(
                cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
                "cuModuleGetFunction",
            )
            if shared:  # more than 48 KiB with the kernel's own have to be asked for
                _driver(cuda.cuFuncSetAttribute(self._function, _SHARED_BYTES, shared), "cuFuncSetAttribute")
            count = ctypes.c_int()
            status = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), self._function, threads, ctypes.c_size_t(shared)
            )
            _driver(status, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        self.blocks_per_processor = count.value
        self.blocks = count.value * torch.cuda.get_device_properties(device).multi_processor_count

    def launch(self, blocks: tuple[int, int], arguments: ctypes.Structure, dependent: bool = False) -> None:
        """Queues the kernel on the current stream of the device. One that is `dependent` may start before the kernel before
        it has ended, as soon as all blocks of that one allow it, and waits for it by itself (sm_90 on)."""
        if torch.cuda.current_device() != self.device.index:  # a stream belongs to its device's context
            with torch.cuda.device(self.device):
                self.launch(blocks, arguments, dependent)
            return
        stream = ctypes.c_void_p(stream_handle(self.device))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        if dependent:
            attribute = _Attribute(_SERIALIZATION, 0, 1)
            configuration = _Configuration(
                *blocks, 1, self.threads, 1, 1, self.shared, stream, ctypes.pointer(attribute), 1
            )
            status = driver().cuLaunchKernelEx(ctypes.byref(configuration), self._function, parameters, None)
            _driver(status, "cuLaunchKernelEx")
            return
        status = driver().cuLaunchKernel(
            self._function, *blocks, 1, self.threads, 1, 1, self.shared, stream, parameters, None
        )
        _driver(status, "cuLaunchKernel")


def _checked(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} failed with status {status}")


def _driver(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call} failed: {(text.value or b'unknown').decode()} ({status})")
