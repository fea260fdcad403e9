"""Tasks that are scored by what a model writes: questions, right answers, and how an answer counts."""

from kvant.eval.tasks.base import TASKS, Question, Task, digest, get, known, split
from kvant.spec import discover

discover(__name__)

__all__ = ["TASKS", "Question", "Task", "digest", "get", "known", "split"]
