"""Measures recipes on a model and writes results/MODEL.json and the tables of docs/results.md and docs/ablations.md.

    python scripts/results.py --model smollm2 --prose wikitext2.test.txt --calibration-text wikitext2.valid.txt
    python scripts/results.py --model DIR --name qwen2.5-coder-1.5b --device cuda --dtype bfloat16 --prose wikitext2.test.txt \\
        --gsm8k gsm8k.test.jsonl --calibration-text wikitext2.valid.txt [--part texts|ablations|gsm8k|needles] [--recipe R,...]
    python scripts/results.py --merge FILE...      adds rows that --out wrote, and renders the tables
    python scripts/results.py                      only renders the tables

Texts are prose (--prose), chat (questions and worked answers of --gsm8k as conversations of four turns, put through the model's
template; the answers are scored), code (modules of Python's standard library) and foreign (--foreign, in another language). A
recipe is calibrated once and read on all of them. Rows of a part that are there already are measured again only with --again.
Several parts may run at the same time on one GPU, each with an --out of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results_tables import LONG, NEEDLES, ROOT, SMOLLM2, TASK_RECIPES, Spec, ablation_rows, needle, render, tables_of

from kvant import models, recipes
from kvant.artifact import Artifact
from kvant.calibrate import text as texts
from kvant.calibrate.run import calibrate_all
from kvant.chats import Chats
from kvant.cli.common import read_text, say, write_json
from kvant.codecs.boosted import Boosted
from kvant.engines.hf import Cache
from kvant.eval import evaluate, tasks
from kvant.eval.asking import Prompts, Sampling
from kvant.eval.scoring import score_task
from kvant.eval.segments import ChatSegments, Segments
from kvant.layouts import Layouts
from kvant.recipe import MixedRecipe, Recipe
from kvant.tune.run import Study, study

CODE = ("argparse", "ast", "asyncio.base_events", "collections", "datetime", "decimal", "inspect", "tarfile", "typing")
CODEBOOKS = ("vecinfer", "million", "saw-int4-kmeans")  # fitted on more tokens
TURNS = 4  # questions of a conversation
FIT_TOGETHER = 12  # recipes that share passes over their calibration text
MIXED = 16384  # tokens of each kind in a mixture to calibrate on


@dataclasses.dataclass(frozen=True)
class RandomlyBoosted(Boosted):
    """Kitty's control: every channel has a random score, and the channels with the largest scores are boosted."""

    def choose(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[2], x.shape[3])
        scores = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(x.device)
        chosen = scores.argsort(dim=-1, descending=True)[..., : self.boosted(x.shape[-1])]
        return torch.zeros(shape, dtype=torch.bool, device=x.device).scatter(-1, chosen, True).expand(len(x), -1, -1)


def recipe_of(spec: Spec) -> Recipe:
    recipe = recipes.get(spec.recipe)
    if not spec.random:
        return recipe
    codec = recipe.key.codec
    assert isinstance(codec, Boosted), spec
    key = dataclasses.replace(recipe.key, codec=RandomlyBoosted(codec.boost, codec.group, codec.meta))
    return dataclasses.replace(recipe, name=f"{recipe.name}~random", key=key)


