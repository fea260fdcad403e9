"""Tasks: questions are the same for everybody, right answers score, wrong ones do not; scores are compared question by question."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from kvant.eval import tasks
from kvant.eval.paired import compare
from kvant.eval.tasks.gsm8k import last_number
from kvant.eval.tasks.haystack import fill, insert

BOOK = "\n\n".join(
    " ".join(
        f"In year {i} the keeper of lamp {i * 7 + j} wrote the names of {j + 3} ships into a green book."
        for j in range(5)
    )
    for i in range(40)
)


def words(text: str) -> int:
    """A tokenizer's count, for tests: words."""
    return len(text.split())


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return str(path)


@pytest.mark.parametrize(
    "name", ["needle", "needle-multikey", "needle-multivalue", "needle-multiquery", "tracking", "words"]
)
def test_generated_questions_fill_their_length_and_can_be_answered(name: str) -> None:
    task = tasks.get(f"{name}:length=600")
    found = task.questions(3, 7, words)
    assert found == task.questions(3, 7, words), "the same seed gives the same questions"
    assert found != task.questions(3, 8, words)
    for question in found:
        assert 500 <= words(question.prompt) <= 600
        assert all(answer in question.prompt for answer in question.answers)
        assert task.score(question, f"They are {', '.join(question.answers)}.") == 1.0
        assert task.score(question, "I do not know.") == 0.0
    if len(found[0].answers) > 1:
        assert 0.0 < task.score(found[0], found[0].answers[0]) < 1.0


def test_needles_lie_where_they_are_wanted() -> None:
    for depth, low, high in ((0.0, 0.0, 0.1), (1.0, 0.9, 1.0)):
        (question,) = tasks.get(f"needle:length=600,depth={depth}").questions(1, 0, words)
        text = question.prompt
        assert low <= text.index(question.answers[0]) / len(text) <= high


def test_a_variable_is_set_before_it_is_read() -> None:
    task = tasks.get("tracking:length=500,hops=6")
    for question in task.questions(4, 3, words):
        places = [question.prompt.index(f"Set {name} to") for name in question.answers]
        assert places == sorted(places)
    assert task.score(question, "V100 V101 V102 " + " ".join(question.answers)) < 1.0, "names that are not right cost"


def test_common_words_are_found_in_any_sentence() -> None:
    task = tasks.get("words:length=500")
    (question,) = task.questions(1, 0, words)
    said = ", ".join(question.answers)
    assert task.score(question, f"The five most frequent words of those listed are: {said}.") == 1.0
    assert task.score(question, f"badoba, {said}") == 0.8, "only as many as were asked for count"


def test_there_are_words_for_a_long_list() -> None:
    """Words of three syllables are 3,375; lists of 16k tokens asked for more of them, and waited for ever."""
    (question,) = tasks.get("words:length=16k").questions(1, 0, lambda text: 3 * text.count(" "))
    listed = Counter(question.prompt.split("\n\n")[0].removeprefix("A list of words: ").split())
    assert 4900 < sum(listed.values()) < 5500
    assert {word for word, count in listed.items() if count > 2} == set(question.answers)


def test_passages_of_a_book(book: str) -> None:
    task = tasks.get(f"passage:length=700,book={book}")
    for question in task.questions(3, 1, words):
        number = int(question.answers[0])
        quoted = question.prompt.split('this sentence: "')[1].split('"?')[0]
        passage = question.prompt.split(f"Passage {number}: ")[1].split("\n\n")[0]
        assert quoted in passage
        assert (task.score(question, f"Passage {number}."), task.score(question, f"{number + 1}")) == (1.0, 0.0)
    task = tasks.get(f"passage-count:length=700,book={book}")
    for question in task.questions(3, 1, words):
        shown = [part.split(": ", 1)[1] for part in question.prompt.split("\n\n") if part.startswith("Passage ")]
        assert int(question.answers[0]) == len(set(shown))


