from __future__ import annotations

import pytest

from kvant.cli import common


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said of a device, tests take the CPU: their numbers are the same on a machine with a GPU."""
    pick = common.pick_device
    monkeypatch.setattr(common, "pick_device", lambda asked: pick("cpu" if asked == "auto" else asked))


@pytest.fixture(autouse=True)
def _any_recipe_fits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny random models survive few recipes, and checking each takes a second: only tests that are marked `checks` do it."""
    if request.node.get_closest_marker("checks") is None:
        monkeypatch.setattr("kvant.eval.choose.require_fit", lambda *args, **options: None)