class Texts:
    """Texts that are read, and those that recipes are calibrated on."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        prose = read_text(args.prose, "--prose")
        self.scored: dict[str, Any] = {"prose": self._segments(tokenizer, prose, args)}
        self.facts = {"prose": {"sha256": hashlib.sha256(prose.encode()).hexdigest()}}
        self.calibration = {
            None: read_text(args.calibration_text, "--calibration-text") if args.calibration_text else None,
            "builtin": None,
        }
        if args.foreign:
            foreign = read_text(args.foreign, "--foreign")
            self.scored["foreign"] = self._segments(tokenizer, foreign, args)
            self.facts["foreign"] = {"sha256": hashlib.sha256(foreign.encode()).hexdigest()}
        if args.gsm8k:
            lines = [json.loads(line) for line in Path(args.gsm8k).read_text(encoding="utf-8").splitlines()]
            half = len(lines) // 2
            chats = Chats.parse(conversations(lines[:half]), "gsm8k")
            self.scored["chat"] = ChatSegments.of(chats.encode(tokenizer), args.tokens)
            self.facts["chat"] = {"sha256": chats.digest}
            code = source_of(CODE)
            self.scored["code"] = self._segments(tokenizer, code, args)
            self.facts["code"] = {"sha256": hashlib.sha256(code.encode()).hexdigest(), "python": sys.version.split()[0]}
            others = Chats.parse(conversations(lines[half:]), "gsm8k")
            self.calibration["chat"] = torch.tensor(others.ids(tokenizer))
            self.calibration["code"] = source_of(
                ("doctest", "optparse", "pickle", "subprocess", "unittest.mock", "zipfile")
            )
            ids = [
                texts.encode(tokenizer, text)[:MIXED] if isinstance(text, str) else text[:MIXED]
                for text in self.calibration.values()
                if text is not None
            ]
            self.calibration["mixed"] = torch.cat(ids)

    @staticmethod
    def _segments(tokenizer: Any, text: str, args: argparse.Namespace) -> Segments:
        ids = tokenizer(text, verbose=False)["input_ids"]
        return Segments.over(ids, args.context, args.tokens, args.prompt, tokenizer.bos_token_id)


def conversations(lines: list[dict[str, str]]) -> str:
    """Questions and their worked solutions as chats of TURNS turns: JSON lines."""
    out = []
    for first in range(0, len(lines) - TURNS + 1, TURNS):
        messages = []
        for line in lines[first : first + TURNS]:
            worked, _, number = re.sub(r"<<.*?>>", "", line["answer"]).partition("\n#### ")
            messages.append({"role": "user", "content": line["question"]})
            messages.append({"role": "assistant", "content": f"{worked}\nThe answer is {number.strip()}."})
        out.append(json.dumps({"messages": messages}))
    return "\n".join(out)


def source_of(modules: tuple[str, ...]) -> str:
    """The source of modules of the standard library."""
    out = []
    for name in modules:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, name
        out.append(Path(found.origin).read_text(encoding="utf-8"))
    return "\n\n".join(out)


class Bench:
    """A model, its texts, and the artifacts that were fitted so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model, self.tokenizer = models.load(args.model, args.dtype, args.device, say)
        self.texts = Texts(args, self.tokenizer)
        self.artifacts: dict[Any, Artifact | None] = {}
        self.seconds: dict[Any, float] = {}
        self.study: Study | None = None

    def artifact(self, spec: Spec) -> tuple[Recipe, Artifact | None]:
        key = dataclasses.replace(spec, offset=0)
        if key not in self.artifacts:
            self.fit([spec])
        found = self.artifacts[key]
        if spec.tuned is not None:
            assert found is not None
            return found.recipe, found
        return recipe_of(spec), found

    def fit(self, specs: list[Spec]) -> None:
        """Fits recipes that are not fitted yet. Those that read the same text share its passes (calibrate_all)."""
        together: dict[Any, list[Spec]] = {}
        for spec in dict.fromkeys(dataclasses.replace(spec, offset=0) for spec in specs):
            if spec in self.artifacts:
                continue
            if spec.tuned is not None:
                self.artifacts[spec], self.seconds[spec] = self.tune(spec.tuned)
            elif recipe_of(spec).calibrated:
                tokens = spec.tokens or self.tokens_for(spec.recipe)
                together.setdefault((spec.text, tokens, spec.positions), []).append(spec)
            else:
                self.artifacts[spec], self.seconds[spec] = None, 0.0
        for (text, tokens, positions), some in together.items():
            begin = time.perf_counter()
            chosen = [recipe_of(spec) for spec in some]
            read = self.texts.calibration[text]
            made = calibrate_all(
                self.model, self.tokenizer, chosen, read, tokens=tokens, max_position=positions, resume=False
            )
            took = time.perf_counter() - begin
            say(f"fitted {len(some)} recipes on {tokens:,} tokens in {took:.1f} s: {', '.join(s.recipe for s in some)}")
            for spec, artifact in zip(some, made, strict=True):
                self.artifacts[spec], self.seconds[spec] = artifact, took / len(some)

    def tune(self, bits: float) -> tuple[Artifact, float]:
        """What `kvant tune --bits` makes, on its built-in text, and its seconds. Budgets share what does not depend on them."""
        begin = time.perf_counter()
        self.study = self.study or study(self.model, self.tokenizer)
        made = self.study.tune(bits)
        took = time.perf_counter() - begin
        say(f"tuned to {bits:g} bits in {took:.1f} s: {made.bits:.3f} bits, window {made.window}")
        for i, layer in enumerate(made.layers):
            say(f"  layer {i}: {layer.recipe}")
        for result in made.results:
            say(f"  on the held-out text: {result.recipe}: KL {result.kl:.5f} ± {result.kl_se:.5f}")
        return made.artifact, took

    def tokens_for(self, recipe: str) -> int:
        return self.args.codebook_tokens if recipe.startswith(CODEBOOKS) else self.args.calibration_tokens

    def rows(self, names: list[str], kind: str) -> list[dict[str, Any]]:
        """Quality on a text, bits, and what the calibration took. The recipes share the full cache's pass over the text."""
        specs = {name: Spec.parse(name) for name in names}
        (offset,) = {spec.offset for spec in specs.values()}
        fitted = {name: self.artifact(spec) for name, spec in specs.items()}
        found = evaluate(
            self.model,
            [dataclasses.replace(recipe, name=name) for name, (recipe, _) in fitted.items()],
            self.texts.scored[kind],
            batch=self.args.batch,
            make_cache=lambda named: Cache(
                self.model,
                fitted[named.name][0],
                artifact=fitted[named.name][1],
                first_position=offset,
                implementation="reference" if specs[named.name].random else None,  # kernels choose channels themselves
            ),
            offset=offset,
        )
        out = []
        for result in found:
            spec, (recipe, _) = specs[result.recipe], fitted[result.recipe]
            row = dataclasses.asdict(result)
            row.pop("profile", None)
            row |= {
                "tokens": self.texts.scored[kind].tokens,
                "bits": {str(dim): bits for dim in (64, 128) if (bits := bits_at(recipe, dim)) is not None},
                "calibration_tokens": (spec.tokens or self.tokens_for(spec.recipe)) if recipe.calibrated else 0,
                "calibration_seconds": self.seconds[dataclasses.replace(spec, offset=0)],
                "device": self.model.device.type,
            }
            out.append(row)
        return out


