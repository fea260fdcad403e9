"""Reads what `kvant eval --json` and `kvant bench attention --json` wrote. Anything else is refused, with what was expected."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.shape import ModelShape, check_sizes
from kvant.spec import parse_json

FULL, AGAIN = "full cache", "full cache again"  # kvant.eval.scoring's names of the two runs of the full cache
METRICS = {  # of a profile: what a heat map is called
    "attention_kl": "KL of attention weights",
    "key_error": "squared error of keys over their energy",
    "value_error": "squared error of values over their energy",
    "logit_error": "squared error of logits over their variance",
    "output_error": "squared error of attention outputs over their energy",
}
Grid = list[list[float | None]]


@dataclasses.dataclass(frozen=True)
class Profile:
    """Errors by layer. Both map a metric to rows: heads to [layer][KV head], by_length to [bucket][layer]."""

    heads: Mapping[str, Grid]
    by_length: Mapping[str, Grid]
    lengths: tuple[str, ...]  # names of the buckets


@dataclasses.dataclass(frozen=True)
class Result:
    """What one recipe scored on a text."""

    recipe: str
    bits: float  # at the context of the evaluation
    kl: float
    kl_se: float | None
    top1: float | None
    ppl: float | None
    attention: float | None
    layers: tuple[float | None, ...]
    profile: Profile | None


@dataclasses.dataclass(frozen=True)
class Text:
    """What all recipes scored on one text. `about` is what must agree where two files have results of the same text."""

    name: str
    about: Mapping[str, Any]
    results: tuple[Result, ...]


@dataclasses.dataclass(frozen=True)
class Score:
    """What one cache scored in a task."""

    recipe: str
    batch: int
    score: float
    difference: float  # from the first run of the full cache
    half: float | None  # of the difference's 95 % interval
    wins: int
    losses: int
    questions: int
    tokens: int
    bits: float


@dataclasses.dataclass(frozen=True)
class Task:
    """The rows of a task: the full cache, the full cache again, then the recipes."""

    name: str
    about: Mapping[str, Any]
    scores: tuple[Score, ...]

    @property
    def full(self) -> Score:
        return self.scores[0]

    @property
    def again(self) -> Score | None:
        return next((score for score in self.scores if score.recipe == AGAIN), None)

    @property
    def noise(self) -> tuple[float, float]:
        """Where a recipe's score says nothing: the 95 % interval of the second full run's difference, and the first run's
        score."""
        base, again = self.full.score, self.again
        if again is None:
            return base, base
        half = again.half or 0.0
        return min(base, again.score - half), max(base, again.score + half)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Decode attention of one recipe, one layer."""

    name: str
    seconds: float
    times: float  # as fast as the fastest attention over a full cache
    implementation: str


@dataclasses.dataclass(frozen=True)
class Speed:
    """Timings of one shape."""

    shape: Mapping[str, Any]  # batch, context, heads, kv_heads, head_dim
    device: str
    baseline: str
    timings: tuple[Timing, ...]

    @property
    def label(self) -> str:
        s = self.shape
        return f"{s['heads']}/{s['kv_heads']} × {s['head_dim']}, {s['batch']} × {s['context']:,} tokens"


@dataclasses.dataclass(frozen=True)
class Report:
    """What is shown on one page: one model's texts, tasks and timings."""

    model: str | None
    shape: ModelShape | None
    texts: tuple[Text, ...] = ()
    tasks: tuple[Task, ...] = ()
    speeds: tuple[Speed, ...] = ()

    @property
    def recipes(self) -> list[str]:
        """Every recipe that was evaluated, once."""
        names = [result.recipe for text in self.texts for result in text.results]
        names += [score.recipe for task in self.tasks for score in task.scores if score.recipe not in (FULL, AGAIN)]
        return list(dict.fromkeys(names))


def load(path: str, option: str = "") -> dict[str, Any]:
    """A JSON object of a file."""
    label = f"{option} {path!r}".strip()
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{label}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{label}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{label}: expected a JSON file that kvant wrote: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{label}: expected a JSON object that kvant wrote, got {type(data).__name__}")
    return data


