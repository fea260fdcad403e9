"""kvant plan: how many tokens and requests fit into memory, from a model's config alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvant.cli.common import DEFAULT_RECIPE, add_json_option, print_table
from kvant.cli.parsers import tokens


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        examples=(
            "kvant plan --model qwen3-8b --recipe kvant-2,kvant-4 --memory 40GiB --context 32k",
            "kvant plan --model llama-3.1-70b --tensor-parallel 4",
        ),
        help="compute how many tokens and requests fit into memory",
        description="Computes how many tokens and requests fit into memory, compared with a 16-bit and an 8-bit cache. Needs only "
        "the model's config, no weights.",
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="M",
        help="a preset (see --presets), a Hugging Face directory or id, a .gguf file, or smollm2 (default)",
    )
    parser.add_argument(
        "--recipe", default=DEFAULT_RECIPE, metavar="R[,R...]", help=f"one or more recipes (default {DEFAULT_RECIPE})"
    )
    parser.add_argument(
        "--memory",
        default="80GiB",
        metavar="SIZE",
        help="memory for the cache on one device, such as 24GiB or 24GB (default 80GiB)",
    )
    parser.add_argument(
        "--context",
        type=tokens,
        default=8192,
        metavar="N",
        help="tokens of a request, such as 8192, 32k or 1M (k = 1024, M = 1024k; default 8192)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="devices over which the KV heads are split (default 1)",
    )
    parser.add_argument(
        "--dtype",
        metavar="T",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the model (default: that of its config)",
    )
    parser.add_argument("--presets", action="store_true", help="list the presets")
    add_json_option(parser)
    parser.set_defaults(run=run)


def find(name: str) -> Any:
    """A preset, or the config of a model. No weights are read."""
    from kvant import models
    from kvant.plan import PRESETS

    if name.lower() in PRESETS:
        return name
    if name == models.SMOLLM2:
        return "smollm2-135m"
    preset = name.lower().rpartition("/")[2]
    known = f"the preset {preset}, which needs no files" if preset in PRESETS else f"a preset ({', '.join(PRESETS)})"
    config = models.config_of(name, expected=f"a Hugging Face directory or id, a .gguf file, or {known}")
    _check_class(config)
    return config


def _check_class(config: Any) -> None:
    """Refuses a model class that kvant cannot serve, which the shape alone does not show."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from kvant.shape import STATE_LAYERS, attends_by_interface

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or ()
    hybrid = bool({*STATE_LAYERS} & {*(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())})
    if any(not attends_by_interface(each, hybrid) for each in (found if isinstance(found, tuple) else (found,))):
        raise ValueError(
            f"cannot serve {config.model_type}: its attention does not go through transformers' AttentionInterface"
        )


def run(args: argparse.Namespace) -> int:
    from kvant import recipes
    from kvant.layout import human_bytes
    from kvant.plan import PRESETS, plan

    if args.presets:
        if args.json:
            found = {
                name: {"layers": len(s.layers), "kv_heads": s.heads, "head_dim": s.head_dim}
                for name, s in PRESETS.items()
            }
            print(json.dumps({"presets": found}, indent=2))
            return 0
        columns = [("preset", "left"), ("layers", "right"), ("KV heads", "right"), ("head dim", "right")]
        rows = [[name, str(len(s.layers)), str(s.heads), str(s.head_dim)] for name, s in PRESETS.items()]
        print_table("", columns, rows)
        return 0
    model = find(args.model)
    plans = [
        plan(model, name, args.memory, args.context, tensor_parallel=args.tensor_parallel, dtype=args.dtype)
        for name in recipes.split(args.recipe)
    ]
    if args.json:
        print(json.dumps({"model": args.model, "plans": [each.to_dict() for each in plans]}, indent=2))
        return 0
    first = plans[0]
    columns = [("cache", "left"), ("bits", "right"), ("bytes/token", "right"), ("longest", "right")]
    columns += [(f"requests of {first.context:,}", "right"), ("against bf16", "right"), ("against fp8", "right")]
    rows = []
    for kind in (first.bf16, first.fp8, *(each.recipe for each in plans)):
        against = [
            f"{kind.requests / other.requests:.2f}x" if other.requests else "-" for other in (first.bf16, first.fp8)
        ]
        per_token = f"{kind.bytes_per_token:,.0f}"
        rows.append([kind.recipe, f"{kind.bits:.3f}", per_token, f"{kind.tokens:,}", f"{kind.requests:,}", *against])
    devices = "one device" if first.tensor_parallel == 1 else f"each of {first.tensor_parallel} devices"
    notes = [
        f"{args.model}: {human_bytes(first.memory)} for the cache of {devices}, with {first.kv_heads} KV heads; "
        "weights are not counted",
        "bits per cached number of a full page; longest: tokens of one sequence that has all of the memory",
    ]
    windows = ", ".join(
        f"{each.recipe.recipe} {human_bytes(each.recipe.sequence_bytes)}"
        for each in plans
        if each.recipe.sequence_bytes
    )
    if windows:
        notes.append(f"windows of a request (first and recent tokens), counted: {windows}")
    sinks = ", ".join(
        f"{each.recipe.recipe} {human_bytes(each.recipe.sink_rows * each.recipe.sink_bytes)}"
        for each in plans
        if each.recipe.sink_rows
    )
    if sinks:
        notes.append(f"first tokens of cached prefixes in a server, not counted: {sinks}")
    print_table("", columns, rows, "\n".join(notes))
    return 0