def bits_at(recipe: Recipe, head_dim: int) -> list[float] | None:
    """Bits per element of a page, and of a sequence of 32k tokens with its full-precision windows; None where a recipe does not fit
    a head dim."""
    layers = len(recipe.layers) if isinstance(recipe, MixedRecipe) else 1
    try:
        layouts = Layouts.of(recipe, layers, 1, head_dim)
    except ValueError:
        return None
    return [layouts.bits_per_element(), layouts.bits_per_element(32768)]


def measure_texts(bench: Bench, data: dict[str, Any], names: list[str], kinds: list[str], save: Any) -> None:
    """Rows of several texts. A recipe that cannot be measured is reported, and costs no other its row."""

    def add(kind: str, some: list[str]) -> None:
        into = data["texts"][kind]
        begin = time.perf_counter()
        rows = bench.rows(some, kind)
        into["results"] = [other for other in into["results"] if other["recipe"] not in some] + rows
        save()
        took = time.perf_counter() - begin
        for row in rows:
            say(
                f"{kind}: {row['recipe']}: KL {row['kl']:.5f} ± {row['kl_se']:.5f}, top-1 {row['top1']:.1%} ({took:.1f} s)"
            )

    for kind in kinds:
        into = data.setdefault("texts", {}).setdefault(kind, {"results": []})
        into |= bench.texts.facts[kind] | {"tokens": bench.texts.scored[kind].tokens}
        if kind != "chat":
            into |= {"context": bench.args.context, "prompt": bench.args.prompt}
    have = {kind: {row["recipe"] for row in data["texts"][kind]["results"]} for kind in kinds}
    missing = names if bench.args.again else [name for name in names if any(name not in have[kind] for kind in kinds)]
    for fitted in grouped(missing, FIT_TOGETHER):
        try:
            bench.fit([Spec.parse(name) for name in fitted])
        except Exception as error:
            say(f"{', '.join(fitted)}: not fitted together: {type(error).__name__}: {error}")
        for kind, some in itertools.product(kinds, grouped(fitted, 3)):
            left = some if bench.args.again else [name for name in some if name not in have[kind]]
            try:
                if left:
                    add(kind, left)
            except Exception as error:
                say(f"{kind}: {', '.join(left)}: {type(error).__name__}: {error}; one by one")
                for name in left:
                    try:
                        add(kind, [name])
                    except Exception as again:
                        say(f"{kind}: {name}: not measured: {type(again).__name__}: {again}")


