"""For mkdocstrings: docstrings of kvant as Markdown. They are written to be read in a terminal: parameters as two columns, examples
as doctests. Here the columns become a list and examples become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    out: list[str] = []
    kind, column = "", 0
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if line.startswith(">>>"):
            if kind != "code":
                out += ["", "```pycon"]
            kind = "code"
            out.append(line)
        elif kind == "code" and line.strip():
            out.append(line)
        elif kind == "code":
            out += ["```", ""]
            kind = ""
        elif entry:
            out += [""] * (kind != "list")
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            out.append(f"- {names}: {entry[2]}")
            kind, column = "list", entry.start(2)
        elif kind == "list" and line.startswith(" " * column) and line.strip():
            out.append(f"  {line.strip()}")
        else:
            kind = "" if not line.strip() else kind
            out.append(line)
    if kind == "code":
        out.append("```")
    return "\n".join(out)


class AsMarkdown(griffe.Extension):
    """Rewrites the docstrings of all objects once they are loaded."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
