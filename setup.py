"""The compiled operations for CPUs. Everything else about the package is in pyproject.toml."""

import hashlib
import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = "kvant/ops/cpu/native"
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread", "-Wno-psabi"]

# kvant/ops/cpu/library.py compares this with the sources beside it, where there are any
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(NATIVE).glob("*.[ch]")))).hexdigest()

extension = Extension(
    "kvant.ops.cpu._native",
    [f"{NATIVE}/{name}.c" for name in ("module", "generic", "avx2", "avx512", "neon", "i8mm")],
    depends=sorted(map(str, Path(NATIVE).glob("*.h"))),
    define_macros=[("KVANT_SOURCES", f'"{SOURCES}"')],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,  # without a compiler, kvant installs all the same; `kvant doctor` says what is missing
)

# The C is written for GCC and Clang.
setup(
    ext_modules=[] if sys.platform == "win32" else [extension],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