def grouped(names: list[str], count: int) -> list[list[str]]:
    """Names in groups of `count`, those with the same offset of positions together."""
    by_offset: dict[int, list[str]] = {}
    for name in names:
        by_offset.setdefault(Spec.parse(name).offset, []).append(name)
    return [some[first : first + count] for some in by_offset.values() for first in range(0, len(some), count)]


def measure_task(bench: Bench, data: dict[str, Any], label: str, names: list[str], batch: int, save: Any) -> None:
    """A task for several recipes, with the full cache twice; answers are not part of the results."""
    task = tasks.get(label)
    args = bench.args

    def count(text: str) -> int:
        return len(bench.tokenizer(text, verbose=False)["input_ids"])

    limit = args.limit if label.startswith("gsm8k") else args.needles
    prompts = Prompts(bench.tokenizer, task.questions(limit, 0, count))
    found = {name: bench.artifact(Spec.parse(name)) for name in names}
    short = label.partition(":path=")[0]
    rows: list[dict[str, Any]] = data.setdefault("tasks", {}).setdefault(short, [])
    begin = time.perf_counter()

    def done(score: Any) -> None:
        row = dataclasses.asdict(score)
        row.pop("answers")
        rows[:] = [other for other in rows if other["recipe"] != row["recipe"]] + [row]
        save()
        took = time.perf_counter() - begin
        say(f"{short}: {score.recipe}: {100 * score.score:.1f} ({100 * score.difference:+.1f}), {took:.0f} s so far")

    score_task(
        bench.model,
        prompts,
        task,
        [found[name][0] for name in names],
        {found[name][0].name: found[name][1] for name in names},
        batch=batch,
        sampling=Sampling(),
        graph=bench.model.device.type == "cuda",
        say=say,
        done=done,
    )


def of_eval(report: dict[str, Any], name: str) -> dict[str, Any]:
    """A report of `kvant eval --task` as rows of the results: without the answers."""
    found: dict[str, list[dict[str, Any]]] = {}
    for score in report["scores"]:
        label, _, path = score["task"].partition(":path=")
        kept = {key: value for key, value in score.items() if key != "answers"}
        found.setdefault(label, []).append({**kept, "task": f"{label}={Path(path).name}" if path else label})
    return {"name": name, "dtype": report["dtype"], "tasks": found}


