"""Measures on SmolLM2 what sharing, prefix hits and snapshots save, and writes results/serving.json and the
tables of docs/serving.md.

    .venv/bin/python scripts/serving.py [--device cuda] [--repeats 5]
    .venv/bin/python scripts/serving.py --tables        only renders the tables
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvant import models
from kvant.cli.common import say, write_json
from kvant.engines.hf import Cache
from kvant.layout import human_bytes

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "results" / "serving.json"
PAGE = ROOT / "docs" / "serving.md"
SAMPLES, PROMPT, NEW, SUFFIX = 16, 1000, 8, 16


def clock(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def text_ids(tokenizer: Any, count: int, device: str) -> torch.Tensor:
    text = "\n".join(
        (PAGE.parent / name).read_text() for name in ("design.md", "methods.md", "results.md", "ablations.md")
    )
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    assert ids.shape[1] >= count, f"the documents have {ids.shape[1]} tokens, {count} are needed"
    return ids[:, :count].to(device)


def memory(model: Any, tokenizer: Any, recipe: str, device: str) -> dict[str, Any]:
    """Bytes of 16 samples of one prompt, each with its own answer; and of one alone."""
    ids = text_ids(tokenizer, PROMPT, device)
    used = {}
    with torch.inference_mode():
        for samples in (1, SAMPLES):
            cache = Cache(model, recipe)
            model(ids, past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(samples)
            random = torch.Generator().manual_seed(0)
            for _ in range(NEW):
                model(torch.randint(100, 1000, (samples, 1), generator=random).to(device), past_key_values=cache)
            used[samples] = cache.nbytes_used
    return {
        "recipe": recipe,
        "samples": SAMPLES,
        "prompt": PROMPT,
        "new": NEW,
        "one_bytes": used[1],
        "apart_bytes": SAMPLES * used[1],
        "shared_bytes": used[SAMPLES],
    }


def prefix(model: Any, tokenizer: Any, recipe: str, device: str, repeats: int) -> dict[str, Any]:
    """Seconds to the first token of a request whose first 1,000 tokens were seen before, and of one that was not."""
    ids = text_ids(tokenizer, PROMPT + SUFFIX * (repeats + 1), device)
    cache = Cache(model, recipe, share=True)
    cache.generate(model, ids[:, :PROMPT], do_sample=False, max_new_tokens=1)
    hits, misses, reused = [], [], []
    for i in range(repeats + 1):  # the first one warms up
        at = PROMPT + i * SUFFIX
        request = torch.cat((ids[:, :PROMPT], ids[:, at : at + SUFFIX]), 1)
        cache.reset()
        hits.append(clock(lambda r=request: cache.generate(model, r, do_sample=False, max_new_tokens=1), device))
        reused.append(cache.reused)
        fresh = Cache(model, recipe)
        misses.append(clock(lambda r=request, c=fresh: c.generate(model, r, do_sample=False, max_new_tokens=1), device))
    return {
        "recipe": recipe,
        "prompt": PROMPT + SUFFIX,
        "reused": min(reused[1:]),
        "hit_seconds": statistics.median(hits[1:]),
        "miss_seconds": statistics.median(misses[1:]),
    }


def snapshot(model: Any, tokenizer: Any, recipe: str, tokens: int, device: str, repeats: int) -> dict[str, Any]:
    """Seconds and bytes of a snapshot of a prompt, and seconds to compute it again."""
    ids = text_ids(tokenizer, tokens, device)
    saves, loads, again = [], [], []
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        path = Path(directory) / "snapshot"
        for _ in range(repeats):
            cache = Cache(model, recipe)
            again.append(clock(lambda c=cache: model(ids, past_key_values=c, logits_to_keep=1), device))
            saves.append(clock(lambda c=cache: c.save(path), device))
            loads.append(clock(lambda: Cache.load(path, model), device))
        size = path.stat().st_size
    return {
        "recipe": recipe,
        "tokens": tokens,
        "bytes": size,
        "cache_bytes": cache.nbytes_used,
        "save_seconds": statistics.median(saves),
        "load_seconds": statistics.median(loads),
        "compute_seconds": statistics.median(again),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = models.load("smollm2", device=args.device, say=say)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} thread(s) of a CPU"
    out: dict[str, Any] = {"machine": f"{where}, torch {torch.__version__}, Python {platform.python_version()}"}
    out |= {"memory": [], "prefix": [], "snapshot": []}
    for recipe in args.recipe.split(";"):
        say(f"{recipe}: memory of {SAMPLES} samples")
        out["memory"].append(memory(model, tokenizer, recipe, args.device))
        say(f"{recipe}: prefix hit")
        out["prefix"].append(prefix(model, tokenizer, recipe, args.device, args.repeats))
        for tokens in (1000, 3000):
            say(f"{recipe}: snapshot of {tokens} tokens")
            out["snapshot"].append(snapshot(model, tokenizer, recipe, tokens, args.device, args.repeats))
    return out


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def tables(data: dict[str, Any]) -> dict[str, str]:
    memory_rows = []
    for r in data["memory"]:
        sizes = [human_bytes(r[key]) for key in ("one_bytes", "apart_bytes", "shared_bytes")]
        memory_rows.append([f"`{r['recipe']}`", *sizes, f"{r['apart_bytes'] / r['shared_bytes']:.1f}x"])
    prefix_rows = []
    for r in data["prefix"]:
        times = [seconds(r["miss_seconds"]), seconds(r["hit_seconds"]), f"{r['miss_seconds'] / r['hit_seconds']:.1f}x"]
        prefix_rows.append([f"`{r['recipe']}`", f"{r['reused']:,} of {r['prompt']:,}", *times])
    snapshot_rows = []
    for r in data["snapshot"]:
        times = [seconds(r[f"{key}_seconds"]) for key in ("compute", "save", "load")]
        times.append(f"{r['compute_seconds'] / r['load_seconds']:.0f}x")
        snapshot_rows.append([f"`{r['recipe']}`", f"{r['tokens']:,}", human_bytes(r["bytes"]), *times])
    return {
        "machine": f"Measured on {data['machine']}.",
        "memory": table(["recipe", "one sample", "16 apart", "16 shared", "smaller"], memory_rows),
        "prefix": table(["recipe", "tokens found", "computed", "found", "sooner"], prefix_rows),
        "snapshot": table(["recipe", "tokens", "file", "compute", "save", "load", "load is sooner"], snapshot_rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", default="full;saw-int4;quarot-int2-win;kitty-pro", help="recipes, with ; between them"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if not args.tables:
        write_json(str(FIGURES), measure(args))
    page = PAGE.read_text()
    for name, text in tables(json.loads(FIGURES.read_text())).items():
        page, count = re.subn(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", rf"\g<1>{text}\g<2>", page, flags=re.DOTALL)
        assert count == 1, f"docs/serving.md has {count} places for {name}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
