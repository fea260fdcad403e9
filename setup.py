"""The compiled operations for CPUs, and the README as a package index shows it. All else is in pyproject.toml."""

import hashlib
import re
import sys
import tomllib
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


def readme() -> str:
    """The README with links and pictures that lead to the repository: an index has no files beside it."""
    home = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    raw = home.replace("https://github.com/", "https://raw.githubusercontent.com/")
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{raw}/main/', text)
    return re.sub(r"\]\((?!https?:|#)", f"]({home}/blob/main/", text)


# The C is written for GCC and Clang.
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[] if sys.platform == "win32" else [extension],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
