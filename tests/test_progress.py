"""Progress where nobody watches a terminal."""

from __future__ import annotations

import pytest

from kvant.progress import Lines, default_progress, duration


def test_lines_come_now_and_then_with_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = Lines(lambda: now[0], every=5.0)
    for second in range(13):
        now[0] = float(second)
        lines("sampling", 100 + 10 * second, 1000)  # 100 were there from an earlier start
    now[0] = 20.0
    lines("fitting", 0, 30)
    assert capsys.readouterr().err.splitlines() == [
        "kvant: sampling: 150 of 1,000, about 85 s left",
        "kvant: sampling: 200 of 1,000, about 80 s left",
        "kvant: fitting: 0 of 30",
    ]


def test_without_a_terminal_there_are_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.progress.EVERY", 0.0)
    with default_progress() as progress:
        progress("measuring", 1, 4)
    assert capsys.readouterr().err == "kvant: measuring: 1 of 4\n"


def test_on_a_terminal_there_are_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with default_progress() as progress:
        progress("measuring", 1, 4)
        progress("measuring", 2, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "measuring" in err
    assert "50%" in err


def test_durations() -> None:
    assert [duration(s) for s in (3.2, 89, 150, 9000)] == ["about 3 s", "about 89 s", "about 2 min", "about 2.5 h"]
