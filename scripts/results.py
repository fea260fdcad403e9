"""Measures recipes on SmolLM2 and writes results/quality.json and the tables of docs/results.md.

    .venv/bin/python scripts/results.py --text wikitext2.test.txt --calibration-text wikitext2.valid.txt [--device cuda]
    .venv/bin/python scripts/results.py --recipe saw-int4,oscar ...     only these; other rows stay
    .venv/bin/python scripts/results.py --long --context 8192 --prompt 4096 --tokens 8192 --text war_and_peace.txt ...
    .venv/bin/python scripts/results.py                                 only renders the tables

A recipe may carry "@P" (calibrated for positions below P) and "+N" (read at positions moved by N).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvant import models, recipes
from kvant.calibrate.run import calibrate
from kvant.cli.common import read_text, say, write_json
from kvant.engines.hf import Cache
from kvant.eval import Segments, evaluate
from kvant.layout import Layout

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "results" / "quality.json"
PAGE = ROOT / "docs" / "results.md"
ABLATIONS = {
    "kvant's parts": [
        *("kvant-2", "kvant-2:rope_block=512", "kvant-2:rope_block=1024", "kvant-2:search=9"),
        *("kvant-2:search=9,rope=post", "kvant-2:search=9,k.mean=false", "kvant-2:search=9,share=0"),
        *("kvant-2:search=9,k.bits=2,k.bands=one", "kvant-2:search=9,k.bits=3/2/1"),
        *("kvant-2:search=9,k.hadamard=false", "kvant-2:search=9,k.unbiased=false", "kvant-2:search=9,levels=lloyd"),
        *("kvant-2:search=9,recent=16", "kvant-2:search=9,recent=256", "kvant-2:search=9,sink=0"),
        *("oscar:sink=4,recent=64", "oscar:sink=4,recent=256"),
        *("kvant-4", "kvant-4:search=1", "kvant-4:sink=4"),
        *("saw-int4-kv", "saw-int4-kv:zero=float,search=5", "saw-int4-kv:sink=4"),
    ],
    "Zero points": ["int4", "int4:zero=float", "saw-int4", "saw-int4:zero=float"],
    "OSCAR's parts": [
        "oscar",
        "oscar:k.clip=0.96,v.clip=0.92",
        "oscar:clip=1",
        "oscar:target=none",
        "oscar:hadamard=none",
        "oscar:per_head=true",
        "oscar:sink=0,recent=0",
    ],
    "Positions": [
        *("oscar", "oscar+20000", "oscar@2048", "oscar@2048+20000", "int4:zero=float", "int4:zero=float+20000"),
        *("kvant-2", "kvant-2+20000", "kvant-4@32768", "kvant-4@32768+20000"),
    ],
    "SQuat beside KIVI with the same group and residual": [
        "kivi-k2v2:group=32,k.flush=32,v.recent=32",
        "squat",
        "squat-pre",
    ],
    "Vector quantization and the first token": [
        *("vecinfer-4", "million-4", "vecinfer-2", "million-2"),
        *("vecinfer-4:sink=0", "million-4:sink=0", "vecinfer-2:sink=0", "million-2:sink=0"),
    ],
    "SAW-INT4's centroids": [
        "saw-int4-kmeans:centroids=16,zero=float",
        "saw-int4-kmeans:zero=float",
        "saw-int4-kmeans-rot:zero=float",
        "saw-int4-hessian:zero=float",
        "saw-int4-hessian-kv:zero=float",
    ],
}

LONG = ["saw-int4", "kvant-2:search=9", "oscar:sink=4,recent=64"]


def measure(name: str, model: Any, tokenizer: Any, segments: Segments, text: str | None, tokens: int) -> dict[str, Any]:
    """One row: quality, bits, and what the calibration took."""
    plain, _, offset = name.partition("+")
    plain, _, positions = plain.partition("@")
    recipe = recipes.get(plain)
    begin, artifact = time.perf_counter(), None
    if recipe.calibrated:
        limit = int(positions) if positions else None
        artifact = calibrate(model, tokenizer, recipe, text, tokens=tokens, max_position=limit)
    calibration = time.perf_counter() - begin
    (found,) = evaluate(
        model,
        [recipe],
        segments,
        batch=len(segments.ids),
        make_cache=lambda chosen: Cache(model, chosen, artifact=artifact, first_position=int(offset or 0)),
        offset=int(offset or 0),
    )
    row = dataclasses.asdict(found)
    row["recipe"] = name
    row["tokens"] = segments.tokens
    row["bits"] = {str(dim): bits_at(recipe, dim) for dim in (64, 128)}
    row["calibration_tokens"] = tokens if recipe.calibrated else 0
    row["calibration_seconds"] = calibration
    return row


def bits_at(recipe: Any, head_dim: int) -> list[float]:
    """Bits per element of a page, and of a sequence of 32k tokens with its full-precision windows."""
    layout = Layout.of(recipe, 1, head_dim)
    return [layout.bits_per_element(), layout.bits_per_element(32768)]


def table(rows: dict[str, dict[str, Any]], names: list[str], whole: bool = False) -> str:
    """A Markdown table of at most 100 columns. The whole one has bits at head_dim 128 and perplexity too."""
    headings = ["recipe", "bits (64)", "at 32k", "KL", "± se", "top-1", "attention error"]
    if whole:
        headings = ["recipe", "bits (64)", "at 32k", "bits (128)", "at 32k", "KL", "± se", "top-1", "PPL", "attention"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for name in names:
        if name not in rows:
            lines.append(f"| `{name}` | not measured {'| ' * (len(headings) - 1)}|")
            continue
        row = rows[name]
        cells = [f"{bits:.3f}" for dim in (("64", "128") if whole else ("64",)) for bits in row["bits"][dim]]
        cells += [f"{max(0.0, row['kl']):.4f}", f"{row['kl_se']:.4f}", f"{row['top1']:.1%}"]
        cells += [f"{row['ppl']:.2f}"] if whole else []
        lines.append(f"| `{name}` | {' | '.join(cells)} | {row['attn_rel_mse']:.4f} |")
    return "\n".join(lines)


def render(data: dict[str, Any]) -> None:
    """Puts the tables between their markers in docs/results.md."""
    rows = {row["recipe"]: row for row in data["results"]}
    # a recipe that was not measured yet is replaced by its form without sinks, where that was
    found = [name if name in rows or f"{name}:sink=0" not in rows else f"{name}:sink=0" for name in recipes.names()]
    everything = sorted(found, key=lambda name: rows[name]["kl"] if name in rows else float("inf"))
    tables = {
        "all": table(rows, everything, whole=True),
        **{title: table(rows, names) for title, names in ABLATIONS.items()},
    }
    long = {row["recipe"]: row for row in data.get("long", {}).get("results", [])}
    tables["long"] = table(long, LONG)
    text = PAGE.read_text()
    for title, body in tables.items():
        begin, end = f"<!-- table: {title} -->", "<!-- end -->"
        if begin not in text:
            raise ValueError(f"docs/results.md has no marker {begin}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
    PAGE.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="recipes to measure (default: all, and the ablations)")
    parser.add_argument("--text", help="text to measure on; without it, only the tables are rendered")
    parser.add_argument("--calibration-text", help="text to calibrate on (default: the model's own)")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--long", action="store_true", help="the table of long contexts, e.g. with --context 8192")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    data: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"results": []}
    if args.text:
        model, tokenizer = models.load("smollm2", "float32", args.device, say)
        text = read_text(args.text)
        calibration = None if args.calibration_text is None else read_text(args.calibration_text, "--calibration-text")
        segments = Segments.over(tokenizer(text, verbose=False)["input_ids"], args.context, args.tokens, args.prompt)
        extra = [name for names in ABLATIONS.values() for name in names]
        everything = LONG if args.long else list(dict.fromkeys([*recipes.names(), *extra]))
        chosen = recipes.split(args.recipe) if args.recipe else everything
        into = data.setdefault("long", {"results": []}) if args.long else data
        into["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        into |= {"context": args.context, "prompt": args.prompt, "tokens": segments.tokens}
        for name in chosen:
            say(f"measuring {name}")
            row = measure(name, model, tokenizer, segments, calibration, args.calibration_tokens)
            into["results"] = [other for other in into["results"] if other["recipe"] != name] + [row]
            write_json(str(FIGURES), data)
            say(f"{name}: KL {row['kl']:.5f} ± {row['kl_se']:.5f}")
    render(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