def test_gsm8k_counts_the_last_number(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    rows = [
        {"question": "How many?", "answer": "6 * 7 = 42\n#### 42"},
        {"question": "How much?", "answer": "#### 1,250"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = tasks.get(f"gsm8k:path={path}")
    first, second = task.questions(None, 0, words)
    assert (first.prompt, second.prompt) == ("How many?", "How much?")
    assert task.score(first, "6 times 7 is 42.") == 1.0
    assert task.score(first, "42, no: 43") == 0.0
    assert task.score(second, "It costs $1,250.00") == 1.0
    assert task.score(second, "") == 0.0
    assert len(task.questions(1, 0, words)) == 1
    assert (last_number("-3.5 apples"), last_number("none")) == (-3.5, None)
    assert (last_number("$-5"), last_number("from 5-10"), last_number("Passage-7")) == (-5.0, 10.0, 7.0)


def test_own_questions(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"prompt": "Capital of France?", "answer": "Paris"}\n\n{"prompt": "Name two.", "answer": ["Oslo", "Rome"]}\n'
    )
    task = tasks.get(str(path))
    one, two = task.questions(None, 0, words)
    assert (task.score(one, "It is paris, of course"), task.score(one, "Rome")) == (1.0, 0.0)
    assert task.score(two, "Rome and Bern") == 0.5
    strict = tasks.get(f"{path}:answer=Answer (\\w+)")
    assert strict.score(one, "Answer Rome. Answer PARIS") == 1.0
    assert strict.score(one, "Paris. Answer Rome") == 0.0
    assert strict.score(one, "Paris") == 0.0
    # what was said is one thing: it is right where it is one of a list
    assert [strict.score(two, said) for said in ("Answer rome", "Answer Oslo", "Answer Bern")] == [1.0, 1.0, 0.0]
    assert (task.label, strict.label) == (str(path), f"{path}:answer=Answer (\\w+)")
    assert tasks.get(f"{path}:new_tokens=9,answer=x").label in (
        f"{path}:new_tokens=9,answer=x",
        f"{path}:answer=x,new_tokens=9",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needel", "unknown task 'needel'; known: gsm8k, "),
        ("needle:lenght=9", "task needle: expected option=value with one of book, depth, length, got 'lenght=9'"),
        ("needle:length=12", "task needle: length must be at least 128 tokens, got 12"),
        ("needle:depth=2", "task needle: depth must be between 0 and 1"),
        ("needle:length=many", "length: expected a number of tokens such as 8192 or 32k, got 'many'"),
        ("passage", "task passage: needs a text, given as passage:book=FILE"),
        ("tracking:hops=99", "hops 1 to 16, got 2 and 99"),
        ("gsm8k:path=missing.jsonl", "task gsm8k: file 'missing.jsonl': there is no such file"),
        ("missing.jsonl:new_tokens=0", "task missing.jsonl:new_tokens=0: new_tokens must be positive"),
        ("gsm8k:new_tokens=-5", "task gsm8k:new_tokens=-5: new_tokens must be positive"),
        ("missing.jsonl", "task file 'missing.jsonl': there is no such file"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.get(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there are no lines"),
        ("{", "line 1: expected one JSON object a line"),
        ("[1]", "line 1: expected a JSON object, got list"),
        ('{"prompt": 3, "answer": "x"}', "line 1: expected a string 'prompt', got int"),
        ('{"prompt": "x", "answer": ""}', "line 1: expected 'answer' to be a string or a list of strings"),
    ],
)
def test_a_wrong_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        tasks.get(str(path))


def test_a_list_of_tasks() -> None:
    assert tasks.split("gsm8k, needle:length=600,depth=0.5,words") == ["gsm8k", "needle:length=600,depth=0.5", "words"]
    assert tasks.split("q.jsonl:new_tokens=9,answer=Answer: (.*),gsm8k:path=x") == [
        "q.jsonl:new_tokens=9,answer=Answer: (.*)",
        "gsm8k:path=x",
    ]
    assert tasks.get("needle:length=600").label == "needle:length=600"
    with pytest.raises(ValueError, match="expected one or more tasks"):
        tasks.split(" , ")


def test_filling_and_inserting() -> None:
    pieces = iter([f"{i} x" for i in range(1000)])
    assert len(fill(pieces, lambda some: " ".join(some), 132, words)) == 50
    with pytest.raises(ValueError, match="length must hold the question itself"):
        fill(pieces, lambda some: "a " * 200, 132, words)
    assert insert(["a", "b"], ["first", "second", "end"], [0.5, 0.5, 1.0]) == ["a", "first", "second", "b", "end"]


def test_scores_are_compared_question_by_question() -> None:
    found = compare([1, 0, 1, 1], [1, 1, 0, 0])
    assert (found.score, found.difference, found.wins, found.losses) == (0.75, 0.25, 2, 1)
    differences = [0, -1, 1, 1]
    deviation = math.sqrt(sum((d - 0.25) ** 2 for d in differences) / 3)
    assert found.half == pytest.approx(1.959964 * deviation / 2)
    assert compare([1.0], [0.0]).half is None
    same = compare([0.5, 1.0], [0.5, 1.0])
    assert (same.difference, same.half, same.wins, same.losses) == (0.0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="as many scores as the full cache has"):
        compare([1.0], [])
