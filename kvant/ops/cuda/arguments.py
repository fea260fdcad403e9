"""Arguments of a CUDA kernel, declared once: the C++ struct of the program and the ctypes structure of the launch.

    CopyArguments = Arguments("CopyArguments", x=pointer("uint4", "[layers, rows, ...]"), words=int64("16-byte words of a row"))
    nvrtc.program("kernels/copy_rows.cu", arguments=[CopyArguments])
    kernel.launch(grid, CopyArguments.fill(x=x, words=4))

`fill` takes every field by its name: a missing or an unknown one is a TypeError. Pointers are given as tensors. It is on the host's
path of every decode step, so it is a generated function, about as fast as the structure's own constructor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple


class Field(NamedTuple):
    """A field of an argument struct. `convert` is how `fill` makes it from what it is given, as Python in which {} is its name."""

    ctype: Any
    cpp: str
    doc: str
    convert: str = "{}"


def pointer(to: str, doc: str) -> Field:
    """An address that is always there: `fill` takes a tensor."""
    return Field(ctypes.c_void_p, f"{to}*", doc, "{}.data_ptr()")


def optional(to: str, doc: str) -> Field:
    """An address or null: `fill` takes a tensor or None."""
    return Field(ctypes.c_void_p, f"{to}*", doc, "None if {0} is None else {0}.data_ptr()")


def int32(doc: str) -> Field:
    return Field(ctypes.c_int32, "int", doc)


def int64(doc: str) -> Field:
    return Field(ctypes.c_int64, "s64", doc)


def float32(doc: str) -> Field:
    return Field(ctypes.c_float, "float", doc)


class Arguments:
    """The argument struct of a kernel, by the name that it has in C++."""

    declared: ClassVar[dict[str, Arguments]] = {}  # by name

    def __init__(self, name: str, /, **fields: Field) -> None:
        assert name not in self.declared, name
        self.name, self.fields = name, fields
        namespace = {"_fields_": [(field, about.ctype) for field, about in fields.items()]}
        self.structure: type[ctypes.Structure] = type(name, (ctypes.Structure,), namespace)
        self.fill: Callable[..., ctypes.Structure] = self._filler()
        self.declared[name] = self

    def _filler(self) -> Callable[..., ctypes.Structure]:
        values = ", ".join(about.convert.format(field) for field, about in self.fields.items())
        source = f"def fill(*, {', '.join(self.fields)}):\n    return Structure({values})\n"
        namespace: dict[str, Any] = {"Structure": self.structure}
        exec(source, namespace)  # as dataclasses and named tuples do; the names are ours
        fill: Callable[..., ctypes.Structure] = namespace["fill"]
        fill.__qualname__ = f"{self.name}.fill"
        return fill

    @property
    def text(self) -> str:
        """The struct in C++."""
        lines = [f"  {about.cpp} {field};  // {about.doc}\n" for field, about in self.fields.items()]
        return "".join([f"struct {self.name} {{\n", *lines, "};\n"])


UNROTATE_FIELDS: dict[
    str, Field
] = {  # of a kernel that unrotates rows to the start of their RoPE block (include/subspace.cuh)
    "cosine": optional(
        "const float", "[rope_blocks, rope_half]: of the start of a RoPE block, where keys are unrotated"
    ),
    "sine": optional("const float", "[rope_blocks, rope_half]"),
    "rope_first": int32("RoPE position of a sequence's first token"),
    "rope_blocks": int32("RoPE blocks of the tables"),
    "rope_half": int32("rotated pairs of channels"),
}
