"""Verdicts as files: kept by model, recipe and artifact, read back or taken for none."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from kvant import passages, recipes, verdicts
from kvant.verdicts import GOOD, USABLE, Unfit, Verdict, word_for

MODEL = "0123456789abcdef" * 4


def make(name: str = "int4", kl: float = 0.02, top1: float = 0.95, **changes: object) -> Verdict:
    recipe = recipes.get(name)
    plain = Verdict(name, MODEL, recipe.digest, "", kl, 0.001, top1, 4.5, 300.0, 600, "float32")
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_both_figures_count_and_thresholds_belong_to_the_better_side() -> None:
    assert word_for(GOOD.kl, GOOD.top1) == "good"
    assert word_for(GOOD.kl + 1e-6, 1.0) == word_for(0.0, GOOD.top1 - 1e-6) == "usable"
    assert word_for(USABLE.kl, USABLE.top1) == "usable"
    assert word_for(USABLE.kl + 1e-6, 1.0) == word_for(0.0, USABLE.top1 - 1e-6) == "unfit"
    assert word_for(math.nan, 1.0) == word_for(0.0, math.nan) == "unfit"


def test_nothing_packed_is_no_verdict() -> None:
    assert make(kl=0.0, top1=1.0, packed=0.0).word == "unknown"
    assert "nothing was packed" in str(make(packed=0.0))


def test_a_verdict_is_found_by_model_recipe_and_artifact() -> None:
    recipe = recipes.get("int4")
    assert verdicts.verdict(MODEL, recipe) is None
    plain, fitted = make(), make("kvant-4-fast", artifact="f" * 64, bpe=4.25, noise=0.01, why="because")
    path = verdicts.keep(plain)
    verdicts.keep(fitted)
    assert path.parent.parent.name == MODEL[:16]
    assert verdicts.verdict(MODEL, recipe) == plain
    assert verdicts.verdict(MODEL, recipes.get("kvant-4-fast"), "f" * 64) == fitted
    assert verdicts.verdict(MODEL, recipes.get("kvant-4-fast")) is None
    assert verdicts.verdict(MODEL, recipes.get("int4:sink=4")) is None
    assert verdicts.verdict(MODEL[:16] + "0" * 48, recipe) is None  # another model whose name begins alike
    assert verdicts.verdicts(MODEL) == [fitted, plain]  # fewest bits first
    assert verdicts.names_that_fit(MODEL) == ["kvant-4-fast", "int4"]
    assert json.loads(path.read_text())["verdict"] == "good"


def test_a_kl_that_is_no_number_is_kept_as_null_and_stays_unfit() -> None:
    path = verdicts.keep(make(kl=math.nan, kl_se=math.nan, top1=0.0))
    assert "NaN" not in path.read_text()
    found = verdicts.verdict(MODEL, recipes.get("int4"))
    assert found is not None and math.isnan(found.kl) and found.word == "unfit"


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.0.1"},
        {"text": "0" * 16},
        {"format": "kvant-verdict-0"},
        {"fingerprint": "f" * 64},
        {"recipe_digest": "f" * 64},
        {"kl": "0.02"},
        {"top1": True},
        {"tokens": 1.5},
    ],
)
def test_another_version_text_or_kind_is_no_verdict(change: dict[str, object]) -> None:
    path = verdicts.keep(make())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert verdicts.verdict(MODEL, recipes.get("int4")) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b'{"format": "kvant-verdict-1"}', b"[" * 100_000])
def test_a_damaged_file_is_no_verdict_and_is_written_anew(data: bytes) -> None:
    path = verdicts.keep(make())
    path.write_bytes(data)
    assert verdicts.verdict(MODEL, recipes.get("int4")) is None
    assert verdicts.verdicts(MODEL) == []
    verdicts.keep(make())
    assert verdicts.verdict(MODEL, recipes.get("int4")) == make()


def test_an_unfit_recipe_is_refused_with_what_fits() -> None:
    verdicts.refuse_unfit(make(kl=0.2, top1=0.8), "--unfit-anyway")
    bad = make("saw-int4", kl=6.2, top1=0.05, why="its keys have a mean")
    with pytest.raises(
        Unfit, match=r"saw-int4 is unfit .* KL 6.20, top-1 5% \(its keys have a mean\); kvant check says"
    ):
        verdicts.refuse_unfit(bad, "--unfit-anyway")
    verdicts.keep(make("kvant-4-fast", artifact="a" * 64))
    with pytest.raises(Unfit, match="what fits: kvant-4-fast; --unfit-anyway takes it all the same"):
        verdicts.refuse_unfit(bad, "--unfit-anyway")


def test_the_two_texts_share_no_sentence() -> None:
    def sentences(pieces: list[passages.Piece]) -> set[str]:
        texts = [
            each for piece in pieces for each in ([piece] if isinstance(piece, str) else [t["content"] for t in piece])
        ]
        return {s.strip() for text in texts for s in text.replace("\n", ". ").split(". ") if len(s) > 12}

    judged = sentences([passages.conversation()])
    fitted = sentences([piece for pieces in passages.pieces().values() for piece in pieces])
    assert len(judged) > 30 and len(fitted) > 300
    assert not judged & fitted
    roles = [turn["role"] for turn in passages.conversation()]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert passages.digest("check") != passages.digest("fit")
