"""kvant lm-eval: lm-evaluation-harness with the model "kvant".

The harness knows its models by a list of its own and looks for no plugins, so that somebody has to register ours before it starts.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "lm-eval",
        examples=(
            "kvant lm-eval --model kvant --model_args pretrained=smollm2,recipe=kvant-4 --tasks arc_easy",
            "kvant lm-eval run --help",
        ),
        help="lm-evaluation-harness with the model kvant",
        description='Registers the model "kvant" and starts lm-evaluation-harness with all arguments as they are. Of the model: '
        "pretrained=M, recipe=R, artifact=DIR, calibration_text=FILE, graph=False, and all of --model hf.",
        usage="kvant lm-eval [run | ls | validate] [options of lm_eval]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.set_defaults(run=functools.partial(run, parser), passes_on=True)


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if not args.rest or args.rest[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    if importlib.util.find_spec("lm_eval") is None:
        raise ModuleNotFoundError("kvant lm-eval needs lm-evaluation-harness: pip install 'kvant[lm-eval]'")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "kvant" not in model_registry:  # by name: torch and transformers are imported where a model is asked for
        model_registry.register("kvant", target="kvant.eval.harness:KvantLM")
    before = sys.argv
    sys.argv = ["lm_eval", *args.rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
