"""Score a recipe on your own questions, beside the full cache: a file of prompts and answers is a task.

python examples/evaluate_your_task.py [MODEL]
"""

import json
import sys
import tempfile
from pathlib import Path

from kvant.cli import main

QUESTIONS = {  # an answer counts where it contains the expected text
    "What is the capital of France? Answer with one word.": "Paris",
    "What is the capital of Italy? Answer with one word.": "Rome",
    "Which planet is called the red planet? Answer with one word.": "Mars",
    "What is 2 + 2? Answer with the number.": "4",
}

with tempfile.TemporaryDirectory() as directory:
    task, report = Path(directory) / "mine.jsonl", Path(directory) / "report.json"
    task.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in QUESTIONS.items()))
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    # the same as on the command line: kvant eval --model M --recipe int8 --task mine.jsonl:new_tokens=16 --json report.json
    options = ["--task", f"{task}:new_tokens=16", "--json", str(report)]
    code = main(["eval", "--model", model, "--recipe", "int8", *options])
    if code:
        sys.exit(code)
    for row in json.loads(report.read_text())["scores"]:
        print(f"{row['recipe']}: {row['score']:.0%} of {row['questions']} questions")
