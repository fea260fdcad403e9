"""kvant bench: how fast packed pages are read and written, compared with the fastest unquantized kernel of this machine."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from kvant.cli.artifact_options import add_artifact_options, artifacts_for
from kvant.cli.common import (
    add_json_file_option,
    check_threads,
    check_writable,
    print_table,
    processor,
    say,
    write_json,
)
from kvant.cli.parsers import tokens, tokens_list

RECIPES = "saw-int4,kvant-4,oscar,kvant-2"
IN_MEMORY = "saw-int4,oscar,kvant-2,kitty-pro"  # recipes of generation with equal memory
MEMORY = "24GiB"
CPU_SHAPES = ((9, 3, 64), (32, 8, 128))  # query heads, KV heads, head dim: SmolLM2-135M's and Qwen3-8B's


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        examples=(
            "kvant bench attention --recipe kvant-2,oscar --device cuda --batch 32 --context 32768",
            "kvant bench generate --recipe kvant-2 --context 4096",
        ),
        help="measure speed",
        description="Checks an operation against the reference on the same bytes, then times it and the fastest unquantized ones "
        "in the same run. Baselines that are ten times slower than the best are left out.",
    )
    parser.add_argument("work", choices=sorted(WORK), metavar="WORK", help=", ".join(sorted(WORK)))
    parser.add_argument(
        "--recipe",
        metavar="R[,R...]",
        help=f"recipes, or all (default {RECIPES})",
    )
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads (default 2)")
    parser.add_argument("--batch", metavar="B[,B...]", help="sequences (default 8; 1 on a CPU)")
    parser.add_argument(
        "--context",
        type=tokens_list,
        metavar="L[,L...]",
        help="tokens per sequence, 32k is 32768; one number or as many as --batch (default 8k)",
    )
    parser.add_argument(
        "--queries",
        metavar="N[,N...]",
        help="attention: queries of a sequence, as when drafts are verified",
    )
    parser.add_argument(
        "--new-tokens",
        type=tokens,
        metavar="N",
        help="prefill, generate: new tokens (default 512; --memory 128; --model 4)",
    )
    parser.add_argument(
        "--new",
        type=tokens_list,
        metavar="N[,N...]",
        help="prefill: several numbers of new tokens (default: --new-tokens)",
    )
    parser.add_argument("--sliding-window", type=tokens, metavar="N", help="prefill: a layer with a sliding window")
    parser.add_argument(
        "--model",
        metavar="M",
        help="generate: a real model (default: smollm2; on a GPU random weights)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="generate, random weights: layers (default 36)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help=f"generate, random weights: memory that every cache fills (GPU: {MEMORY})",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="generate, random weights: tokens/s and peak memory of every --batch",
    )
    parser.add_argument(
        "--prefill",
        action="store_true",
        help="--memory, --sweep: prefill with the model (default: random keys and values)",
    )
    parser.add_argument("--heads", type=int, metavar="N", help="query heads (default 32; on a CPU 9 and 32)")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="KV heads (default 8; on a CPU 3 and 8)")
    parser.add_argument("--head-dim", type=int, metavar="N", help="head dim (default 128; on a CPU 64 and 128)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        metavar="T",
        help="float32 (default on a CPU), bfloat16 (default elsewhere) or float16",
    )
    parser.add_argument(
        "--implementation", metavar="NAME", help="an implementation of kvant doctor --all (default: the best)"
    )
    parser.add_argument(
        "--folded",
        action="store_true",
        help="without value transforms, as for a model of kvant fold",
    )
    parser.add_argument(
        "--repeat", type=int, default=20, metavar="N", help="timed runs; the median counts (default 20)"
    )
    add_artifact_options(parser)
    add_json_file_option(parser)
    parser.set_defaults(run=run)


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {text!r}") from None
    if min(numbers) < 1:
        raise ValueError(f"{option} must be positive, got {text!r}")
    return numbers


def _shapes(args: argparse.Namespace) -> list[Any]:
    """The shapes that the options describe."""
    from kvant.bench.synthetic import Shape

    cpu = args.device == "cpu"
    default = {"attention": [16384], "append": [1, 2048], "generate": [4096, 8192]}.get(args.work, [8192])
    if args.memory or args.sweep:  # which take one
        default = [8192]
    batches = _numbers(args.batch or ("1" if cpu else "8"), "--batch")
    contexts = args.context or (default if cpu else [8192])
    count = max(len(batches), len(contexts))
    if {len(batches), len(contexts)} - {1, count}:
        raise ValueError(
            f"--batch and --context must have the same number of entries, or one; got {len(batches)} and {len(contexts)}"
        )
    given = args.heads, args.kv_heads, args.head_dim
    heads = [(args.heads or 32, args.kv_heads or 8, args.head_dim or 128)]
    if cpu and not any(given):
        heads = list(CPU_SHAPES)
    dtype = args.dtype or ("float32" if cpu else "bfloat16")
    return [
        Shape(batches[i % len(batches)], contexts[i % len(contexts)], *each, dtype)
        for each in heads
        for i in range(count)
    ]


def _folded(recipe: Any) -> Any:
    from kvant.engines.fold import without_transforms

    if not recipe.value.transforms:
        say(f"recipe {recipe.name} has no value transforms to fold: it is timed as it is")
        return recipe
    return dataclasses.replace(without_transforms(recipe), name=f"{recipe.name}, folded")


def run(args: argparse.Namespace) -> int:
    import torch

    from kvant import recipes
    from kvant.artifact import Artifact
    from kvant.recipe import MixedRecipe

    chosen = [recipes.get(name) for name in recipes.split(args.recipe or (IN_MEMORY if _in_memory(args) else RECIPES))]
    mixed = [recipe for path in args.artifact if isinstance(recipe := Artifact.load(path).recipe, MixedRecipe)]
    if mixed:  # those of kvant tune: a whole model has the mixed recipe, attention of one layer has that of the layer
        each = mixed if args.work == "generate" else [own for recipe in mixed for own in recipe.recipes]
        chosen = list(dict.fromkeys([*(chosen if args.recipe else ()), *each]))
    check_writable(args.json, "--json")
    if args.device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {args.device!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    for name in ("repeat", "threads", "layers", "heads", "kv_heads", "head_dim"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    check_threads(args.threads)
    if args.folded:
        if args.work == "generate":
            raise ValueError(
                "--folded is for attention, append and prefill: a model's generation would need folded weights"
            )
        if not any(recipe.value.transforms for recipe in chosen):
            names = ", ".join(recipe.name for recipe in chosen)
            raise ValueError(f"--folded: recipe {names} has no value transforms to fold")
        chosen = [_folded(recipe) for recipe in chosen]
    if args.queries and args.work != "attention":
        raise ValueError("--queries is for attention: how many queries of a sequence a call decodes")
    if args.sliding_window and args.work != "prefill":
        raise ValueError("--sliding-window is for prefill")
    if args.memory and (args.work != "generate" or args.batch or args.model):
        raise ValueError(
            "--memory is for generate with random weights and without --batch: the batch is the largest that fits"
        )
    if args.sweep and (args.work != "generate" or not args.batch or args.memory or args.model):
        raise ValueError("--sweep is for generate with random weights and --batch, without --memory and --model")
    device, before = torch.device(args.device), torch.get_num_threads()
    shapes = _shapes(args)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    try:
        results = WORK[args.work](args, chosen, shapes, device)
    finally:
        torch.set_num_threads(before)
    _write(args, device, results)
    return 0


def _write(args: argparse.Namespace, device: Any, results: list[dict[str, Any]]) -> None:
    """Writes the JSON report, if --json is given."""
    import torch

    report = {"work": args.work, "device": _machine(device), "torch": torch.__version__, "results": results}
    if device.type == "cpu":
        report["threads"] = args.threads
    if args.json:
        write_json(args.json, report)


def _in_memory(args: argparse.Namespace) -> bool:
    """Whether generation is measured with equal memory."""
    on_gpu = args.device == "cuda" and not args.model and not args.batch
    return args.work == "generate" and (on_gpu or args.memory is not None)


def _machine(device: Any) -> str:
    import torch

    from kvant.ops.cpu import library

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {library.kinds()[library.isa()] if library.kinds() else 'no compiled operations'}"


def _table(title: str, columns: str, rows: Iterable[list[str]], caption: str) -> None:
    """Prints a table. `columns`: headings separated by " | "; those that begin with < are left-aligned."""
    names = columns.split(" | ")
    sides = [(name.removeprefix("<"), "left" if name.startswith("<") else "right") for name in names]
    print_table(title, sides, list(rows), caption)


def _spread(low: float, high: float, digits: int = 1) -> str:
    return f"{low:.{digits}f}-{high:.{digits}f}"


def _attention(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import attention

    if args.queries:
        return _verify(args, recipes, shapes, device)
    results = []
    for shape in shapes:
        say(f"{', '.join(recipe.name for recipe in recipes)}: {shape}")
        found = attention.measure(recipes, shape, device, args.implementation, args.repeat, say)
        results += [dataclasses.asdict(result) for result in found]
        rows = [
            [
                each.name,
                each.implementation,
                f"{each.error:.1e}",
                f"{each.seconds * 1e6:.0f}",
                _spread(each.low * 1e6, each.high * 1e6, 0),
                f"{each.bandwidth / 1e9:.1f}",
                f"{each.times:.2f}",
                f"{each.limit:.2f}",
            ]
            for each in found
        ]
        columns = "<cache | <by | error | us | quartiles | GB/s | times full | limit"
        caption = (
            f"error: relative to float64 on the same bytes; times full: speed relative to {found[0].baseline}, the fastest over a "
            "full cache; limit: ratio of the bytes read"
        )
        _table(f"decode attention, one layer, {shape}", columns, rows, caption)
    return results


def _verify(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    """Attention of several queries a sequence."""
    from kvant.bench import attention

    counts, results = _numbers(args.queries, "--queries"), []
    for shape in shapes:
        rows = []
        for recipe in recipes:
            say(f"{recipe.name}: {shape}, queries of a sequence: {args.queries}")
            found = attention.verify(recipe, shape, device, counts, args.implementation, args.repeat)
            results += [dataclasses.asdict(each) for each in found]
            rows += [
                [
                    each.name,
                    each.implementation,
                    str(each.queries),
                    f"{each.error:.1e}",
                    f"{each.seconds * 1e6:.0f}",
                    _spread(each.low * 1e6, each.high * 1e6, 0),
                    f"{each.times_one:.2f}",
                ]
                for each in found
            ]
        columns = "<recipe | <by | queries | error | us | quartiles | times the fewest"
        caption = "error: relative to float64 on the same bytes; times the fewest: time relative to the fewest queries"
        _table(f"decode of several queries a sequence, one layer, {shape}", columns, rows, caption)
    return results


def _append(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import append

    results = []
    for shape in shapes:
        say(f"{', '.join(recipe.name for recipe in recipes)}: {shape}")
        found = append.measure(recipes, shape, device, args.implementation, args.repeat)
        results += [dataclasses.asdict(result) for result in found]
        rows = [
            [
                each.recipe,
                each.implementation,
                f"{each.error:.1e}",
                f"{100 * each.differing:.4f} %",
                f"{each.seconds * 1e6:.1f}",
                _spread(each.low * 1e6, each.high * 1e6),
                f"{each.bandwidth / 1e9:.2f}",
                f"{100 * each.share:.0f} %",
            ]
            for each in found
        ]
        columns = "<recipe | <by | error | other bytes | us | quartiles | GB/s | share of a copy"
        caption = "error: of the decoded tokens, relative to those that the reference wrote; GB/s: read and written"
        _table(f"append, one layer, {shape}", columns, rows, caption)
    return results


def _prefill(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    from kvant.bench import prefill
    from kvant.layout import human_bytes

    counts = args.new or [args.new_tokens or 512]
    results = []
    for shape, new_tokens in itertools.product(shapes, counts):
        rows = []
        for recipe in recipes:
            say(f"{recipe.name}: {shape} + {new_tokens}")
            found = prefill.measure(
                recipe, shape, device, args.implementation, args.repeat, new_tokens, args.sliding_window
            )
            results.append(dataclasses.asdict(found))
            rows.append(
                [
                    recipe.name,
                    found.implementation,
                    f"{found.error:.1e}",
                    f"{found.seconds * 1e3:.2f}",
                    human_bytes(found.workspace) if found.workspace else "-",
                    ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in found.baselines.items()),
                    f"{found.times:.2f}",
                ]
            )
        columns = "<recipe | <by | error | ms | workspace | full, ms | times full"
        caption = (
            "error: relative to the reference in float64, same bytes; full: torch's fused attentions, unquantized, the "
            "fastest of which counts"
        )
        window = f", window of {args.sliding_window}" if args.sliding_window else ""
        _table(f"prefill over packed history, one layer, {shape} + {new_tokens}{window}", columns, rows, caption)
    return results


def _generate(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    if _in_memory(args):
        return _equal_memory(args, recipes, shapes, device)
    if args.sweep:
        return _sweep(args, recipes, shapes, device)
    shaped = any((args.heads, args.kv_heads, args.head_dim, args.layers))
    if args.model or not (shaped or device.type == "cuda"):
        return _real_model(args, recipes, sorted({shape.context for shape in shapes}), device)
    return _random(args, recipes, shapes if shaped or device.type == "cuda" else shapes[:1], device)


def _random(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    """Generation with random weights of a given shape."""
    from kvant.bench import generate
    from kvant.layout import human_bytes

    layers, new_tokens = args.layers or 36, args.new_tokens or 512
    results, rows = [], []
    model = generate.make_model(shapes[0], layers, device)
    for shape in shapes:
        for recipe in (None, *recipes):
            say(f"{recipe.name if recipe else 'transformers'}: {shape} + {new_tokens}")
            found = generate.measure(model, recipe, shape, new_tokens, args.implementation if recipe else None)
            results.append(dataclasses.asdict(found))
            rows.append(
                [
                    found.recipe,
                    found.implementations.get("decode", "sdpa"),
                    f"{shape.batch} x {shape.context} + {new_tokens}",
                    f"{found.error:.1e}",
                    f"{found.prefill_seconds:.2f}",
                    f"{found.tokens_per_second:.1f}",
                    human_bytes(found.cache_bytes),
                ]
            )
    columns = "<cache | <by | <batch x tokens | error | prompt, s | tokens/s | cache"
    _table(f"generation, {layers} layers, random weights", columns, rows, "transformers: its own cache, unquantized")
    return results


def _equal_memory(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    """Generation with random weights of a given shape, with the largest batch that each cache holds in the same memory."""
    from kvant.bench import generate, memory
    from kvant.layout import human_bytes
    from kvant.plan import parse_bytes

    layers, new_tokens, shape = args.layers or 36, args.new_tokens or 128, shapes[-1]
    if len({each.context for each in shapes}) > 1:
        raise ValueError(f"--memory takes one --context, got {', '.join(map(str, args.context))}")
    room = parse_bytes(args.memory or MEMORY)
    work = memory.Work(shape, layers, new_tokens, room, args.prefill, args.implementation)
    work.check()
    say(f"making a Qwen3 of {layers} layers with random weights")
    model = generate.make_model(shape, layers, device, memory.VOCABULARY)

    def done(found: list[memory.Result]) -> None:
        _write(args, device, [dataclasses.asdict(each) for each in found])

    results = memory.measure(model, recipes, work, say, done)
    fits = {each.cache: each.batch for each in results if each.largest}
    errors = [each.error for each in results if each.cache in {recipe.name for recipe in recipes}]
    rows = [
        [
            each.cache,
            f"{each.by}, {'graph' if each.graph else 'eager'}" if each.by else "-",
            str(fits[each.cache]),
            str(each.batch),
            human_bytes(each.cache_bytes),
            f"{each.step * 1e3:.2f}" if each.step else "-",
            f"{each.tokens_per_second:.0f}" if each.step else "failed",
            f"{each.times:.2f}" if each.times else "-",
        ]
        for each in results
    ]
    caption = (
        f"fits: the largest batch in {human_bytes(room)}; times: tokens/s over those of full, an unquantized cache that is written "
        "in place and read by the fastest of torch's kernels; DynamicCache, StaticCache: as transformers runs them. Decode of "
        f"recipes is within {max(errors, default=0.0):.1e} of float64 on the same bytes. Prompts: "
        + ("prefilled by the model" if args.prefill else "random keys and values, not prefilled")
    )
    columns = "<cache | <by | fits | batch | size | ms a step | tokens/s | times"
    heads = f"{shape.heads}/{shape.kv_heads} x {shape.head_dim}"
    title = f"decode, {layers} layers of {heads}, random weights, {shape.context} + {new_tokens} tokens"
    _table(title, columns, rows, caption)
    for name, reason in {each.cache: each.reason for each in results if each.reason}.items():
        print(f"{name} ran without a graph: {reason}")
    found = [dataclasses.asdict(each) for each in results]
    failed = [f"{each.cache} at batch {each.batch}: {each.failed}" for each in results if each.failed]
    if failed:
        _write(args, device, found)
        raise ValueError("could not be measured: " + "; ".join(failed))
    return found


def _sweep(args: argparse.Namespace, recipes: list[Any], shapes: list[Any], device: Any) -> list[dict[str, Any]]:
    """Generation with random weights at every batch: tokens per second and peak memory."""
    from kvant.bench import generate, memory
    from kvant.layout import human_bytes

    layers, new_tokens, shape = args.layers or 36, args.new_tokens or 128, shapes[-1]
    if len({(each.context, each.heads, each.kv_heads, each.head_dim) for each in shapes}) > 1:
        raise ValueError("--sweep takes one --context and one shape of heads")
    work = memory.Work(shape, layers, new_tokens, 0, args.prefill, args.implementation)
    say(f"making a Qwen3 of {layers} layers with random weights")
    model = generate.make_model(shape, layers, device, memory.VOCABULARY)

    def done(found: list[memory.Result]) -> None:
        _write(args, device, [dataclasses.asdict(each) for each in found])

    results = memory.sweep(model, recipes, work, sorted({each.batch for each in shapes}), say, done)
    rows = [
        [
            str(each.batch),
            each.cache,
            f"{each.by}, {'graph' if each.graph else 'eager'}" if each.by else "-",
            human_bytes(each.cache_bytes) if each.cache_bytes else "-",
            human_bytes(each.peak_bytes) if each.peak_bytes else "-",
            f"{each.step * 1e3:.2f}" if each.step else "-",
            f"{each.tokens_per_second:.0f}" if each.step else "out of memory" if each.out_of_memory else "failed",
            f"{each.times:.2f}" if each.times else "-",
        ]
        for each in results
    ]
    caption = (
        "cache: bytes of the cache; peak: most bytes that were allocated at once, weights included; times: tokens/s over those of "
        "full at the same batch. Prompts: "
        + ("prefilled by the model" if args.prefill else "random keys and values, not prefilled")
    )
    heads = f"{shape.heads}/{shape.kv_heads} x {shape.head_dim}"
    title = f"decode, {layers} layers of {heads}, random weights, {shape.context} + {new_tokens} tokens"
    _table(title, "batch | <cache | <by | cache | peak | ms a step | tokens/s | times", rows, caption)
    for name, reason in {each.cache: each.reason for each in results if each.reason}.items():
        print(f"{name} ran without a graph: {reason}")
    found = [dataclasses.asdict(each) for each in results]
    failed = [f"{r.cache} at batch {r.batch}: {r.failed}" for r in results if r.failed and not r.out_of_memory]
    if failed:
        _write(args, device, found)
        raise ValueError("could not be measured: " + "; ".join(failed))
    return found


def _real_model(args: argparse.Namespace, recipes: list[Any], contexts: list[int], device: Any) -> list[dict[str, Any]]:
    """Generation with a real model, compared with other caches."""
    import torch

    from kvant import models
    from kvant.bench import caches
    from kvant.bench.generate import check
    from kvant.bench.synthetic import Shape
    from kvant.layout import human_bytes
    from kvant.shape import ModelShape

    if device.type != "cpu":
        raise ValueError(
            "bench generate --model runs on a CPU only; on a GPU leave --model out to measure random weights"
        )
    if args.batch not in (None, "1"):
        raise ValueError(f"bench generate --model takes one sequence, got --batch {args.batch}")
    name, new_tokens = args.model or models.SMOLLM2, args.new_tokens or 4
    model, tokenizer = models.load(name, args.dtype, args.device, say)
    shape = ModelShape.of(model)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    for recipe in dict.fromkeys(recipe.at(layer) for recipe in recipes for layer in range(len(shape.layers))):
        check(
            recipe, Shape(1, contexts[0], heads, shape.heads, shape.head_dim, shape.dtype), device, args.implementation
        )
    artifacts = artifacts_for(model, tokenizer, recipes, args)
    room = args.repeat * new_tokens
    gguf = (lambda: models.smollm2_gguf(say)) if name == models.SMOLLM2 else None
    readers, missing = caches.contenders(model, recipes, artifacts, args.implementation, contexts[-1] + room, gguf)
    tokens = torch.randint(0, model.config.vocab_size, (contexts[-1] + room,)).tolist()
    found = caches.measure(readers, tokens, contexts, new_tokens, args.repeat, say)
    for context in contexts:
        rows = [
            [
                each.name,
                each.by,
                f"{each.prompt_seconds:.1f}",
                f"{each.tokens_per_second:.1f}",
                _spread(each.low, each.high),
                f"{each.times:.2f}",
                "-" if each.append is None else f"{100 * each.append:.1f} %",
                "-" if each.decode is None else f"{100 * each.decode:.1f} %",
                human_bytes(each.cache_bytes) if each.cache_bytes else "-",
            ]
            for each in found
            if each.context == context
        ]
        columns = "<cache | <by | prompt, s | tokens/s | quartiles | times | append | decode | size"
        caption = "times: speed relative to DynamicCache; append, decode: their share of a step"
        if any(isinstance(reader, caches.OfLlama) for reader in readers):
            caption += "; llama.cpp's weights are of 4 bits, the others' " + shape.dtype
        _table(f"generation, {name}, {context} tokens, {args.threads} threads", columns, rows, caption)
    for each, reason in missing.items():
        print(f"{each}: {reason}")
    return [dataclasses.asdict(each) for each in found] + [{"name": k, "missing": v} for k, v in missing.items()]


WORK: dict[str, Callable[[argparse.Namespace, list[Any], list[Any], Any], list[dict[str, Any]]]] = {
    "append": _append,
    "attention": _attention,
    "generate": _generate,
    "prefill": _prefill,
}