def merge(files: list[str], name: str) -> None:
    """Adds the rows of other files to those of results/: what --out wrote, or `kvant eval --task --json`."""
    for file in files:
        new = json.loads(Path(file).read_text())
        if "scores" in new:
            new = of_eval(new, name)
        path = ROOT / "results" / f"{new['name']}.json"
        data = json.loads(path.read_text()) if path.exists() else {}
        data |= {key: value for key, value in new.items() if key not in ("texts", "tasks", "long")}
        for kind, more in new.get("texts", {}).items():
            into = data.setdefault("texts", {}).setdefault(kind, {"results": []})
            fresh = {row["recipe"] for row in more["results"]}
            kept = [row for row in into["results"] if row["recipe"] not in fresh]
            into |= {**more, "results": kept + more["results"]}
        for label, rows in new.get("tasks", {}).items():
            old = data.setdefault("tasks", {}).setdefault(label, [])
            fresh = {row["recipe"] for row in rows}
            data["tasks"][label] = [row for row in old if row["recipe"] not in fresh] + rows
            data["tasks"][label].sort(key=lambda row: not row["recipe"].startswith("full cache"))
        write_json(str(path), data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a directory")
    parser.add_argument("--name", default=SMOLLM2, help="of the model in results/")
    parser.add_argument("--weights", help="where the weights are from, in words, for the results")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--part", default="texts,ablations", help="texts, ablations, long, gsm8k, needles (default: the first two)"
    )
    parser.add_argument("--recipe", help="recipes to measure (default: those of the part)")
    parser.add_argument("--kinds", help="of texts (default: all that are given; ablations: prose)")
    parser.add_argument("--prose", help="text to measure on; without it, only the tables are rendered")
    parser.add_argument("--gsm8k", help="GSM8K's test set: for chats, and for its task")
    parser.add_argument("--foreign", help="text in another language, to measure on")
    parser.add_argument("--calibration-text", help="text to calibrate on (default: the built-in one)")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--codebook-tokens", type=int, default=32768, help="for codebooks and centroids")
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="segments of a batch")
    parser.add_argument("--limit", type=int, help="questions of gsm8k")
    parser.add_argument("--needles", type=int, default=32, help="questions of a kind of needle and length")
    parser.add_argument("--kind", default="needle,needle-multikey", help="kinds of needles")
    parser.add_argument("--again", action="store_true", help="measure rows that are there")
    parser.add_argument("--out", help="write rows to this file instead of results/")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="files that --out or kvant eval --task --json wrote")
    args = parser.parse_args()
    if args.merge:
        merge(args.merge, args.name)
    if args.prose:
        path = Path(args.out) if args.out else ROOT / "results" / f"{args.name}.json"
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        data |= {"name": args.name, "dtype": args.dtype} | ({"weights": args.weights} if args.weights else {})
        bench = Bench(args)

        def save() -> None:
            write_json(str(path), data)

        for part in args.part.split(","):
            chosen = recipes.split(args.recipe) if args.recipe else None
            if part == "texts":
                kinds = args.kinds.split(",") if args.kinds else list(bench.texts.scored)
                measure_texts(bench, data, chosen or recipes.names(), kinds, save)
            elif part == "ablations":
                measure_texts(bench, data, chosen or ablation_rows(args.name), ["prose"], save)
            elif part == "long":
                measure_texts(bench, data.setdefault("long", {}), chosen or LONG, ["prose"], save)
            elif part == "gsm8k":
                measure_task(bench, data, f"gsm8k:path={args.gsm8k}", chosen or TASK_RECIPES, args.limit or 1319, save)
            elif part == "needles":
                for kind in args.kind.split(","):
                    for length in NEEDLES:
                        together = max(1, min(args.needles, 2**19 // length))
                        measure_task(bench, data, needle(kind, length), chosen or TASK_RECIPES, together, save)
            else:
                raise ValueError(f"unknown part {part!r}: texts, ablations, long, gsm8k or needles")
    if not args.out:
        for file in sorted((ROOT / "results").glob("*.json")):
            data = json.loads(file.read_text())
            if "texts" in data:
                for title in render(tables_of(data["name"], data)):
                    say(f"no marker in the documents for the table {title!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
