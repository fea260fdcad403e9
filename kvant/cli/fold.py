"""kvant fold: writes a model whose weights hold the value transforms of a recipe."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from kvant.cli.common import add_device_options, add_json_option, load_model, pick_device, say, stages


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "fold",
        examples=(
            "kvant fold smollm2 --artifact fitted --out folded",
            "kvant fold Qwen/Qwen3-8B --recipe saw-int4-kv --out folded",
        ),
        help="write a model whose weights hold a recipe's value transforms",
        description="Multiplies the value transforms of a recipe into the value and output projections of a model, and writes the "
        "model to DIR with a mark in its config.json. kvant.Cache, kvant serve and vLLM read the mark and leave the transforms "
        "out; with a full cache it is the same model as before.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory or id, a .gguf file, or smollm2")
    parser.add_argument(
        "--artifact", metavar="DIR", help="directory that kvant calibrate wrote, for a recipe that is fitted"
    )
    parser.add_argument("--recipe", metavar="R", help="a recipe with value transforms (default: the artifact's)")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the folded model, new or empty")
    add_device_options(parser, "type of the weights that are written (default: the checkpoint's)")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from kvant import models, recipes
    from kvant.artifact import Artifact
    from kvant.engines import fold
    from kvant.files import check_vacant, making_directory

    artifact = None if args.artifact is None else Artifact.load(args.artifact)
    if args.recipe is None and artifact is None:
        raise ValueError("give --artifact DIR to fold the artifact's recipe, or --recipe R")
    recipe = recipes.get(args.recipe) if args.recipe is not None or artifact is None else artifact.recipe
    fold.check_recipe(recipe)
    if artifact is not None and not recipe.calibrated:
        raise ValueError(f"--artifact: recipe {recipe.name} takes no artifact")
    out = Path(args.out)
    check_vacant(out, "--out")
    config = models.config_of(args.model)
    if fold.quantized(config):
        raise ValueError(f"cannot fold into {args.model}: its weights are quantized")
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    dtype = args.dtype or (stored if stored in models.DTYPES else "float32")
    begin = time.perf_counter()
    args.dtype = "float32" if pick_device(args.device) == "cpu" else dtype  # in which the model is loaded and checked
    model, tokenizer = load_model(args)
    with stages() as progress:
        changed = fold.fold(model, recipe, artifact, progress)
    if dtype != args.dtype:
        changed = max(changed, fold.round_weights(model, getattr(torch, dtype)))
    with making_directory(out) as directory:
        say(f"writing {out}")
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    mark = getattr(model.config, fold.MARK)
    report = {
        "model": args.model,
        "out": str(out),
        "recipe": recipe.name,
        "artifact": mark["artifact"],
        "layers": mark["layers"],
        "dtype": dtype,
        "transforms": mark["transforms"],
        "fingerprint": mark["base"],
        "logits_changed": changed,
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        say(f"folded {recipe.name} into {mark['layers']} layers; logits of a few tokens changed by {changed:.1e}")
        print(out)
    return 0
