"""Serving inside vLLM, kvant's recipes side by side with vLLM's own caches: one run, one process for each cache.

    python scripts/vllm_bench.py --work 64x8192+256,32x8192+1024          throughput: tokens/s of all requests together
    python scripts/vllm_bench.py --concurrency 1,8,64,256 --lengths 1024+1024 --hits 0,0.5,1
                                                                          TTFT, TPOT, tokens/s, prefill and decode apart
    python scripts/vllm_bench.py --long 30000,60000,100000                batch-1 decode at long contexts
    python scripts/vllm_bench.py --fill 100000 --max-num-seqs 16          as many long requests as fit at once
    python scripts/vllm_bench.py --work 256x1024+4096 --max-num-seqs 256 --seconds 40
                                                                          the same in its steady state, for 40 s
    python scripts/vllm_bench.py --recipe kvant-2 --against bf16 --ngram kvant-2,bf16
                                                                          these two also with speculation by n-grams
    python scripts/vllm_bench.py --compare 16 --compare-model DIR         greedy tokens against transformers with kvant.Cache
    python scripts/vllm_bench.py --tiny                     on a CPU, a few seconds each: does it run at all?

All may be given together, with --recipe, --against, --kv-gib and --json FILE, which is written after every measurement.

The model is Qwen3-8B's shape with dummy weights, so nothing is downloaded. Artifacts are fitted to random vectors: they decide
bytes and speed, not quality. `--kv-gib` is pages and overlay together: what a recipe's windows take, its pages do not get. The
overlay has a row for each of --max-num-seqs sequences and four more, as in a server. --compare alone loads a real model, and fits
or finds artifacts for it.

What is timed: scripts/vllm_bench_engine.py. In short: vLLM's engine in the process of the cache, stepped by hand; TTFT from
add_request to the end of the step that made the first token; TPOT (last token - first token) / (tokens - 1) of each request; a
step that computes prompt tokens is prefill, any other decode. --work calls LLM.generate and takes the time of the
whole; with --seconds it counts the tokens of so many seconds of the steady state instead.

--compile leaves torch.compile and CUDA graphs to vLLM: its defaults. Without it decode alone has graphs, and nothing is
compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from vllm_bench_engine import NGRAM, OWN, Emit, Point, Work, compare, measure, memory_of, plain
from vllm_bench_tables import number, pair, report

MODEL_LIMIT = {False: 131072, True: 8192}  # positions of the model: Qwen3-8B's with YaRN, and --tiny's
T = TypeVar("T")


def listed(of: Callable[[str], T], what: str) -> Callable[[str], list[T]]:
    """An argument's type: values with commas between them, none of them twice."""

    def parse(text: str) -> list[T]:
        try:
            found = [of(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names a value twice")
        return found

    return parse


def count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def lengths(text: str) -> tuple[int, int]:
    prompt, _, output = text.partition("+")
    try:
        return count(prompt), count(output)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected INPUT+OUTPUT tokens such as 1024+256, got {text!r}") from None


def positive(text: str) -> int:
    try:
        return count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}") from None


several = listed(Work.of, "REQUESTSxPROMPT+ANSWER")


def points_of(args: argparse.Namespace) -> list[Point]:
    """The measurements, in the order in which they are made."""
    prompt, output = args.lengths
    points = [Point("work", work.num, work.num, work.prompt, work.answer) for work in args.work]
    points += [
        Point("serving", args.rounds * concurrency, concurrency, prompt, output, hits)
        for hits in args.hits
        for concurrency in args.concurrency
    ]
    points += [Point("long", 1, 1, context, args.long_output) for context in args.long]
    points += [Point("fill", 0, 0, context, args.fill_output) for context in args.fill]
    return points


def own_caches(args: argparse.Namespace) -> list[str]:
    """vLLM's own caches that are measured."""
    if args.against is None:
        return ["cpu"] if args.tiny else ["bf16", "fp8", "int4_per_token_head"]
    return [] if args.against in ("", "none") else args.against.split(",")


def check(args: argparse.Namespace, own: list[str], chosen: list[str], points: list[Point]) -> None:
    """Raises ValueError for what no engine could run."""
    import torch

    from kvant import files, models, recipes
    from kvant.engines.vllm import options

    unknown = sorted({plain(name) for name in own} - set(OWN))
    if unknown:
        raise ValueError(f"--against: unknown {', '.join(unknown)}; known: {', '.join(OWN)}")
    for name in chosen:
        options.check(recipes.get(plain(name)))
    if args.seconds and not args.work:
        raise ValueError("--seconds is for --work, and there is none")
    twice = sorted({name for name in own + chosen if (own + chosen).count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: named twice")
    foreign = sorted(set(filter(None, args.first_only.split(","))) - {*own, *chosen})
    if foreign:
        raise ValueError(f"--first-only: {', '.join(foreign)} is not among the caches {', '.join(own + chosen)}")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ValueError("VLLM_ENABLE_V1_MULTIPROCESSING must be 0: the engine is timed in the process of its cache")
    on_gpu = [name for name in own if plain(name) != "cpu"]
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"--against {','.join(on_gpu)} needs a GPU, and there is none; on a CPU: --tiny --against cpu")
    if args.json:
        target = Path(args.json)
        files.check_replaceable(target, "--json")
        if not target.absolute().parent.is_dir():
            raise ValueError(f"--json: there is no directory {target.absolute().parent}")
    if args.concurrency and max(args.concurrency) > args.max_num_seqs:
        raise ValueError(
            f"--concurrency {max(args.concurrency)} is more than --max-num-seqs {args.max_num_seqs} lets run at once"
        )
    limit = MODEL_LIMIT[args.tiny]
    for point in points:
        if point.tokens > limit:
            raise ValueError(f"{point}: {point.tokens} tokens are more than the model's {limit} positions")
    for name in own + chosen if points else []:
        overlay, tokens = memory_of(name, args)
        if overlay >= args.kv_gib * 2**30:
            raise ValueError(
                f"{name}: the overlay of {args.max_num_seqs} sequences takes {overlay / 2**30:.1f} GiB of --kv-gib {args.kv_gib}"
            )
        for point in points[:1] if name in args.first_only.split(",") else points:
            if point.tokens > tokens:
                raise ValueError(
                    f"{name}: one request of {point} has {point.tokens} tokens, and --kv-gib {args.kv_gib} holds about {tokens}"
                )
    if args.compare:
        config = models.config_of(args.compare_model)
        positions = getattr(config, "max_position_embeddings", None)
        if positions and sum(args.compare_lengths) > positions:
            raise ValueError(
                f"--compare-lengths: {sum(args.compare_lengths)} tokens, and {args.compare_model} has {positions} positions"
            )


@contextlib.contextmanager
def process(cache: str, part: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own for a cache, which leaves no memory behind. It imports what it needs and waits for a line."""
    command = [sys.executable, __file__, "--one", cache, "--part", part, "--wait", *sys.argv[1:]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def turn(child: subprocess.Popen[str], emit: Emit, limit: float | None) -> str | None:
    """Gives a process its turn and passes on what it measures. Why it failed, or None."""
    assert child.stdin is not None and child.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit, end) if limit else None
    said: list[str] = []
    try:
        with contextlib.suppress(BrokenPipeError):  # it has failed before its turn
            child.stdin.write("go\n")
            child.stdin.flush()
        if timer:
            timer.start()
        for line in child.stdout:
            kind, _, found = line.partition(" ")
            if kind in ("RESULT:engine", "RESULT:point", "RESULT:compare"):
                emit(kind.removeprefix("RESULT:"), json.loads(found))
            elif kind.strip() != "READY":
                said.append(line)
        child.wait()
    finally:
        if timer:
            timer.cancel()
    if late.is_set():
        return f"over {limit:g} s"
    if child.returncode:
        print("".join(said)[-4000:], file=sys.stderr)
        return f"exit {child.returncode}"
    return None


def ready(child: subprocess.Popen[str]) -> None:
    """Waits until a process has imported what it needs, or has ended."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("READY"):
            return
        print(line, end="", file=sys.stderr)


def save(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Writes --json, whole or not at all."""
    if args.json:
        from kvant.files import replacing

        given = {name: str(value) for name, value in vars(args).items()}
        with replacing(Path(args.json)) as temporary:
            temporary.write_text(json.dumps({"arguments": given, "results": results}, indent=2) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def record(result: dict[str, Any], kind: str, found: dict[str, Any]) -> str:
    """Adds what a process measured to its cache's result; a line that says what it was."""
    if kind == "engine":
        result.update(found)
        return f"engine up in {found['start_seconds']} s, holds {found['tokens_that_fit']:,} tokens"
    if kind == "compare":
        result["compare"] = found
        return f"equal prefix {found['equal_prefix_share']:.1%}, equal choices {found['equal_choices_share']:.1%}"
    if found["kind"] == "work":
        name = found["name"]
        for key in ("requests", "output_tokens_per_second", "seconds", "steady"):
            if key in found:
                result.setdefault(key, {})[name] = found[key]
        return f"{name}: {found['output_tokens_per_second']:.1f} tokens/s"
    result["points"].append(found)
    return (
        f"{found['name']}: TTFT {pair(found['ttft_s'])} s, TPOT {pair(found['tpot_ms'])} ms, "
        f"{number(found['output_tokens_per_second'])} tokens/s, decode {number(found['decode_tokens_per_second'])}, "
        f"{found['at_once']} at once, {found['seconds']:.1f} s"
    )


def arguments() -> argparse.ArgumentParser:
    from kvant.plan import SPARE_ROWS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="int4,saw-int4,kvant-2,oscar", help="recipes of kvant")
    parser.add_argument(
        "--against", help=f"vLLM's own caches: {', '.join(OWN)}, or none (default: all but cpu; cpu with --tiny)"
    )
    parser.add_argument(
        "--work",
        type=several,
        metavar="NxP+A[,...]",
        help="requests (fit: as many as the cache holds at once, and --max-num-seqs), tokens of prompts and of answers (default "
        "64x8192+256 where nothing else is asked for); several in turn on one engine",
    )
    numbers = listed(count, "numbers from 1 with commas between them")
    parser.add_argument("--concurrency", type=numbers, default=[], metavar="N[,...]", help="requests in flight")
    parser.add_argument("--lengths", type=lengths, metavar="IN+OUT", help="tokens of these requests (default 1024+256)")
    parser.add_argument("--rounds", type=positive, default=1, help="requests for each in flight (default 1: one burst)")
    parser.add_argument(
        "--hits",
        type=listed(share, "shares from 0 to 1 with commas between them"),
        default=[0.0],
        metavar="S[,...]",
        help="share of each prompt that is a prefix which was served before (default 0); above 0, prefix caching is on",
    )
    parser.add_argument(
        "--prefix",
        choices=["own", "shared"],
        default="own",
        help="each request has its own such prefix, or all share one",
    )
    parser.add_argument("--long", type=numbers, default=[], metavar="N[,...]", help="batch-1 decode at these contexts")
    parser.add_argument("--long-output", type=positive, help="tokens of its answer (default 128)")
    parser.add_argument("--fill", type=numbers, default=[], metavar="N[,...]", help="as many requests as fit at once")
    parser.add_argument("--fill-output", type=positive, help="tokens of their answers (default 512)")
    parser.add_argument(
        "--compare", type=positive, default=0, metavar="N", help="prompts whose greedy tokens are compared"
    )
    parser.add_argument(
        "--compare-model", default="smollm2", metavar="DIR", help="a small real model (default smollm2)"
    )
    parser.add_argument("--compare-lengths", type=lengths, default=(512, 64), metavar="IN+OUT", help="default 512+64")
    parser.add_argument("--kv-gib", type=float, help="cache, pages and overlay together (default 24)")
    parser.add_argument("--layers", type=positive, help="default 36")
    parser.add_argument("--max-num-seqs", type=positive, help="default 64, or the largest --concurrency")
    parser.add_argument("--max-batched-tokens", type=positive, default=8192)
    parser.add_argument("--spare-overlay-rows", "--spare-windows", type=int, default=SPARE_ROWS)
    parser.add_argument("--repeat", type=positive, default=1, help="runs of each measurement; the fastest counts")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="measure each --work for so long in its steady state (default: the whole)",
    )
    parser.add_argument(
        "--ngram", default="", metavar="CACHE[,...]", help="measure these caches with speculation by n-grams, too"
    )
    parser.add_argument("--drafts", type=positive, default=3, help="drafts of a step with --ngram (default 3)")
    parser.add_argument(
        "--limit", type=float, metavar="S", help="a cache that takes longer is ended, and keeps what it has"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="vLLM's default torch.compile and CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a small model in float32, for a CPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--first-only", default="", metavar="CACHE[,...]", help="caches that get the first measurement alone"
    )
    parser.add_argument("--one", metavar="CACHE", help="only this cache, in this process")
    parser.add_argument("--part", choices=["measure", "compare"], default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    return parser


def complete(args: argparse.Namespace) -> None:
    """Fills in what was not given."""
    tiny = args.tiny
    if args.work is None:
        asked = args.concurrency or args.long or args.fill or args.compare
        args.work = [] if asked else several("4x100+8,fitx50+4" if tiny else "64x8192+256")
    args.lengths = args.lengths or ((64, 8) if tiny else (1024, 256))
    args.long_output = args.long_output or (8 if tiny else 128)
    args.fill_output = args.fill_output or (8 if tiny else 512)
    args.kv_gib = (0.03 if tiny else 24.0) if args.kv_gib is None else args.kv_gib
    args.layers = args.layers or (2 if tiny else 36)
    args.max_num_seqs = args.max_num_seqs or max([4 if tiny else 64, *args.concurrency])


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    complete(args)
    points = points_of(args)

    def emit(kind: str, found: dict[str, Any]) -> None:
        print(f"RESULT:{kind} {json.dumps(found)}", flush=True)

    if args.one:
        if args.part == "compare":
            compare(args.one, args, emit)
        else:
            measure(args.one, args, points[:1] if args.one in args.first_only.split(",") else points, emit)
        return 0
    from kvant.recipes import split

    own = own_caches(args)
    try:
        chosen = split(args.recipe) if args.recipe not in ("", "none") else []
        speculating = split(args.ngram) if args.ngram else []
        own, chosen = (
            [*names, *(name + NGRAM for name in speculating if (name in OWN) == (names is own))]
            for names in (own, chosen)
        )
        check(args, own, chosen, points)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    caches = [*own, *chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the caches end, too
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        children = {cache: stack.enter_context(process(cache, "measure")) for cache in caches if points}
        for child in children.values():
            ready(child)
        for cache in caches:
            result: dict[str, Any] = {"cache": cache, "requests": {}, "output_tokens_per_second": {}, "seconds": {}}
            result["points"] = []
            results.append(result)

            def keep(kind: str, found: dict[str, Any], result: dict[str, Any] = result) -> None:
                line = record(result, kind, found)
                save(args, results)
                say(f"{result['cache']}: {line}")  # what is said is saved

            failures = []
            if points:
                say(f"measuring {cache}")
                failures.append(turn(children[cache], keep, args.limit))
            if args.compare and cache.endswith(NGRAM):
                result["compare"] = {"skipped": "compared without speculation"}
            elif args.compare and cache in OWN and cache not in ("bf16", "cpu"):
                result["compare"] = {"skipped": "no such cache outside vLLM"}
            elif args.compare:
                say(f"comparing {cache}")
                with process(cache, "compare") as child:
                    ready(child)
                    failures.append(turn(child, keep, args.limit))
            failed = ", ".join(filter(None, failures))
            if failed:
                result["failed"] = failed
                say(f"{cache}: failed ({failed})")
            save(args, results)
    report(args, points, results)
    return int(any("failed" in found for found in results))


if __name__ == "__main__":
    sys.exit(main())