def report_of(data: Mapping[str, Any], source: str) -> Report:
    """What `kvant eval --json` wrote: of one text, of several, or of tasks. `source` names it in errors."""
    if "work" in data:
        raise ValueError(f"{source}: this is a file of kvant bench; give it with --bench")
    data = _listed(data)
    if not any(isinstance(data.get(key), list) for key in ("results", "texts", "scores")):
        raise ValueError(f"{source}: expected a file of kvant eval --json, with results, texts or scores")
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"{source}: model must be a name, got {model!r}")
    texts, tasks = [], []
    if isinstance(data.get("texts"), list):
        for i, each in enumerate(data["texts"]):
            where = f"{source}: texts[{i}]"
            if not isinstance(each, dict) or not isinstance(each.get("results"), list):
                raise ValueError(f"{where}: expected an object with results")
            common = {key: data[key] for key in ABOUT if key in data}
            texts.append(_text({**common, **each}, where, f"text {i + 1}"))
    elif isinstance(data.get("results"), list):  # of a version that wrote one text
        texts.append(_text(data, source, source))
    if isinstance(data.get("scores"), list):
        tasks = _tasks(data, source)
    if not any(text.results for text in texts) and not tasks:
        raise ValueError(f"{source}: there is no result in it")
    return Report(model, _shape(data.get("shape"), source), tuple(texts), tuple(tasks))


