from __future__ import annotations

import pytest

from kvant.cli import common


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said of a device, tests take the CPU: their numbers are the same on a machine with a GPU."""
    pick = common.pick_device
    monkeypatch.setattr(common, "pick_device", lambda asked: pick("cpu" if asked == "auto" else asked))
