"""kvant eval --task on a tiny model: the table, the report, an interrupted run, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant import models
from kvant.cli.tasks import print_lost
from kvant.eval import asking, scoring
from tests.cli.test_cli import run, tiny  # noqa: F401


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": f"{'x ' * n}What comes after {n}?", "answer": str(n + 1)} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"{path}:new_tokens=6"


def test_every_recipe_answers_the_same_questions(
    tiny: str,  # noqa: F811
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "report.json"
    options = ["--model", tiny, "--task", questions, "--recipe", "full,int4", "--batch", "3", "--json", str(report)]
    code, out, err = run(capsys, "eval", *options)
    assert code == 0, err
    data = json.loads(report.read_text())
    scores = data["scores"]
    assert [(s["recipe"], s["batch"]) for s in scores] == [
        ("full cache", 3),
        ("full cache again", 1),
        ("full", 3),
        ("int4", 3),
    ]
    for score in scores:
        assert [answer["question"] for answer in score["answers"]] == ["0", "1", "2", "3", "4"]
        assert score["questions"] == 5
        assert score["tokens"] == sum(answer["tokens"] for answer in score["answers"]) > 0
        assert 0.0 <= score["score"] <= 1.0
        assert score["recipe"] in out
    assert scores[0]["difference"] == 0.0
    assert [a["text"] for a in scores[2]["answers"]] == [a["text"] for a in scores[0]["answers"]], "full is lossless"
    assert scores[3]["bits"] < 8 < scores[0]["bits"] == 16
    assert not list((tmp_path / "cache" / "kvant" / "answers").glob("*.json")), "a complete run leaves nothing"


def test_a_score_without_packed_tokens_is_said_to_mean_nothing(
    tiny: str,  # noqa: F811
    questions: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipes = "int4,int4:sink=4,recent=192"
    code, _, err = run(capsys, "eval", "--model", tiny, "--task", questions, "--recipe", recipes, "--limit", "2")
    assert code == 0, err
    told = [line for line in err.splitlines() if "nothing has been packed" in line]
    assert len(told) == 1 and told[0].startswith("kvant: int4:sink=4,recent=192: ")


def test_lost_questions_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def score(recipe: str, *points: float) -> scoring.Score:
        answers = [
            {"question": str(i % 3), "score": each} for i, each in enumerate(points)
        ]  # two samples of three questions
        return scoring.Score("own", recipe, 8, 0.5, 0.0, None, 0, 0, 3, 6, 16.0, answers)

    full = score("full cache", 1, 1, 0, 1, 0, 1)
    print_lost([full, score("full cache again", 0, 0, 0, 0, 0, 0), score("int4", 1, 0, 1, 0, 1, 1)], None)
    assert capsys.readouterr().out == "int4 lost questions 0; --json FILE writes their answers\n"
    print_lost([full, full, score("int2", 0, 0, 0, 0, 0, 0), full], "scores.json", most=2)
    assert capsys.readouterr().out == "int2 lost questions 0, 1 and 1 more; their answers are in scores.json\n"


def test_an_interrupted_run_goes_on(
    tiny: str,  # noqa: F811
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    generate = asking._generate

    def broken(model: Any, tokenizer: Any, prompts: Any, some: Any, *rest: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(len(some))
        return generate(model, tokenizer, prompts, some, *rest)

    monkeypatch.setattr(asking, "_generate", broken)
    options = ["--model", tiny, "--task", questions, "--recipe", "int4", "--batch", "2"]
    code, _, _ = run(capsys, "eval", *options)
    assert code == 130
    assert asked == [2, 2, 1]
    kept = [json.loads(path.read_text()) for path in (tmp_path / "cache" / "kvant" / "answers").glob("*.json")]
    assert [len(each["answers"]) for each in kept] == [5]

    def counted(model: Any, tokenizer: Any, prompts: Any, some: Any, *rest: Any) -> Any:
        asked.append(len(some))
        return generate(model, tokenizer, prompts, some, *rest)

    monkeypatch.setattr(asking, "_generate", counted)
    code, _, err = run(capsys, "eval", *options)
    assert code == 0, err
    assert asked[3:] == [1] * 5 + [2, 2, 1], "the first run of the full cache was answered before"


def test_answers_are_not_scored_by_what_an_interrupted_run_looked_for(
    tiny: str,  # noqa: F811
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate = asking._generate
    calls: list[None] = []

    def answered(model: Any, tokenizer: Any, prompts: Any, some: Any, *rest: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        generate(model, tokenizer, prompts, some, *rest)
        return [(f"Answer: {prompts.questions[i].answers[0]}", 6) for i, _ in some]

    monkeypatch.setattr(asking, "_generate", answered)
    report = tmp_path / "report.json"
    options = ["--model", tiny, "--recipe", "int4", "--batch", "5", "--json", str(report), "--task"]
    assert run(capsys, "eval", *options, f"{questions},answer=The answer is (.*)")[0] == 130
    code, _, err = run(capsys, "eval", *options, f"{questions},answer=Answer: (.*)")
    assert code == 0, err
    assert [score["score"] for score in json.loads(report.read_text())["scores"]] == [1.0] * 3


def test_one_file_read_in_two_ways_is_two_tasks(
    tiny: str,  # noqa: F811
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "report.json"
    path = questions.partition(":")[0]
    options = ["--model", tiny, "--recipe", "int4", "--json", str(report), "--limit", "1", "--task"]
    code, _, err = run(capsys, "eval", *options, f"{path}:new_tokens=2,{path}:new_tokens=5")
    assert code == 0, err
    assert [score["tokens"] for score in json.loads(report.read_text())["scores"]] == [2] * 3 + [5] * 3


def test_samples_are_drawn_from_a_seed(
    tiny: str,  # noqa: F811
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def texts(seed: int) -> list[str]:
        report = tmp_path / f"{seed}.json"
        sampled = ["--samples", "2", "--temperature", "1", "--seed", str(seed), "--limit", "2", "--json", str(report)]
        code, _, err = run(capsys, "eval", "--model", tiny, "--task", questions, "--recipe", "int8", *sampled)
        assert code == 0, err
        answers = json.loads(report.read_text())["scores"][-1]["answers"]
        assert [(a["question"], a["sample"]) for a in answers] == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]
        return [a["text"] for a in answers]

    first = texts(1)
    assert first == texts(1) != texts(2)
    assert first[:2] != first[2:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "nothing"], "unknown task 'nothing'"),
        (["--task", "needle:length=100000"], "its prompts take 100000 tokens, and the model's context is"),
        (["--samples", "2"], "give a temperature above 0"),
        (["--temperature", "nan"], "temperature must be a finite number of at least 0, got nan"),
        (["--temperature", "inf"], "temperature must be a finite number of at least 0, got inf"),
        (["--limit", "0"], "--batch and --limit must be positive"),
        (["--text", "x.txt"], "one of the two"),
        (["--recipe", "int5"], "int5"),
    ],
)
def test_mistakes_are_named_before_weights_are_read(
    options: list[str],
    message: str,
    tiny: str,  # noqa: F811
    questions: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: pytest.fail("weights were read"))
    code, _, err = run(capsys, "eval", "--model", tiny, "--task", questions, "--recipe", "int4", *options)
    assert code != 0
    assert message in err


def test_questions_longer_than_the_context_are_refused() -> None:
    class Tokenizer:
        chat_template = None

        def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text)))}

    from kvant.eval.tasks import Question

    prompts = asking.Prompts(Tokenizer(), [Question("0", "x" * 90, ("y",), 20)])
    prompts.check(200, "own")
    with pytest.raises(
        ValueError,
        match="task own: its longest question takes 118 tokens with its answer, and the model's context is 100",
    ):
        prompts.check(100, "own")


def test_the_mean_of_a_questions_samples() -> None:
    answers = [asking.Answer(str(q), s, "", float(q == s), 1, 1) for s in range(2) for q in range(3)]
    assert scoring.by_question(answers, 2) == [0.5, 0.5, 0.0]
