"""Throughput inside vLLM, kvant's recipes side by side with vLLM's own caches: one run, one process for each cache.

    python scripts/vllm_bench.py --recipe saw-int4,kvant-2,oscar --against bf16,fp8,int4_per_token_head \\
        --work 64x8192+256,32x8192+1024 --kv-gib 24 [--json FILE]
    python scripts/vllm_bench.py --tiny                     on a CPU, a few seconds each: does it run at all?

The model is Qwen3-8B's shape with dummy weights, so nothing is downloaded. Artifacts are fitted to random vectors: they decide
bytes and speed, not quality. `--kv-gib` is pages and windows together: what a recipe's windows take, its pages do not get.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

OWN = {  # vLLM's own caches: dtype of the cache, attention backend
    "bf16": ("auto", "FLASH_ATTN"),
    "fp8": ("fp8", "FLASH_ATTN"),
    "int4_per_token_head": ("int4_per_token_head", "TRITON_ATTN"),
    "cpu": ("auto", None),
}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
}


class Work(NamedTuple):
    """So many requests, tokens of their prompts and tokens of their answers. 0 requests: as many as the cache holds at once."""

    num: int
    prompt: int
    answer: int

    @staticmethod
    def of(text: str) -> Work:
        """From "64x8192+256", or "fitx100000+512"."""
        num, _, lengths = text.partition("x")
        prompt, _, answer = lengths.partition("+")
        try:
            found = Work(0 if num == "fit" else int(num), int(prompt), int(answer))
        except ValueError:
            found = Work(0, 0, 0)
        if min(found[1:]) < 1 or (found.num < 1 and num != "fit"):
            raise argparse.ArgumentTypeError(
                f"work must be REQUESTSxPROMPT+ANSWER such as 64x8192+256 or fitx100000+512, got {text!r}"
            )
        return found

    def __str__(self) -> str:
        return f"{self.num or 'fit'}x{self.prompt}+{self.answer}"


def several(text: str) -> list[Work]:
    return [Work.of(part) for part in text.split(",")]


def config(tiny: bool, layers: int, longest: int) -> dict[str, Any]:
    """Qwen3-8B, or something of its kind that a CPU runs in a moment."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "vocab_size": 151936}
    if tiny:
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"head_dim": 64, "vocab_size": 1024}
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "max_position_embeddings": max(40960, longest),
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32" if tiny else "bfloat16",
        **sizes,
    }


def artifact_for(recipe: Any, model: dict[str, Any], directory: Path) -> str:
    """An artifact of the right shapes, the same for every layer."""
    from kvant.artifact import Artifact
    from kvant.bench.synthetic import Shape, fitted

    heads, dim, layers = model["num_key_value_heads"], model["head_dim"], model["num_hidden_layers"]
    tensors = fitted(recipe, Shape(1, 1, model["num_attention_heads"], heads, dim), "cpu")
    copies = {layer: {name: tensor.clone() for name, tensor in tensors.items()} for layer in range(layers)}
    Artifact(recipe, heads, dim, layers, copies).save(directory)
    return str(directory)


