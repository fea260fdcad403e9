"""kvant bench: how fast packed pages are read and written, against the best unquantized kernel at hand."""

from __future__ import annotations

import argparse
import dataclasses
import platform
from collections.abc import Callable
from typing import Any

from kvant.cli.common import check_writable, print_table, say, write_json


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed",
        description="Checks an operation against the reference on the same bytes, then times it and the best unquantized "
        "kernel of torch in the same run.",
    )
    parser.add_argument("work", choices=sorted(WORK), help="what to measure")
    parser.add_argument("--recipe", required=True, metavar="R[,R...]", help="recipes, or all")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--batch", default="8", metavar="B[,B...]", help="sequences (default 8)")
    parser.add_argument(
        "--context",
        default="8192",
        metavar="L[,L...]",
        help="tokens a sequence (default 8192), one for each --batch or for all",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="prefill, generate: new tokens of a sequence (default 512)",
    )
    parser.add_argument("--layers", type=int, default=36, help="generate: layers (default 36)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dim (default 128)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, bfloat16 elsewhere"
    )
    parser.add_argument("--implementation", metavar="NAME", help="default: the best that serves the recipe")
    parser.add_argument(
        "--repeat", type=int, default=20, metavar="N", help="timed runs; the median counts (default 20)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.set_defaults(run=run)


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {text!r}") from None
    if min(numbers) < 1:
        raise ValueError(f"{option} must be positive, got {text!r}")
    return numbers


def run(args: argparse.Namespace) -> int:
    import torch

    from kvant import recipes
    from kvant.bench.synthetic import Shape

    chosen = [recipes.get(name) for name in recipes.split(args.recipe)]
    check_writable(args.json, "--json")
    if args.device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {args.device!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    if min(args.repeat, args.new_tokens, args.layers) < 1:
        given = f"{args.repeat}, {args.new_tokens} and {args.layers}"
        raise ValueError(f"--repeat, --new-tokens and --layers must be positive, got {given}")
    batches, contexts = _numbers(args.batch, "--batch"), _numbers(args.context, "--context")
    count = max(len(batches), len(contexts))
    if {len(batches), len(contexts)} - {1, count}:
        raise ValueError(
            f"--batch and --context must name as many numbers, or one, got {args.batch} and {args.context}"
        )
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    shapes = [
        Shape(batches[i % len(batches)], contexts[i % len(contexts)], args.heads, args.kv_heads, args.head_dim, dtype)
        for i in range(count)
    ]
    torch.manual_seed(0)
    results = WORK[args.work](args, chosen, shapes, device)
    report = {
        "work": args.work,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "results": results,
    }
    if args.json:
        write_json(args.json, report)
    return 0


def _attention(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import attention

    results, rows = [], []
    for shape in shapes:
        full = attention.baseline(shape, device, args.repeat)
        for recipe in recipes:
            say(f"{recipe.name}, batch {shape.batch} x {shape.context}")
            found = attention.measure(recipe, shape, device, args.implementation, args.repeat)
            found = attention.compare(found, shape, full)
            results.append(dataclasses.asdict(found) | {"baselines": full})
            rows.append(
                [
                    recipe.name,
                    found.implementation,
                    f"{shape.batch} x {shape.context}",
                    f"{found.error:.1e}",
                    f"{found.seconds * 1e6:.1f}",
                    f"{found.bandwidth / 1e9:.0f}",
                    f"{found.times:.2f}",
                    f"{found.limit:.2f}",
                    f"{100 * found.share:.0f} %",
                    f"{found.baseline} {found.baseline_seconds * 1e6:.1f}",
                ]
            )
    names = ("recipe", "by", "batch x tokens", "error", "us", "GB/s", "times full", "limit", "share", "full, us")
    columns = [(name, "left" if i in (0, 1, 2, 9) else "right") for i, name in enumerate(names)]
    print_table("decode attention, one layer", columns, rows, "error: relative to the reference in float64, same bytes")
    return results


def _append(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import append

    copy = append.copy_bandwidth(device, args.repeat)
    results, rows = [], []
    for shape in shapes:
        for recipe in recipes:
            say(f"{recipe.name}, batch {shape.batch} x {shape.context}")
            found = append.measure(recipe, shape, device, args.implementation, args.repeat)
            found = dataclasses.replace(found, copy_bandwidth=copy, share=found.bandwidth / copy)
            results.append(dataclasses.asdict(found))
            rows.append(
                [
                    recipe.name,
                    found.implementation,
                    f"{shape.batch} x {shape.context}",
                    f"{found.error:.1e}",
                    f"{100 * found.differing:.4f} %",
                    f"{found.seconds * 1e6:.1f}",
                    f"{found.bandwidth / 1e9:.0f}",
                    f"{100 * found.share:.0f} %",
                ]
            )
    names = ("recipe", "by", "batch x tokens", "error", "other bytes", "us", "GB/s", "share of a copy")
    columns = [(name, "left" if i in (0, 1, 2) else "right") for i, name in enumerate(names)]
    caption = "error: what is decoded, relative to what the reference wrote; GB/s: read and written"
    print_table("append, one layer", columns, rows, caption)
    return results


def _prefill(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import prefill
    from kvant.layout import human_bytes

    results, rows = [], []
    for shape in shapes:
        for recipe in recipes:
            say(f"{recipe.name}, batch {shape.batch} x {shape.context}")
            found = prefill.measure(recipe, shape, device, args.implementation, args.repeat, args.new_tokens)
            results.append(dataclasses.asdict(found))
            rows.append(
                [
                    recipe.name,
                    found.implementation,
                    f"{shape.batch} x {shape.context} + {args.new_tokens}",
                    f"{found.error:.1e}",
                    f"{found.seconds * 1e3:.2f}",
                    human_bytes(found.workspace) if found.workspace else "-",
                    f"{found.baseline_seconds * 1e3:.2f}",
                    f"{found.times:.2f}",
                ]
            )
    names = ("recipe", "by", "batch x tokens", "error", "ms", "workspace", "full, ms", "times full")
    columns = [(name, "left" if i in (0, 1, 2) else "right") for i, name in enumerate(names)]
    caption = "error: relative to the reference in float64, same bytes; full: torch's fused attention, unquantized"
    print_table("prefill over packed history, one layer", columns, rows, caption)
    return results


def _generate(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import generate
    from kvant.layout import human_bytes

    results, rows = [], []
    model = generate.make_model(shapes[0], args.layers, device)
    for shape in shapes:
        for recipe in (None, *recipes):
            say(f"{recipe.name if recipe else 'transformers'}, batch {shape.batch} x {shape.context}")
            found = generate.measure(model, recipe, shape, args.new_tokens, args.implementation if recipe else None)
            results.append(dataclasses.asdict(found))
            rows.append(
                [
                    found.recipe,
                    found.implementations.get("decode", "sdpa"),
                    f"{shape.batch} x {shape.context} + {args.new_tokens}",
                    f"{found.error:.1e}",
                    f"{found.prefill_seconds:.2f}",
                    f"{found.tokens_per_second:.1f}",
                    human_bytes(found.cache_bytes),
                ]
            )
    names = ("cache", "by", "batch x tokens", "error", "prompt, s", "tokens/s", "cache")
    columns = [(name, "left" if i in (0, 1, 2) else "right") for i, name in enumerate(names)]
    print_table(
        f"generation, {args.layers} layers, random weights", columns, rows, "transformers: its own cache, unquantized"
    )
    return results


WORK: dict[str, Callable[[argparse.Namespace, list[Any], list[Any], Any], list[dict[str, Any]]]] = {
    "append": _append,
    "attention": _attention,
    "generate": _generate,
    "prefill": _prefill,
}
