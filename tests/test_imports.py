"""What is imported when: torch takes seconds, and neither `import kvant` nor a command's help needs it."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import kvant
import kvant.cli
import kvant.plan
from kvant import recipes
from kvant.cli import common

HEAVY = "torch", "transformers", "rich", "numpy", "safetensors"
COMMANDS = [
    name
    for action in kvant.cli.parser()._actions
    if isinstance(action, argparse._SubParsersAction)
    for name in action.choices
]


def imported_after(code: str) -> list[str]:
    """Which of the heavy modules a fresh interpreter holds after it ran some code."""
    script = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return list(eval(done.stdout.splitlines()[-1]))


def test_importing_kvant_imports_nothing_heavy() -> None:
    assert imported_after("import kvant; kvant.__version__; dir(kvant)") == []


def test_help_and_version_import_nothing_heavy() -> None:
    """All of them in one process: what one imports would show in the end."""
    lines = ["from kvant.cli import main"]
    for argv in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
        lines += ["try:", f"    main({argv})", "except SystemExit as stop:", "    assert not stop.code"]
    assert imported_after("\n".join(lines)) == []


def test_public_names_are_listed_and_there() -> None:
    listed = dir(kvant)
    for name in kvant.__all__:
        assert name in listed
        assert getattr(kvant, name) is not None
    assert {"Cache", "artifact_for"} <= set(listed)
    with pytest.raises(AttributeError, match="module 'kvant' has no attribute 'nonsense'"):
        _ = kvant.nonsense  # type: ignore[attr-defined]
    assert not hasattr(kvant, "_nonsense")


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    code = (
        "import kvant.plan, kvant.recipe, kvant\n"
        "assert kvant.plan('qwen3-8b').bf16.requests and kvant.recipe('int4').name == 'int4'\n"
        "from kvant.plan import PRESETS\n"
        "assert kvant.recipes.get('int4') and kvant.layout.Layout is kvant.Layout"
    )
    assert "torch" in imported_after(code)


def test_help_names_the_default_recipe() -> None:
    assert common.DEFAULT_RECIPE == recipes.DEFAULT
