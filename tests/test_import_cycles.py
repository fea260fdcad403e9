"""No module of kvant imports itself by way of others. Imports under TYPE_CHECKING and inside functions count too: modules that
need each other's names are one module, or lack an interface between them."""

from __future__ import annotations

import ast
from pathlib import Path

import kvant

ROOT = Path(kvant.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    out = {}
    for path in ROOT.rglob("*.py"):
        parts = ("kvant", *path.relative_to(ROOT).with_suffix("").parts)
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that the text of one names in an import, wherever the import stands."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                out.add(inner if inner in known else node.module or "")
    return out & set(known)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    assert len(known) > 100
    graph = {name: imports(path, known) for name, path in known.items()}
    assert cycles(graph) == []


def test_a_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(cycles(graph)) == [["a", "b", "c"], ["d", "e"]]
