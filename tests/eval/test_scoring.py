"""Scores of tasks: what an interrupted run keeps is used by the same run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvant.eval import asking, scoring, tasks
from kvant.models import tiny


def test_answers_to_another_chat_template_or_version_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "What is 1 + 1?", "answer": "2"}')
    task = tasks.get(f"{path}:new_tokens=2")
    model, tokenizer = tiny()
    generate, asked = asking._generate, list[list[int]]()

    def counted(model: Any, tokenizer: Any, prompts: Any, *rest: Any) -> Any:
        if len(asked) % 2:
            asked.append([])
            raise KeyboardInterrupt
        asked.append(prompts.ids[0])
        return generate(model, tokenizer, prompts, *rest)

    monkeypatch.setattr(asking, "_generate", counted)
    for template, version in (
        ("A: {{ messages[0].content }}", "1"),
        ("B: {{ messages[0].content }}", "1"),
        (None, "2"),
    ):
        tokenizer.chat_template = template or tokenizer.chat_template
        monkeypatch.setattr(scoring, "VERSION", version)
        prompts = asking.Prompts(tokenizer, task.questions(None, 0, len))
        with pytest.raises(KeyboardInterrupt):  # after the first run of the full cache
            scoring.score_task(model, prompts, task, [], {}, sampling=asking.Sampling())
        assert asked[-2:] == [prompts.ids[0], []]
