"""Disks that are full, and directories that nobody may write to: what was computed is used all the same, or the error is one line.
Nothing that is half-written stays."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import kvant
from kvant import artifact, models, recipes, verdicts
from kvant.artifact import FILE, Artifact
from kvant.calibrate import checkpoint
from kvant.cli.artifact_options import artifacts_for
from kvant.cli.common import write_json
from kvant.eval.asking import Answer, Journal
from kvant.files import making_directory, replacing
from tests.cli.test_cli import run, text, tiny  # noqa: F401 (fixtures)
from tests.engines.test_hf import make_model
from tests.test_artifact import made_up

OSCAR = "oscar:sink=4,recent=16"
RUST = "I/O error: No space left on device (os error 28)"  # what libraries in Rust say
ERRORS = {
    "safetensors": SafetensorError(f"Error while serializing: {RUST}"),
    "an older safetensors": SafetensorError("Error while serializing: StorageFull"),
    "tokenizers": Exception(RUST),
    "the system": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """A file system of 64 KiB without a free block, in which directories can still be made."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        with contextlib.suppress(OSError), open(directory / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture(params=["mounted", *ERRORS])
def full(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which safetensors can write no tensors: a full file system, or one that errors say is full."""
    directory = tmp_path / "full"
    if request.param == "mounted":
        with full_disk(directory):
            yield directory
        return
    directory.mkdir()

    def fail(tensors: Any, path: Any, *args: Any, **options: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise ERRORS[request.param]

    for module in (artifact, checkpoint):
        monkeypatch.setattr(module, "save_file", fail)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    yield directory


def half_written(path: Path, error: BaseException) -> None:
    path.write_text("half of it")
    raise error


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and path.name != "filler")


@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_a_writer_raises_is_one_error_that_names_the_file(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    reason = "StorageFull" if kind == "an older safetensors" else "No space left on device"
    with (
        pytest.raises(OSError, match=f"^cannot write '{target}': .*{reason}$") as caught,
        replacing(target) as temporary,
    ):
        half_written(temporary, ERRORS[kind])
    assert caught.value.errno == (None if kind == "an older safetensors" else errno.ENOSPC)
    assert target.read_text() == "old" and files_of(tmp_path) == ["x"]
    with pytest.raises(OSError, match="cannot write"), making_directory(tmp_path / "new" / "d") as temporary:
        half_written(temporary / "part", ERRORS[kind])
    assert files_of(tmp_path) == ["x"] and [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), ValueError("bad tensor")])
def test_what_is_no_failure_of_the_disk_stays_what_it_is(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, replacing(tmp_path / "x") as temporary:
        half_written(temporary, error)
    assert caught.value is error and files_of(tmp_path) == []


def test_no_writer_leaves_a_part_on_a_full_disk(tmp_path: Path) -> None:
    """Every kind of file that kvant writes."""
    from kvant.ops.cuda import nvrtc

    directory = tmp_path / "full"
    model = make_model("llama")
    cache = kvant.Cache(model, "int4")
    with torch.inference_mode():
        model(torch.arange(4, 24)[None], past_key_values=cache)
    with full_disk(directory):
        kept = verdicts.Verdict("int4", "f" * 64, "r" * 64, "", 0.0, 0.0, 1.0, 4.0, 1.0, 1, "float32", None)
        writers = {
            "artifact": lambda: made_up().save(directory / "a"),
            "json": lambda: write_json(str(directory / "r.json"), {"x": "y" * 9999}),
            "snapshot": lambda: cache.save(directory / "s"),
            "kernel": lambda: nvrtc._write_code(directory / "kernels" / "k", "k", bytes(9999)),
            "verdict": lambda: verdicts.keep(kept),
        }
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("XDG_CACHE_HOME", str(directory / "cache"))
            for name, write in writers.items():
                with pytest.raises(OSError, match="cannot write '.*': No space left on device"):
                    write()
                assert files_of(directory) == [], name
            with pytest.warns(UserWarning, match="could not be kept in .*: No space left on device"):
                assert not checkpoint.Checkpoint("fit", 1).save({"a": torch.zeros(9999)})
            journal = Journal(1)
            journal.write({(0, 0): Answer("q", 0, "a" * 9999, 1.0, 1, 1)})
            journal.remove()
        assert files_of(directory) == []
        assert not (directory / "a").exists() and not (directory / "cache" / "kvant").exists()


def test_a_calibration_outlives_its_checkpoints(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.calibrate.run import calibrate
    from tests.calibrate.test_run import ids_of

    model = make_model("llama")
    expected = calibrate(model, None, "saw-int4-hessian-kv", ids_of(48), resume=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(full))
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    with pytest.warns(UserWarning, match="an unfinished calibration could not be kept"):
        found = calibrate(model, None, "saw-int4-hessian-kv", ids_of(48))
    assert found.digest == expected.digest and files_of(full) == []

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "fitting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, pytest.warns(UserWarning, match="could not be kept"):
        calibrate(model, None, "saw-int4-hessian-kv", ids_of(48), progress=interrupt)
    assert str(caught.value) == "" and files_of(full) == []


def test_an_artifact_that_cannot_be_kept_serves_from_memory(
    full: Path,
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(full))
    model, tokenizer = models.load(tiny)
    source = Path(text).read_text()
    with pytest.warns(UserWarning, match="is not cached and serves this process alone: cannot write"):
        made = kvant.artifact_for(model, tokenizer, OSCAR, source)
    assert isinstance(made, Artifact)
    options = argparse.Namespace(artifact=[], calibration_text=text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = artifacts_for(model, tokenizer, [recipes.get(OSCAR)], options)[OSCAR]
    assert found is not None and found.digest == made.digest
    assert "kvant: not cached: cannot write" in capsys.readouterr().err
    asked = ["--model", tiny, "--recipe", OSCAR, "--calibration-text", text, "--prompt", "a lamp"]
    code, printed, error = run(capsys, "generate", *asked, "--max-new-tokens", "3", "--unfit-anyway", "--json")
    assert code == 0 and '"recipe": "oscar' in printed, error
    assert "not cached" in error and files_of(full) == []


def test_what_was_to_be_written_there_is_one_line(
    full: Path,
    tiny: str,  # noqa: F811
    text: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = str(full / "new" / "out")
    calibrate = ["calibrate", "--model", tiny, "--recipe", OSCAR, "--text", text, "--tokens", "300", "--out", out]
    fold = ["fold", tiny, "--recipe", "quarot-int2", "--out", out]
    for command, name in ((calibrate, f"{out}/{FILE}"), (fold, out)):
        code, printed, error = run(capsys, *command)
        assert code == 2 and printed == ""
        assert f"kvant {command[0]}: cannot write '{name}': " in error.splitlines()[-1]
        assert files_of(full) == [] and not (full / "new").exists()


def test_standard_output_that_is_full_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    import sys

    for arguments in ([], ["recipes"], ["plan", "--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "kvant", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": str(Path(kvant.__file__).parent.parent)},
            )
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "No space left on device" in done.stderr
