"""An interrupted calibration is taken up where it was."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.artifact import Artifact
from kvant.calibrate import checkpoint, gatherer, run
from kvant.calibrate.checkpoint import Checkpoint
from kvant.cli import main
from tests.calibrate.test_run import SMALL, ids_of
from tests.cli.test_cli import tiny  # noqa: F401 (fixture)
from tests.engines.test_hf import make_model

RECIPE = "saw-int4-hessian-kv"


@pytest.fixture(autouse=True)
def unfinished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvant" / "unfinished"


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A job in the background ignores interrupts; these tests send them to themselves."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(stage: str, done: int) -> Any:
    """A progress that is interrupted."""

    def progress(at: str, now: int, total: int) -> None:
        if at == stage and now >= done:
            raise KeyboardInterrupt

    return progress


def test_a_calibration_keeps_its_layers(unfinished: Path) -> None:
    model = make_model("llama")
    expected = run.calibrate(model, None, RECIPE, ids_of(48), excerpt_tokens=24)
    assert not unfinished.exists(), "nothing is written where nothing is interrupted"
    with pytest.raises(KeyboardInterrupt, match="kept 2 layers and 48 of 48 measured tokens; the same command goes on"):
        run.calibrate(model, None, RECIPE, ids_of(48), excerpt_tokens=24, progress=interrupt_at("fitting", 2))
    assert len(list(unfinished.iterdir())) == 2
    stages: list[tuple[str, int, int]] = []
    found = run.calibrate(model, None, RECIPE, ids_of(48), excerpt_tokens=24, progress=lambda *at: stages.append(at))
    assert stages == [("fitting", 3, 3)], "the third layer was measured before"
    assert list(unfinished.iterdir()) == []
    assert found.layers == expected.layers == len(found.tensors)
    assert found.source["tokens"] == 48


def test_layers_fitted_before_and_after_are_those_of_one_go() -> None:
    """Other options are another calibration."""
    model = make_model("llama")
    options: dict[str, Any] = {"excerpt_tokens": 60, "max_position": 200}
    with pytest.raises(KeyboardInterrupt, match="kept 1 layer and 150 of 150 measured tokens; "):
        run.calibrate(model, None, SMALL, ids_of(150), **options, progress=interrupt_at("fitting", 1))
    other = run.calibrate(model, None, SMALL, ids_of(150), **options, seed=1)
    found = run.calibrate(model, None, SMALL, ids_of(150), **options)
    assert found.digest == run.calibrate(model, None, SMALL, ids_of(150), **options).digest != other.digest


@pytest.mark.parametrize("recipe", [RECIPE, "kvant-2", "oscar:sink=4"])
def test_measured_tokens_are_not_read_again(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between two excerpts, and one in the midst of a layer's sums, which are completed first."""
    model, options = make_model("llama"), {"excerpt_tokens": 24, "max_position": 200}
    expected = run.calibrate(model, None, recipe, ids_of(72), **options)
    with pytest.raises(KeyboardInterrupt, match="kept 24 of 72 measured tokens; the same command goes on from there"):
        run.calibrate(model, None, recipe, ids_of(72), **options, progress=interrupt_at("measuring", 24))

    add, added = gatherer.LayerGatherer._add, []

    def adding(self: Any, excerpt: int, *args: Any) -> None:
        added.append(excerpt)
        if len(added) == 2:
            signal.raise_signal(signal.SIGINT)
        add(self, excerpt, *args)

    monkeypatch.setattr(gatherer.LayerGatherer, "_add", adding)
    with pytest.raises(KeyboardInterrupt, match="kept 24 of 72 measured tokens"):
        run.calibrate(model, None, recipe, ids_of(72), **options)
    assert added == [1, 1], "the second of three layers"
    found = run.calibrate(model, None, recipe, ids_of(72), **options)
    assert added == [1, 1, 1, 2, 2, 2]
    assert found.digest == expected.digest


def test_an_interrupt_is_put_off_and_not_lost() -> None:
    done = []

    def work() -> None:
        with checkpoint.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with checkpoint.uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_is_kept_where_it_is_not_wanted(unfinished: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        run.calibrate(
            make_model("llama"),
            None,
            RECIPE,
            ids_of(48),
            excerpt_tokens=24,
            resume=False,
            progress=interrupt_at("fitting", 1),
        )
    assert str(caught.value) == ""
    assert not unfinished.exists()


def test_long_work_is_kept_now_and_then(monkeypatch: pytest.MonkeyPatch, unfinished: Path) -> None:
    """So that a process that is killed has not worked in vain."""
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    model = make_model("llama")

    class Killed(Exception):
        pass

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "fitting":
            raise Killed

    with pytest.raises(Killed):
        run.calibrate(model, None, RECIPE, ids_of(48), excerpt_tokens=24, progress=progress)
    assert [path.name.partition("-")[0] for path in unfinished.iterdir()] == ["fit"]


@pytest.mark.parametrize("damage", [b"nothing of the kind", None])
def test_a_damaged_checkpoint_is_told_of_and_removed(damage: bytes | None) -> None:
    kept = Checkpoint("fit", 1)
    kept.save({"a": torch.arange(100)})
    assert kept.load()["a"].tolist() == list(range(100))
    whole = kept.path.read_bytes()
    kept.path.write_bytes(damage or whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.warns(UserWarning, match="cannot be read: .*; starting anew"):
        assert kept.load() == {}
    assert not kept.path.exists()
    assert kept.load() == {}


def test_the_command_says_what_it_kept_and_goes_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny: str,  # noqa: F811
) -> None:
    @contextlib.contextmanager
    def interrupted() -> Iterator[Any]:
        yield interrupt_at("fitting", 1)

    command = ["calibrate", "--model", tiny, "--recipe", RECIPE, "--tokens", "40", "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr("kvant.cli.calibrate.stages", interrupted)
        assert main(command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "kvant calibrate: interrupted; kept 1 layer and 40 of 40 measured tokens; the same command goes on from there"
    )
    assert main(command) == 0
    assert Artifact.load(tmp_path / "out").source["tokens"] == 40
