"""How well a fit on one text serves others: KL of a recipe by the text that it was fitted on and the text that is read.

    python scripts/fit_texts.py --model smollm2 --text prose=fit.txt,held-out.txt --text code=fit.py,held-out.py [--device cuda]

Each --text names a kind, a text to fit on and one to read. Fits: the default (the built-in text, as many tokens as the device
reads), --tokens N of the built-in text for every N given, and 8,192 tokens of the kind that is read. A model without --dtype is
read in float32. The table has the KL, and in brackets its ratio to that of the fit on the same kind.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from kvant import models, recipes
from kvant.artifact import Artifact
from kvant.calibrate.run import calibrate, source_ids
from kvant.cli.common import read_text, say, write_json
from kvant.engines.hf import Cache
from kvant.eval import Segments, evaluate

CONTEXT, PROMPT = 1024, 512
SAME = 8192  # tokens of the kind that is read


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    fit: Path
    held_out: Path


def kind(argument: str) -> Kind:
    name, equals, paths = argument.partition("=")
    files = [Path(path) for path in paths.split(",")]
    if not equals or len(files) != 2:
        raise argparse.ArgumentTypeError(f"expected KIND=TEXT TO FIT ON,TEXT TO READ, got {argument!r}")
    return Kind(name, *files)


def kl(model: Any, fits: dict[str, Artifact], segments: Segments) -> dict[str, tuple[float, float]]:
    """KL and its standard error, by the name of a fit."""
    named = {name: dataclasses.replace(artifact.recipe, name=name) for name, artifact in fits.items()}
    results = evaluate(model, list(named.values()), segments, make_cache=lambda r: Cache(model, artifact=fits[r.name]))
    return {name: (result.kl, result.kl_se) for name, result in zip(fits, results, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.SMOLLM2)
    parser.add_argument("--recipe", default="kvant-2")
    parser.add_argument("--text", type=kind, action="append", required=True, metavar="KIND=FIT,READ")
    parser.add_argument(
        "--tokens", type=int, action="append", default=[], help="also fit on N tokens of the built-in text"
    )
    parser.add_argument("--scored", type=int, default=2048, help="tokens that are scored of each text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=models.DTYPES, default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = models.load(args.model, device=args.device, dtype=args.dtype)
    recipe = recipes.get(args.recipe)

    def fitted(name: str, **options: Any) -> Artifact:
        say(f"fitting {recipe.name}: {name}")
        return calibrate(model, tokenizer, recipe, **options)

    fits = {"default": fitted("default")}
    for tokens in args.tokens:
        fits[f"built in, {tokens}"] = fitted(f"{tokens} tokens of the built-in text", tokens=tokens)
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    for each in args.text:
        same = fitted(f"{SAME} tokens of {each.fit}", text=source_ids(tokenizer, read_text(str(each.fit))), tokens=SAME)
        ids = source_ids(tokenizer, read_text(str(each.held_out))).tolist()
        scored = min(args.scored, len(ids) - 1 - PROMPT)
        rows[each.name] = kl(
            model,
            {**fits, "same kind": same},
            Segments.over(ids, CONTEXT, scored, PROMPT, ids[0] if ids[0] == tokenizer.bos_token_id else None),
        )
        print(
            each.name,
            *(f"{name} {value:.4f} ± {error:.4f}" for name, (value, error) in rows[each.name].items()),
            sep="  ",
        )
    names = [*fits, "same kind"]
    print("\n| text | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for name, row in rows.items():
        best = row["same kind"][0]
        print(f"| {name} | " + " | ".join(f"{row[fit][0]:.4f} ({row[fit][0] / best:.2f})" for fit in names) + " |")
    if args.json is not None:
        source = fits["default"].source
        write_json(
            str(args.json),
            {"recipe": recipe.name, "model": source["model_name"], "tokens": source["tokens"], "kl": rows},
        )


if __name__ == "__main__":
    main()
