"""kvant serve: vLLM's OpenAI-compatible server with kvant behind its attention.

Everything that can be wrong with recipe, artifact and model is found before vLLM starts, and so before anything listens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvant.cli.artifacts import add_artifact_options, artifacts_for
from kvant.cli.common import DEFAULT_RECIPE, say

if TYPE_CHECKING:
    from kvant.recipe import Recipe

OURS = ("--attention-backend", "--additional-config", "--kv-cache-dtype", "--attention-config", "--model")
LOOPBACK = "127.0.0.1"
WINDOWS = 4 << 30  # bytes of full-precision windows that are given where nobody says how many sequences there will be
SEQUENCES = 16, 256  # that these are for, at least and at most


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model with vLLM, OpenAI-compatible",
        description="Serves a model with vLLM's OpenAI-compatible server from a packed cache, on loopback unless --host says "
        "otherwise. What is not listed here goes to vLLM as it is, for instance --port, --api-key, --max-model-len, "
        "--tensor-parallel-size.",
        usage="kvant serve M [--recipe R] [--layers JSON] [--artifact DIR] [--calibration-text FILE] [vLLM's own options]",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="M", help="Hugging Face directory or id, or smollm2; before all options")
    parser.add_argument("--recipe", metavar="R", help=f"a recipe (default {DEFAULT_RECIPE})")
    parser.add_argument(
        "--layers", metavar="JSON", help='recipes for some of the layers, for instance {"0-1": "int8", "2-": "oscar"}'
    )
    add_artifact_options(parser)
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen on (default {LOOPBACK})")
    parser.set_defaults(run=run, passes_on=True)


def run(args: argparse.Namespace) -> int:
    command = command_for(args, args.rest)
    say(f"starting vLLM on {args.host}")
    sys.stdout.flush()
    os.execv(command[0], command)


def command_for(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The command line of vLLM's server, once everything was checked."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "vLLM is not installed: pip install 'kvant[vllm]', or for CPUs ./scripts/setup --vllm"
        )
    import vllm

    from kvant import models
    from kvant.engines.vllm import versions
    from kvant.layout import human_bytes

    versions.check(vllm.__version__)
    for each in rest:
        if each.split("=")[0].replace("_", "-") in OURS:
            raise ValueError(f"{each.split('=')[0]} is kvant's to choose; leave it out")
    ranges = _ranges(args.layers)
    source = models.resolve(args.model, say)
    kvant: dict[str, Any] = (
        {"recipe": args.recipe, "layers": ranges} if ranges else {"recipe": args.recipe or DEFAULT_RECIPE}
    )
    kvant = {key: value for key, value in kvant.items() if value}
    paths = check(source, kvant, args)
    if paths:
        kvant["artifact"] = paths
    options = [
        "--host",
        args.host,
        "--attention-backend",
        "CUSTOM",
        "--additional-config",
        json.dumps({"kvant": kvant}),
    ]
    cpu, given = _on_cpu(), {each.split("=")[0].replace("_", "-") for each in rest}
    if cpu and "--dtype" not in given:
        options += ["--dtype", "float32"]  # vLLM's 16-bit products need instructions that not every CPU has
    window = window_bytes(source, kvant)
    if (
        not cpu and window and "--max-num-seqs" not in given
    ):  # vLLM's own default may be 1024, and every one has a window
        count = min(max(WINDOWS // window, SEQUENCES[0]), SEQUENCES[1])
        say(f"--max-num-seqs {count}: windows of full-precision tokens take {human_bytes(window)} a sequence")
        options += ["--max-num-seqs", str(count)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", source, *options, *rest]


def check(source: str, kvant: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Refuses what cannot be served; returns the artifacts that the recipes need, found or made."""
    import transformers

    from kvant.calibrate.kept import kept_at
    from kvant.engines.fingerprint import fingerprint
    from kvant.engines.vllm import options
    from kvant.layout import Layout
    from kvant.models import load
    from kvant.shape import ModelShape

    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {args.model!r}: expected a Hugging Face directory or id, or smollm2; {first}"
        ) from error
    shape = ModelShape.of(config)
    if any(window is not None for window in shape.layers):
        raise ValueError(f"cannot serve {config.model_type} inside vLLM: it has layers with a sliding window")
    chosen = list(dict.fromkeys(_recipes(shape, kvant)))
    for recipe in chosen:
        options.check(recipe)
        Layout.of(recipe, shape.heads, shape.head_dim, options.PAGE_TOKENS)
    fitted = [recipe for recipe in chosen if recipe.calibrated]
    if not fitted:
        if args.artifact:
            raise ValueError(f"--artifact: recipe {chosen[0].name} takes no artifact")
        return []
    model, tokenizer = load(source, say=say)
    artifacts = artifacts_for(model, tokenizer, fitted, args)
    named = fingerprint(model)
    paths = []
    for recipe in fitted:
        artifact = artifacts[recipe.name]
        assert artifact is not None
        given = [path for path in args.artifact if options.Artifact.load(path).digest == artifact.digest]
        paths.append(os.path.abspath(given[0]) if given else str(kept_at(named, recipe)))
    return list(dict.fromkeys(paths))


def window_bytes(source: str, kvant: dict[str, Any]) -> int:
    """What a sequence's full-precision windows take in all layers."""
    import transformers

    from kvant.engines.vllm import options
    from kvant.layout import Layout
    from kvant.shape import ModelShape

    shape = ModelShape.of(transformers.AutoConfig.from_pretrained(source))
    layouts = (Layout.of(each, shape.heads, shape.head_dim, options.PAGE_TOKENS) for each in _recipes(shape, kvant))
    return sum(layout.overlay_bytes for layout in layouts)


def _recipes(shape: Any, kvant: dict[str, Any]) -> tuple[Recipe, ...]:
    """One for each layer."""
    from kvant.engines.vllm import options

    return options.per_layer(kvant.get("recipe"), kvant.get("layers"), len(shape.layers))


def _ranges(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'--layers: expected JSON such as {{"0-1": "int8", "2-": "oscar"}}: {error}') from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"--layers: expected ranges of layers with a recipe each, got {text}")
    return found


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