def _listed(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The files of results/, which name texts and tasks by keys, as kvant eval writes them."""
    texts, tasks = data.get("texts"), data.get("tasks")
    out = dict(data)
    if isinstance(texts, dict):
        out["texts"] = [
            {"text": name, "text_sha256": each.get("sha256"), **each} if isinstance(each, dict) else each
            for name, each in texts.items()
        ]
    if isinstance(tasks, dict) and "scores" not in data:
        rows = [(name, row) for name, some in tasks.items() for row in (some if isinstance(some, list) else [some])]
        out["scores"] = [{**row, "task": name} if isinstance(row, dict) else row for name, row in rows]
    if "name" in data:
        out.setdefault("model", data["name"])
    return out


def bench_of(data: Mapping[str, Any], source: str) -> tuple[Speed, ...]:
    """What `kvant bench attention --json` wrote: timings by shape."""
    if data.get("work") != "attention" or not isinstance(data.get("results"), list):
        found = f"work {data['work']!r}" if "work" in data else "a file without `work`"
        raise ValueError(f"{source}: expected a file of kvant bench attention --json, got {found}")
    shapes: dict[str, tuple[dict[str, Any], str, list[Timing]]] = {}
    for i, each in enumerate(data["results"]):
        row = _Row(each, f"{source}: results[{i}]")
        shape = each.get("shape")
        names = ("batch", "context", "heads", "kv_heads", "head_dim")
        if not isinstance(shape, dict) or any(not isinstance(shape.get(name), int) for name in names):
            raise ValueError(f"{row.where}: expected a shape with {', '.join(names)}")
        timing = Timing(row.text("name"), row.number("seconds"), row.number("times"), row.text("implementation"))
        key = json.dumps(shape, sort_keys=True)
        shapes.setdefault(key, (shape, str(each.get("baseline", "")), []))[2].append(timing)
    if not shapes:
        raise ValueError(f"{source}: there is no timing in it")
    device = str(data.get("device", ""))
    return tuple(Speed(shape, device, baseline, tuple(found)) for shape, baseline, found in shapes.values())


def combine(reports: Sequence[tuple[str, Report]], model: str | None = None) -> Report:
    """One report of several, each with the name of its file. Results of different models are refused: bits, memory and scores
    of one model say nothing beside those of another. `model` is the model of files that name none."""
    named = {source: report.model or model for source, report in reports}
    first = next(iter(named))
    for source, found in named.items():
        if found != named[first]:
            raise ValueError(
                f"results of different models do not go on one page: {first} has {named[first] or 'no name'}, {source} has "
                f"{found or 'no name'}; make a page for each"
            )
    shapes = [(source, report.shape) for source, report in reports if report.shape is not None]
    for source, shape in shapes:
        if _served(shape) != _served(shapes[0][1]):
            raise ValueError(
                f"results of models of different shapes do not go on one page: {shapes[0][0]} and {source}"
            )
    texts: list[Text] = []
    for source, report in reports:
        for text in report.texts:
            _merge(texts, text, source)
    tasks = [task for _, report in reports for task in report.tasks]
    return Report(
        named[first],
        shapes[0][1] if shapes else None,
        tuple(_apart(texts)),
        tuple(_apart(tasks)),
    )


def only(report: Report, names: Sequence[str]) -> Report:
    """A report of some recipes, with the full cache of tasks. Texts and tasks without any of them are left out."""
    kept = {*names, FULL, AGAIN}
    texts = [
        dataclasses.replace(text, results=tuple(r for r in text.results if r.recipe in kept)) for text in report.texts
    ]
    tasks = [
        dataclasses.replace(task, scores=tuple(s for s in task.scores if s.recipe in kept)) for task in report.tasks
    ]
    return dataclasses.replace(
        report,
        texts=tuple(text for text in texts if text.results),
        tasks=tuple(task for task in tasks if any(s.recipe not in (FULL, AGAIN) for s in task.scores)),
    )


def _served(shape: ModelShape) -> tuple[Any, ...]:
    return shape.layers, shape.heads, shape.head_dim


def _merge(texts: list[Text], text: Text, source: str) -> None:
    """Adds a text. Recipes that another file measured on the same text in the same way are put beside it."""
    for i, other in enumerate(texts):
        if other.about == text.about and "text_sha256" in text.about:
            twice = {r.recipe for r in other.results} & {r.recipe for r in text.results}
            if twice:
                raise ValueError(
                    f"{source}: {', '.join(sorted(twice))}: another file has the same recipe on the same text"
                )
            texts[i] = dataclasses.replace(other, results=(*other.results, *text.results))
            return
    texts.append(text)


def _apart(parts: Iterable[Any]) -> list[Any]:
    """Texts, or tasks, with different names: a second one of the same name gets a number."""
    seen: dict[str, int] = {}
    out = []
    for part in parts:
        seen[part.name] = seen.get(part.name, 0) + 1
        count = seen[part.name]
        out.append(part if count == 1 else dataclasses.replace(part, name=f"{part.name} ({count})"))
    return out


ABOUT = (
    "text_sha256",
    "kind",
    "chats",
    "mean_length",
    "context",
    "prompt",
    "chunk",
    "tokens",
    "offset",
    "dtype",
    "device",
)


NUMBERS = {"chats", "mean_length", "context", "prompt", "chunk", "tokens", "offset"}  # of ABOUT


def _text(data: Mapping[str, Any], where: str, unnamed: str) -> Text:
    name, row = data.get("text"), _Row(data, where)
    about = {key: data[key] for key in ABOUT if data.get(key) is not None}
    for key in NUMBERS & about.keys():
        row.number(key)
    results = tuple(_result(each, f"{where}: results[{i}]") for i, each in enumerate(data["results"]))
    return Text(Path(name).name if isinstance(name, str) else Path(unnamed).stem, about, results)


def _result(each: Any, where: str) -> Result:
    row = _Row(each, where)
    layers = each.get("layers") or []
    return Result(
        row.text("recipe"),
        row.number("bpe"),
        row.number("kl"),
        row.optional("kl_se"),
        row.optional("top1"),
        row.optional("ppl"),
        row.optional("attn_rel_mse"),
        tuple(_row_of(layers, f"{where}: layers")),
        _profile(each.get("profile"), f"{where}: profile"),
    )


def _profile(data: Any, where: str) -> Profile | None:
    if not data:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("heads"), dict):
        raise ValueError(f"{where}: expected heads, errors by layer and KV head")
    heads = {metric: _grid(grid, f"{where}: heads: {metric}") for metric, grid in data["heads"].items()}
    grids, ends = data.get("by_length") or {}, data.get("lengths") or []
    if not isinstance(grids, dict) or not isinstance(ends, list):
        raise ValueError(f"{where}: expected by_length, errors by length of context and layer, and lengths, a list")
    by_length = {metric: _grid(grid, f"{where}: by_length: {metric}") for metric, grid in grids.items()}
    lengths = tuple(_bucket(each) for each in ends)
    for metric, grid in by_length.items():
        if len(grid) != len(lengths):
            raise ValueError(
                f"{where}: by_length: {metric}: expected {len(lengths)} rows, one a length, got {len(grid)}"
            )
    return Profile(heads, by_length, lengths)


def _bucket(length: Any) -> str:
    """The name of a bucket of context lengths, of which a profile has the upper end."""
    return f"up to {length:,}" if isinstance(length, int) else str(length)


def _grid(grid: Any, where: str) -> Grid:
    if not isinstance(grid, list) or not grid:
        raise ValueError(f"{where}: expected rows of numbers")
    rows = [_row_of(row, where) for row in grid]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{where}: expected rows of the same length")
    return rows


def _row_of(row: Any, where: str) -> list[float | None]:
    """Numbers; what is not finite becomes None."""
    if not isinstance(row, list) or any(_is_no_number(x) and x is not None for x in row):
        raise ValueError(f"{where}: expected a list of numbers")
    return [float(x) if x is not None and math.isfinite(x) else None for x in row]


def _is_no_number(x: Any) -> bool:
    """An integer beyond 64 bits counts as none: nobody measured it, and it may be no float."""
    return isinstance(x, bool) or not isinstance(x, (int, float)) or (isinstance(x, int) and abs(x) >= 1 << 63)


def _tasks(data: Mapping[str, Any], source: str) -> list[Task]:
    rows: dict[str, list[Score]] = {}
    for i, each in enumerate(data["scores"]):
        row = _Row(each, f"{source}: scores[{i}]")
        count = {name: row.count(name) for name in ("batch", "wins", "losses", "questions", "tokens")}
        score = Score(
            row.text("recipe"),
            score=row.number("score"),
            difference=row.number("difference"),
            half=row.optional("half"),
            bits=row.number("bits"),
            **count,
        )
        rows.setdefault(row.text("task"), []).append(score)
    for name, scores in rows.items():
        if scores[0].recipe != FULL:
            raise ValueError(f"{source}: task {name}: expected {FULL!r} first, got {scores[0].recipe!r}")
    about = {key: data[key] for key in ("dtype", "device", "sampling") if key in data}
    return [Task(name, about, tuple(scores)) for name, scores in rows.items()]


def _shape(data: Any, source: str) -> ModelShape | None:
    if data is None:
        return None
    try:
        shape = ModelShape(tuple(data["layers"]), data["heads"], data["head_dim"], str(data["dtype"]))
        sizes: dict[str, Any] = {"num_key_value_heads": shape.heads, "head_dim": shape.head_dim}
        check_sizes({**sizes, "num_hidden_layers": len(shape.layers)}, source)
        for window in shape.layers:
            check_sizes({"sliding_window": window}, source)
        if shape.heads is None or shape.head_dim is None or not shape.layers:
            raise ValueError
        return shape
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{source}: shape: expected layers, heads, head_dim and dtype, got {data!r}") from None


class _Row:
    """One object of a file, whose fields are asked for by name."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
        self.data, self.where = data, where

    def text(self, name: str) -> str:
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{self.where}: expected {name}, a text, got {value!r}")
        return value

    def number(self, name: str) -> float:
        """May be NaN: a recipe that broke the model has no finite KL, and is shown so."""
        value = self.data.get(name)
        if _is_no_number(value):
            raise ValueError(f"{self.where}: expected {name}, a number, got {value!r}")
        return float(value)  # type: ignore[arg-type]

    def count(self, name: str) -> int:
        value = self.number(name)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{self.where}: expected {name}, a finite number from 0, got {value!r}")
        return int(value)

    def optional(self, name: str) -> float | None:
        if self.data.get(name) is None:
            return None
        value = self.number(name)
        return value if math.isfinite(value) else None
