"""The public API: few names, each with types and a docstring whose example runs. `help(kvant)` is a tour of them."""

from __future__ import annotations

import doctest
import inspect
import pydoc
from pathlib import Path
from typing import Any

import pytest

import kvant
from kvant import models


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What examples fit and check goes into a directory of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


DOCUMENTED: list[Any] = ["kvant", *kvant.__all__, "tiny"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_of_docstrings_run(name: str) -> None:
    found = kvant if name == "kvant" else models.tiny if name == "tiny" else getattr(kvant, name)
    text = found.__doc__ or ""
    examples = doctest.DocTestParser().get_doctest(text, {"tiny": models.tiny}, name, None, None)
    assert examples.examples, f"{name} has no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples, out=report.append)
    assert not runner.failures, "".join(report)


def test_there_are_six_to_ten_public_names() -> None:
    assert 6 <= len(kvant.__all__) <= 10
    assert kvant.__all__ == sorted(kvant.__all__)
    assert [name for name in dir(kvant) if not name.startswith("__")] == kvant.__all__


@pytest.mark.parametrize("name", kvant.__all__)
def test_public_callables_have_types(name: str) -> None:
    found = getattr(kvant, name)
    signature = inspect.signature(found.__init__ if inspect.isclass(found) else found)
    untyped = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.name != "self" and parameter.annotation is parameter.empty
    ]
    assert not untyped
    assert inspect.isclass(found) or signature.return_annotation is not signature.empty


def test_help_is_a_tour_of_the_public_names() -> None:
    text = pydoc.plain(pydoc.render_doc(kvant))
    assert "A tour" in text
    for name in kvant.__all__:
        assert name in text.partition("PACKAGE CONTENTS")[0], f"the tour does not name {name}"
    assert "class Layout" not in text
