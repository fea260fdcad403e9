"""Verdicts on whether a recipe fits a model: measurements, thresholds, and storage.

A verdict is a JSON file beside the model's artifacts, ARTIFACTS/<model's fingerprint>/verdicts/<recipe>-<artifact>.json. It is
valid for the version of kvant and the text that it was measured with; others are ignored. docs/check.md says
what the thresholds mean and why they are what they are.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvant import passages
from kvant.files import cache_dir, directory_for, open_regular, replacing
from kvant.recipe import Recipe
from kvant.version import VERSION

Word = Literal["good", "usable", "unfit", "unknown"]
FORMAT = "kvant-verdict-1"
_LARGEST = 1 << 20  # largest file that is read as a verdict, in bytes


class Threshold(NamedTuple):
    """Limits that a recipe has to meet, both of them."""

    kl: float  # nats, mean over the scored tokens
    top1: float  # share of tokens whose likeliest successor is that of the full cache


GOOD = Threshold(kl=0.1, top1=0.80)
USABLE = Threshold(kl=0.25, top1=0.75)


def word_for(kl: float, top1: float) -> Word:
    """good, usable or unfit; a KL that is NaN is unfit."""
    for word, threshold in (("good", GOOD), ("usable", USABLE)):
        if kl <= threshold.kl and top1 >= threshold.top1:
            return word  # type: ignore[return-value]
    return "unfit"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verdict on a recipe for a model, measured on the built-in text through the packed cache.

    recipe        its name, as it was asked for.
    fingerprint   of the model.
    recipe_digest, artifact  what was measured: Recipe.digest, and the artifact's digest or "" where there is none.
    kl, kl_se     mean KL(full cache || recipe) of the next token's distribution in nats, and its standard error.
    top1          share of tokens whose likeliest successor is the full cache's.
    bpe           bits per cached number of a full page.
    packed        how many packed tokens a scored token reads, on average. 0: all of them were in the windows, and nothing was
                  measured; the verdict is then "unknown".
    tokens        tokens that were scored.
    noise         KL of the unquantized recipe `full`, which differs only in the order of sums; None where it was not measured.
    why           the reason in plain words, where one was found; else "".

    >>> import kvant
    >>> from kvant.models import tiny
    >>> [verdict] = kvant.check(*tiny(), "int8", tokens=256)
    >>> verdict.recipe, verdict.word, verdict.to_dict()["verdict"]
    ('int8', 'good', 'good')
    """

    recipe: str
    fingerprint: str
    recipe_digest: str
    artifact: str
    kl: float
    kl_se: float
    top1: float
    bpe: float
    packed: float
    tokens: int
    dtype: str
    noise: float | None = None
    why: str = ""
    model: str = ""
    seconds: float = 0.0
    text: str = dataclasses.field(default_factory=lambda: passages.digest("check")[:16])
    version: str = VERSION

    @property
    def word(self) -> Word:
        return word_for(self.kl, self.top1) if self.packed >= 1 else "unknown"

    def __str__(self) -> str:
        if self.word == "unknown":
            return f"{self.recipe}: unknown, nothing was packed: all of the text is in its windows"
        return f"{self.recipe}: {self.word}, KL {max(self.kl, 0.0):.4f}, top-1 {self.top1:.1%}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the verdict itself under "verdict"; NaN is null."""
        data = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}
        return {"verdict": self.word, **data}

    @staticmethod
    def from_dict(data: Any) -> Verdict:
        fields = {field.name: field for field in dataclasses.fields(Verdict)}
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, got {type(data).__name__}")
        found = {key: value for key, value in data.items() if key in fields}
        for key in ("kl", "kl_se", "top1"):
            found[key] = math.nan if found.get(key) is None else found[key]
        for key, value in found.items():
            hint = str(fields[key].type)
            kinds = {"str": str, "int": int, "float": (int, float), "float | None": (int, float, type(None))}[hint]
            if isinstance(value, bool) or not isinstance(value, kinds):  # type: ignore[arg-type]
                raise ValueError(f"{key} must be {hint}, got {value!r:.40}")
        missing = {k for k, f in fields.items() if f.default is dataclasses.MISSING} - {"text"} - set(found)
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return Verdict(**found)


def directory(named: str) -> Path:
    """The directory of the verdicts on a model with this fingerprint."""
    return cache_dir() / "artifacts" / named[:16] / "verdicts"


def _file(named: str, recipe_digest: str, artifact: str) -> Path:
    return directory(named) / f"{recipe_digest[:16]}-{artifact[:16] or 'plain'}.json"


def keep(verdict: Verdict) -> Path:
    """Writes a verdict atomically."""
    target = _file(verdict.fingerprint, verdict.recipe_digest, verdict.artifact)
    with directory_for(target.parent), replacing(target) as temporary:
        temporary.write_text(json.dumps({"format": FORMAT, **verdict.to_dict()}, indent=2) + "\n", encoding="utf-8")
    return target


def verdict(named: str, recipe: Recipe, artifact: str = "") -> Verdict | None:
    """The verdict on a recipe, by the model's fingerprint and the digest of the artifact where the recipe has one; None where
    no valid one is stored."""
    found = _read(_file(named, recipe.digest, artifact))
    mine = (named, recipe.digest, artifact)
    if found is None or (found.fingerprint, found.recipe_digest, found.artifact) != mine:
        return None
    return found


def verdicts(named: str) -> list[Verdict]:
    """All valid verdicts on a model, fewest bits first."""
    found = [_read(path) for path in sorted(directory(named).glob("*.json"))]
    mine = [each for each in found if each is not None and each.fingerprint == named]
    return sorted(mine, key=lambda each: (each.bpe, each.kl))


def _read(path: Path) -> Verdict | None:
    """Reads a verdict. A file that cannot be read is ignored: the next check rewrites it."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(_LARGEST + 1)
        found = json.loads(data) if len(data) <= _LARGEST else {}
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            return None
        out = Verdict.from_dict(found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return out if (out.version, out.text) == (VERSION, passages.digest("check")[:16]) else None


def names_that_fit(named: str) -> list[str]:
    """Recipes whose stored verdict for a model is good, fewest bits first."""
    return list(dict.fromkeys(each.recipe for each in verdicts(named) if each.word == "good"))


class Unfit(ValueError):
    """Raised for a recipe that is unfit for the model."""


def refuse_unfit(found: Verdict, anyway: str, fitting: str = "") -> None:
    """Raises where a verdict says unfit. `anyway`: the option that overrides this; `fitting`: recipes that fit."""
    if found.word != "unfit":
        return
    names = fitting or ", ".join(names_that_fit(found.fingerprint))
    instead = f"; what fits: {names}" if names else "; kvant check says which recipes fit"
    why = f" ({found.why})" if found.why else ""
    raise Unfit(
        f"recipe {found.recipe} is unfit for this model: KL {found.kl:.2f}, top-1 {found.top1:.0%}{why}{instead}; {anyway} takes "
        "it all the same"
    )