def measure(cache: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cache, in this process."""
    works: list[Work] = args.work[:1] if cache in args.first_only.split(",") else args.work
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    longest = -(-max(work.prompt + work.answer for work in args.work) // 256) * 256
    model = config(args.tiny, args.layers, longest)
    folder = Path(tempfile.mkdtemp(prefix="vllm_bench_"))
    (folder / "config.json").write_text(json.dumps(model))
    memory, windows = int(args.kv_gib * 2**30), 0
    options: dict[str, Any] = {}
    if cache in OWN:
        dtype, backend = OWN[cache]
        options["kv_cache_dtype"] = dtype
        if backend is not None:
            options["attention_config"] = {"backend": backend}
    else:
        import kvant.engines.vllm
        from kvant import recipes
        from kvant.layout import Layout

        kvant.engines.vllm.register()  # where kvant is on the path and not installed, vLLM does not find it
        recipe = recipes.get(cache)
        given: dict[str, Any] = {"recipe": cache, "spare_overlay_rows": args.spare_overlay_rows}
        if recipe.calibrated:
            given["artifact"] = artifact_for(recipe, model, folder / "artifact")
        options["attention_config"] = {"backend": "CUSTOM"}
        options["additional_config"] = {"kvant": given}
        layout = Layout.of(recipe, model["num_key_value_heads"], model["head_dim"], dtype=model["torch_dtype"])
        windows = args.layers * (args.max_num_seqs + args.spare_overlay_rows + 1) * layout.overlay_bytes
        if windows >= memory:
            raise SystemExit(
                f"{cache}: the overlays of {args.max_num_seqs} sequences take more than --kv-gib {args.kv_gib}"
            )
    if args.eager or args.tiny:
        options["enforce_eager"] = True
    elif not args.compile:  # whole-model CUDA graphs for decode, no torch.compile
        sizes = [1, 2, 4, *range(8, args.max_num_seqs + 1, 8)]
        sizes = sorted({*sizes, args.max_num_seqs})
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version

    if args.wait:  # its turn comes when the others have imported, too, and those before it are done
        print("READY", flush=True)
        sys.stdin.readline()
    begin = time.perf_counter()
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=model["torch_dtype"],
        max_model_len=longest,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_batched_tokens,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=memory - windows,
        **({} if args.tiny else {"gpu_memory_utilization": 0.9}),
        **options,
    )
    started = time.perf_counter() - begin
    draw = random.Random(args.seed)
    cache_config = llm.llm_engine.vllm_config.cache_config
    fit = cache_config.num_gpu_blocks * cache_config.block_size

    def counted(work: Work) -> Work:
        """With the number of requests that fit."""
        whole = -(-(work.prompt + work.answer) // cache_config.block_size) * cache_config.block_size
        return work if work.num else work._replace(num=max(1, min(args.max_num_seqs, fit // whole)))

    def generate(work: Work) -> float:
        ids = [[draw.randrange(3, model["vocab_size"]) for _ in range(work.prompt)] for _ in range(work.num)]
        settings = SamplingParams(temperature=0.0, max_tokens=work.answer, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": each} for each in ids], settings, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(each.outputs[0].token_ids) for each in found)
        assert made == work.num * work.answer, f"{made} tokens came, {work.num * work.answer} were asked for"
        return seconds

    first = counted(args.work[0])
    generate(Work(min(4, first.num), min(first.prompt, 8192), min(8, first.answer)))  # warms up
    seconds = {str(work): [generate(counted(work)) for _ in range(args.repeat)] for work in works}
    import torch

    return {
        "cache": cache,
        "tokens_that_fit": fit,
        "requests": {str(w): counted(w).num for w in works},
        "output_tokens_per_second": {str(w): counted(w).num * w.answer / min(seconds[str(w)]) for w in works},
        "seconds": {name: [round(x, 3) for x in times] for name, times in seconds.items()},
        "window_gib": round(windows / 2**30, 2),
        "start_seconds": round(started, 1),
        "vllm": version,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def start(cache: str) -> subprocess.Popen[str]:
    """A process of its own for a cache, which leaves no memory behind. It imports what it needs and waits."""
    command = [sys.executable, __file__, "--one", cache, "--wait", *sys.argv[1:]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it is ready, or has ended."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("READY"):
            break
    return lines


def finish(cache: str, process: subprocess.Popen[str], said: list[str]) -> dict[str, Any]:
    """Gives a process its turn."""
    out, _ = process.communicate("go\n") if process.poll() is None else ("", None)
    said += out.splitlines(keepends=True)
    lines = [line for line in said if line.startswith("RESULT ")]
    if process.returncode or not lines:
        print("".join(said)[-4000:], file=sys.stderr)
        return {"cache": cache, "failed": process.returncode}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="saw-int4,kvant-2,oscar", help="recipes of kvant")
    parser.add_argument(
        "--against", help=f"vLLM's own caches: {', '.join(OWN)} (default: all but cpu; cpu with --tiny)"
    )
    parser.add_argument(
        "--work",
        type=several,
        default=several("64x8192+256"),
        metavar="NxP+A[,...]",
        help="requests (fit: as many as the cache holds at once, and --max-num-seqs), tokens of prompts and of answers (default "
        "64x8192+256); several in turn on one engine",
    )
    parser.add_argument("--kv-gib", type=float, default=24.0, help="cache, pages and windows together")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--spare-overlay-rows", "--spare-windows", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="vLLM's default torch.compile and CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a small model in float32, for a CPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--first-only", default="", metavar="CACHE[,...]", help="caches that get the first work alone")
    parser.add_argument("--one", metavar="CACHE", help="only this cache, in this process")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.work, args.kv_gib, args.max_num_seqs = 2, several("4x100+8,fitx50+4"), 0.03, 4
    if args.one:
        print("RESULT " + json.dumps(measure(args.one, args)), flush=True)
        return 0
    from kvant.recipes import split

    own = (args.against or ("cpu" if args.tiny else "bf16,fp8,int4_per_token_head")).split(",")
    unknown = sorted(set(own) - set(OWN))
    if unknown:
        parser.error(f"--against: unknown {', '.join(unknown)}; known: {', '.join(OWN)}")
    results: list[dict[str, Any]] = []
    processes = {cache: start(cache) for cache in [*own, *split(args.recipe)]}
    said = {cache: ready(process) for cache, process in processes.items()}
    for cache, process in processes.items():
        print(f"measuring {cache}", file=sys.stderr, flush=True)
        results.append(finish(cache, process, said[cache]))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        if args.json:
            given = {name: str(value) for name, value in vars(args).items()}
            Path(args.json).write_text(json.dumps({"arguments": given, "results": results}, indent=2) + "\n")
    for work in map(str, args.work):
        first = results[0].get("output_tokens_per_second", {}).get(work)
        print(
            f"\n{work}\n\n| cache | tokens that fit | requests | output tokens/s | against {own[0]} |\n|---|---|---|---|---|"
        )
        for found in results:
            if "failed" in found:
                print(f"| {found['cache']} | failed ({found['failed']}) | | | |")
                continue
            rate = found["output_tokens_per_second"].get(work)
            if rate is None:
                continue
            against = f"{rate / first:.2f}" if first else ""
            print(
                f"| {found['cache']} | {found['tokens_that_fit']:,} | {found['requests'][work]} | {rate:.1f} | {against} |"
            )
    return int(any("failed" in found for found in results))


if __name__ == "__main__":
    sys.exit(main())
