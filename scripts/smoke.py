"""Tries an installed kvant: the compiled operations are there and serve what they should, a model generates from packed pages, and
the command line starts. It needs the extra `hf` and no network. `./scripts/smoke_wheel` runs it on a fresh wheel.

    python scripts/smoke.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import kvant
from kvant.models import tiny
from kvant.ops.cpu import library


def main() -> int:
    here = Path(__file__).resolve().parents[1] / "kvant"
    print(f"kvant {kvant.__version__} from {Path(kvant.__file__).parent}, torch {torch.__version__}")
    if Path(kvant.__file__).resolve().parent == here:
        raise SystemExit("this is the source tree's kvant, not an installed one: run it from another directory")
    if library.missing():
        raise SystemExit(f"the compiled operations are missing: {library.missing()}")
    model, tokenizer = tiny()
    inputs = tokenizer("A wheel is tried as a user would try it. " * 8, return_tensors="pt")
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**inputs, **options)
    for recipe in ("full", "int8", "saw-int4", "kivi-k4v4", "kvant-4-fast"):
        artifact = kvant.artifact_for(model, tokenizer, recipe)
        cache = kvant.Cache(model, recipe, artifact=artifact)
        output = model.generate(**inputs, past_key_values=cache, **options)
        by = {implementation.name for implementation in cache.chosen("decode", model.device)}
        assert output.shape == expected.shape, (output.shape, expected.shape)
        assert by == {"cpu"}, f"{recipe} decodes by {by}"
        same = int((output == expected)[0, inputs["input_ids"].shape[1] :].sum())
        print(f"{recipe}: {same} of {options['max_new_tokens']} tokens as from transformers' cache; {cache}")
        assert recipe != "full" or same == options["max_new_tokens"], "the full cache must give the same tokens"
    for command in (["--version"], ["recipes"], ["plan", "--model", "qwen3-8b"], ["doctor"]):
        subprocess.run([sys.executable, "-m", "kvant", *command], check=True, stdout=subprocess.DEVNULL)
    print("smoke: all well")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
