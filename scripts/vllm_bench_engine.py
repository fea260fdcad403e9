"""One cache inside vLLM, measured in this process: the part of scripts/vllm_bench.py that runs in a process for each cache.

What is timed. Requests go to vLLM's engine in this process (LLMEngine.add_request, then step until all are answered); there is no
HTTP server and no tokenizer. The scheduler's `update_from_output` is wrapped: it is called once a step, when the sampled tokens of
the step are on the host, and tells for every step its end, the tokens that were scheduled and the tokens that were made. The length
of a step is the time between two such ends, so the host's work between steps counts.

    TTFT            from add_request of a request to the step that made its first token, waiting for others included
    TPOT            (end of its last token - end of its first) / (tokens - 1), a value for each request
    each            output tokens / (end of its last token - add_request), a value for each request
    all             output tokens of all requests / time from the first add_request to the last token
    prefill         tokens computed for prompts / time of the steps that compute any. Tokens of a prefix hit are not computed. What is
                    computed again after a preemption counts. Such steps also make tokens for other requests (chunked prefill).
    decode          output tokens / time of the steps that compute no prompt
    at once         most requests in one step

With --seconds a work is measured in its steady state (`Server.steady`): so many requests are in flight all the time,
spread evenly over the tokens of their answers from the first moment, and a new one comes for each that ends. What is
counted is every token that is made in so many seconds after the fill, whatever its step computes beside it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OWN = {  # vLLM's own caches: dtype of the cache, attention backend
    "bf16": ("auto", "FLASH_ATTN"),
    "fp8": ("fp8", "FLASH_ATTN"),
    "int4_per_token_head": ("int4_per_token_head", "TRITON_ATTN"),
    "cpu": ("auto", None),
}
NGRAM = "+ngram"  # ending of a cache's name: with speculation by n-grams
OWN_BITS = {"bf16": 16.0, "fp8": 8.0, "int4_per_token_head": 4.25, "cpu": 32.0}  # bits per element
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
}
Emit = Callable[[str, dict[str, Any]], None]  # takes a kind of measurement and what was found


def plain(cache: str) -> str:
    """A cache's name without speculation."""
    return cache.removesuffix(NGRAM)


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


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement.

    kind         "work": `num` requests sent together, tokens/s alone (as vLLM's own throughput benchmark);
                 "serving": `num` requests, `concurrency` of them in flight;
                 "long": one request with a long context; "fill": as many requests as the cache holds at once
    num          requests; 0: as many as the cache holds
    hits         share of each prompt that is a prefix which was served before
    """

    kind: str
    num: int
    concurrency: int
    prompt: int
    output: int
    hits: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of a request's cache."""
        return self.prompt + self.output

    @property
    def work(self) -> str:
        return str(Work(self.num, self.prompt, self.output))

    def __str__(self) -> str:
        if self.kind == "work":
            return self.work
        if self.kind == "serving":
            return f"{self.concurrency} at once, {self.prompt}+{self.output}, hits {self.hits:g}"
        return f"{self.kind} {self.prompt}+{self.output}"


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


def longest_of(points: Sequence[Point]) -> int:
    """Tokens of the longest request, rounded up to 256: vLLM's max_model_len."""
    return -(-max(point.tokens for point in points) // 256) * 256


def memory_of(cache: str, args: argparse.Namespace) -> tuple[int, int]:
    """Bytes of the overlay of all sequences, sink rows included, and tokens that the rest of --kv-gib holds, about."""
    model = config(args.tiny, args.layers, 0)
    memory, elements = (
        int(args.kv_gib * 2**30),
        2 * args.layers * model["num_key_value_heads"] * model["head_dim"],
    )
    cache, drafts = plain(cache), args.drafts if cache.endswith(NGRAM) else 0
    if cache in OWN:
        return 0, int(memory * 8 / (elements * OWN_BITS[cache]))
    from kvant import recipes
    from kvant.layout import Layout
    from kvant.plan import sink_rows
    from kvant.serving.overlay import with_rollback

    recipe = with_rollback(recipes.get(cache), drafts)
    layout = Layout.of(recipe, model["num_key_value_heads"], model["head_dim"], dtype=model["torch_dtype"])
    page, sinks = (args.layers * size for size in (layout.page_bytes, layout.sink_bytes))
    overlay = args.layers * (args.max_num_seqs + args.spare_overlay_rows + 1) * layout.overlay_bytes
    if any(args.hits):  # prefix caching is on
        overlay += sink_rows(max(0, memory - overlay), page, sinks) * sinks
    if any(stream.groupwise for stream in layout.recipe.streams.values()):
        overlay += (
            args.max_num_seqs * layout.overlay_bytes
        )  # rows to which prefills with a history are copied, of one layer
    return overlay, max(0, memory - overlay) // page * layout.page_tokens


def artifact_for(recipe: Any, model: dict[str, Any], directory: Path) -> str:
    """An artifact of the right shapes, the same for every layer."""
    from kvant.artifact import Artifact
    from kvant.bench.synthetic import Shape, fitted

    heads, dim, layers = model["num_key_value_heads"], model["head_dim"], model["num_hidden_layers"]
    tensors = fitted(recipe, Shape(1, 1, model["num_attention_heads"], heads, dim), "cpu")
    copies = {layer: {name: tensor.clone() for name, tensor in tensors.items()} for layer in range(layers)}
    Artifact(recipe, heads, dim, layers, copies).save(directory)
    return str(directory)


def backend_options(cache: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options of vLLM's LLM that choose a cache. `given`: keys of additional_config["kvant"] beside the recipe."""
    cache = plain(cache)
    if cache in OWN:
        dtype, backend = OWN[cache]
        chosen: dict[str, Any] = {"kv_cache_dtype": dtype}
        return chosen if backend is None else chosen | {"attention_config": {"backend": backend}}
    import kvant.engines.vllm
    from kvant import recipes

    kvant.engines.vllm.register()  # where kvant is on the path and not installed, vLLM does not find it
    return {
        "attention_config": {"backend": "CUSTOM"},
        "additional_config": {"kvant": {"recipe": cache, **given}},
        **({} if recipes.get(cache).not_prefix_safe is None else {"enable_chunked_prefill": False}),
    }


class Steps:
    """Times of the scheduler's steps, and of the first and the last token of every request."""

    def __init__(self, engine: Any) -> None:
        core = getattr(engine.engine_core, "engine_core", None)
        assert core is not None, "the engine must run in this process"
        scheduler = core.scheduler
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._timed
        self.begin()

    def begin(self) -> None:
        self.sent: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.steps: list[tuple[float, int, int, int]] = []  # seconds, prompt tokens computed, tokens made, requests
        self.drafted = self.accepted = 0  # tokens of drafts
        self._end = time.perf_counter()

    def _timed(self, scheduled: Any, made: Any) -> Any:
        outputs = self._update(scheduled, made)
        now = time.perf_counter()
        # Of a request that has ended, the next step may be under way already (async scheduling): it is not counted.
        counts = {name: count for name, count in scheduled.num_scheduled_tokens.items() if name in self.sent}
        drafts = getattr(scheduled, "scheduled_spec_decode_tokens", {})  # whose verification is no prompt
        own = {name: count - len(drafts.get(name, ())) for name, count in counts.items()}
        prompt = sum(count for name, count in own.items() if count > 1 or name not in self.first)
        tokens = 0
        for batch in outputs.values():
            for each in batch.outputs:
                if each.new_token_ids and each.request_id in self.sent:
                    tokens += len(each.new_token_ids)
                    if each.request_id in drafts:
                        self.drafted += len(drafts[each.request_id])
                        self.accepted += len(each.new_token_ids) - 1
                    self.first.setdefault(each.request_id, now)
                    self.last[each.request_id] = now
        if counts:
            self.steps.append((now - self._end, prompt, tokens, len(counts)))
        self._end = now
        return outputs


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 2) if count and seconds > 0 else None


def median_and_p99(values: Sequence[float], factor: float = 1.0) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "median": round(factor * statistics.median(values), 4),
        "p99": round(factor * percentile(values, 0.99), 4),
    }


class Server:
    """vLLM's engine, stepped by hand."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.steps = Steps(self.engine)
        self._named = 0

    def serve(self, prompts: Sequence[list[int]], output: int, concurrency: int) -> dict[str, Any]:
        """Sends requests, at most `concurrency` of them in flight, and steps until all are answered. What was measured."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        settings.output_kind = RequestOutputKind.FINAL_ONLY  # an object for every token would cost time in every step
        waiting = collections.deque(prompts)
        flying = cached = answered = 0
        steps = self.steps
        steps.begin()
        sent = steps.sent
        while waiting or flying:
            while waiting and flying < concurrency:
                self._named += 1
                now = time.perf_counter()
                name = self.engine.add_request(
                    f"bench-{self._named}", {"prompt_token_ids": waiting.popleft()}, settings.clone()
                )
                sent[name] = now
                flying += 1
            for answer in self.engine.step():
                if answer.finished:
                    flying -= 1
                    cached += answer.num_cached_tokens or 0
                    answered += len(answer.outputs[0].token_ids)
        expected = len(prompts) * output
        made = sum(tokens for _, _, tokens, _ in steps.steps)
        assert answered == expected, f"{answered} tokens came, {expected} were asked for"
        assert made == expected and sent.keys() == steps.last.keys(), (made, expected, len(sent), len(steps.last))
        begin, end = min(sent.values()), max(steps.last.values())
        asked = sum(map(len, prompts))
        prefill = [step for step in steps.steps if step[1]]
        decode = [step for step in steps.steps if not step[1]]
        computed, first = sum(step[1] for step in prefill), max(steps.first.values())
        return {
            "requests": len(prompts),
            "at_once": max(requests for _, _, _, requests in steps.steps),
            "ttft_s": median_and_p99([steps.first[name] - sent[name] for name in sent]),
            "tpot_ms": median_and_p99(
                [(steps.last[n] - steps.first[n]) / (output - 1) for n in sent] if output > 1 else [], 1000
            ),
            "output_tokens_per_second_each": median_and_p99(
                [output / (steps.last[name] - sent[name]) for name in sent]
            ),
            "output_tokens_per_second": rate(expected, end - begin),
            "prompt_tokens_per_second_until_last_first_token": rate(asked, first - begin),
            "prefill_tokens_per_second": rate(computed, sum(step[0] for step in prefill)),
            "prefill_tokens": computed,
            "prefill_seconds": round(sum(step[0] for step in prefill), 4),
            "decode_tokens_per_second": rate(sum(step[2] for step in decode), sum(step[0] for step in decode)),
            "decode_tokens": sum(step[2] for step in decode),
            "decode_seconds": round(sum(step[0] for step in decode), 4),
            "prompt_tokens": asked,
            "cached_tokens": cached,
            "seconds": round(end - begin, 4),
            "drafts_accepted": round(steps.accepted / steps.drafted, 4) if steps.drafted else None,
        }

    def steady(self, draw: Callable[[int], list[int]], point: Point, seconds: float) -> dict[str, Any]:
        """The steady state of `point.num` requests in flight. The first ones are spread over their answers: of the
        i-th, a share i / num of the answer comes with the prompt. Measured for so many seconds after the fill, which
        ends when all of them have a token, or when a step computes no prompt: the others wait for room."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        steps, begun = self.steps, 0
        steps.begin()
        parts = [point.output * i // point.num for i in range(point.num)]
        random.Random(0).shuffle(parts)
        flying: set[str] = set()
        ended = mark = 0
        while not begun or sum(step[0] for step in steps.steps[begun:]) < seconds:
            while len(flying) < point.num:
                done = parts.pop() if parts else 0
                settings = SamplingParams(
                    temperature=0.0, max_tokens=point.output - done, ignore_eos=True, detokenize=False
                )
                settings.output_kind = RequestOutputKind.FINAL_ONLY
                self._named += 1
                name = f"bench-{self._named}"
                sent = self.engine.add_request(name, {"prompt_token_ids": draw(point.prompt + done)}, settings)
                steps.sent[sent] = time.perf_counter()
                flying.add(name)
            for answer in self.engine.step():
                if answer.finished:
                    flying.discard(answer.request_id)
                    ended += 1
            if not begun and steps.steps and (len(steps.first) >= point.num or not steps.steps[-1][1]):
                begun, mark = len(steps.steps), ended
                steps.drafted = steps.accepted = 0
        window = steps.steps[begun:]
        spent, made = sum(step[0] for step in window), sum(step[2] for step in window)
        found = {
            "seconds": round(spent, 3),
            "fill_seconds": round(sum(step[0] for step in steps.steps[:begun]), 3),
            "output_tokens_per_second": made / spent,
            "output_tokens": made,
            "prompt_tokens": sum(step[1] for step in window),
            "ended": ended - mark,
            "at_once": round(sum(step[0] * step[3] for step in window) / spent, 1),  # on average
            "drafts_accepted": round(steps.accepted / steps.drafted, 4) if steps.drafted else None,
        }
        self.engine.abort_request([*flying])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return found


def measure(cache: str, args: argparse.Namespace, points: list[Point], emit: Emit) -> None:
    """Measures one cache in this process, and emits the engine's facts and then every measurement as it is made."""
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    longest = longest_of(points)
    model = config(args.tiny, args.layers, longest)
    folder = Path(tempfile.mkdtemp(prefix="vllm_bench_"))
    (folder / "config.json").write_text(json.dumps(model))
    overlay, _ = memory_of(cache, args)
    given: dict[str, Any] = {"spare_overlay_rows": args.spare_overlay_rows}
    if plain(cache) not in OWN:
        from kvant import recipes

        recipe = recipes.get(plain(cache))
        if recipe.calibrated:
            given["artifact"] = artifact_for(recipe, model, folder / "artifact")
    options = backend_options(cache, given)
    if cache.endswith(NGRAM):
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": args.drafts, **lookup}
    if args.eager or args.tiny:
        options["enforce_eager"] = True
    elif not args.compile:  # whole-model CUDA graphs for decode, no torch.compile
        sizes = [1, 2, 4, *range(8, args.max_num_seqs + 1, 8)]
        sizes = sorted({*sizes, args.max_num_seqs})
        if cache.endswith(NGRAM):  # sizes are tokens, and a sequence may have as many more as there are drafts
            sizes = [size * (1 + args.drafts) for size in sizes]
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    import torch
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version

    wait_for_turn(args)
    begin = time.perf_counter()
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=model["torch_dtype"],
        max_model_len=longest,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_batched_tokens,
        enable_prefix_caching=any(point.hits for point in points),
        kv_cache_memory_bytes=int(args.kv_gib * 2**30) - overlay,
        **({} if args.tiny else {"gpu_memory_utilization": 0.9}),
        **options,
    )
    cache_config = llm.llm_engine.vllm_config.cache_config
    emit(
        "engine",
        {
            "tokens_that_fit": cache_config.num_gpu_blocks * cache_config.block_size,
            "window_gib": round(overlay / 2**30, 2),
            "start_seconds": round(time.perf_counter() - begin, 1),
            "vllm": version,
            "graphs": llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name,
            "torch_compile": int(llm.llm_engine.vllm_config.compilation_config.mode) > 0,
            "model_runner": "V2" if getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False) else "V1",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
    )
    draw = random.Random(args.seed)
    server = Server(llm)

    def ids(count: int) -> list[int]:
        return draw.choices(range(3, model["vocab_size"]), k=count)

    def counted(point: Point) -> Point:
        """With the number of requests that fit; one block of vLLM's holds nothing."""
        whole = -(-point.tokens // cache_config.block_size)
        fit = max(1, min(args.max_num_seqs, (cache_config.num_gpu_blocks - 1) // whole))
        return point if point.num else dataclasses.replace(point, num=fit, concurrency=fit)

    def generate(point: Point) -> float:
        """Seconds of all requests together, through vLLM's own generate."""
        prompts: Any = [{"prompt_token_ids": ids(point.prompt)} for _ in range(point.num)]
        settings = SamplingParams(temperature=0.0, max_tokens=point.output, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        found = llm.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(each.outputs[0].token_ids) for each in found)
        assert made == point.num * point.output, f"{made} tokens came, {point.num * point.output} were asked for"
        return seconds

    def serve(point: Point) -> dict[str, Any]:
        """The requests of a point, after the prefixes that they hit were served."""
        prefix = int(point.hits * point.prompt)
        shared = ids(prefix)
        prefixes = [shared if args.prefix == "shared" else ids(prefix) for _ in range(point.num)]
        if cache_config.enable_prefix_caching and not llm.llm_engine.reset_prefix_cache():
            llm.llm_engine.step()  # ends what async scheduling has under way
            assert llm.llm_engine.reset_prefix_cache(), "the cache of prefixes could not be emptied"
        if prefix:
            before = prefixes[:1] if args.prefix == "shared" else prefixes
            server.serve(before, 1, point.concurrency)
        return server.serve([each + ids(point.prompt - prefix) for each in prefixes], point.output, point.concurrency)

    warm = None
    for asked, point in zip(points, map(counted, points), strict=True):
        small = dataclasses.replace(
            point, num=min(4, point.num), prompt=min(point.prompt, 8192), output=min(8, point.output)
        )
        if point.kind == "work":
            if warm is None:
                generate(small)
            if args.seconds:
                steady = server.steady(ids, point, args.seconds)
                warm = small
                found = {"requests": point.num, "steady": steady, "seconds": [steady["seconds"]]}
                found["output_tokens_per_second"] = steady["output_tokens_per_second"]
                emit("point", {**dataclasses.asdict(asked), "name": str(asked), **found})
                continue
            seconds = [generate(point) for _ in range(args.repeat)]
            found: dict[str, Any] = {
                "requests": point.num,
                "output_tokens_per_second": point.num * point.output / min(seconds),
                "seconds": [round(each, 3) for each in seconds],
            }
        else:
            if small != warm:
                serve(small)
            runs = [serve(point) for _ in range(args.repeat)]
            found = max(runs, key=lambda run: run["output_tokens_per_second"])
            found["seconds_of_runs"] = [run["seconds"] for run in runs]
        warm = small
        emit("point", {**dataclasses.asdict(asked), "name": str(asked), **found})


def wait_for_turn(args: argparse.Namespace) -> None:
    """Its turn comes when the others have imported, too, and those before it are done. Ends where nobody is there to say so."""
    if args.wait:
        print("READY", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("ended before its turn")


def compare(cache: str, args: argparse.Namespace, emit: Emit) -> None:
    """Greedy answers of vLLM on a real model, and what transformers with the same recipe chooses at every token of them.

    The run outside vLLM reads the same prompt and, token by token, vLLM's answer: where it would choose another token, the answers
    part. Up to there it is a greedy run of its own, so the equal prefix is that of two free runs. After it the text stays vLLM's, and
    the share of equal choices counts every token.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    import torch

    import kvant
    from kvant import models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait_for_turn(args)
    model, tokenizer = models.load(args.compare_model, device=device)
    length, count = args.compare_lengths
    prompts = excerpts(tokenizer, args.compare, length)
    given: dict[str, Any] = {"unfit_anyway": True}
    artifact = None
    if cache not in OWN:
        artifact = kvant.artifact_for(model, tokenizer, cache)
        if artifact is not None:
            given["artifact"] = tempfile.mkdtemp(prefix="vllm_bench_")
            artifact.save(Path(given["artifact"]) / "artifact")
            given["artifact"] += "/artifact"
    from vllm import LLM, SamplingParams

    shape = model.config
    heads = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    longest = -(-(length + count) // 256) * 256
    full = 2 * shape.num_hidden_layers * heads * dim * model.dtype.itemsize * longest
    llm = LLM(
        model=models.resolve(args.compare_model),
        skip_tokenizer_init=True,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=longest,
        max_num_seqs=args.compare,
        max_num_batched_tokens=max(2048, longest),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=max(1 << 28, (args.compare + 2) * full),
        enforce_eager=True,
        **({"gpu_memory_utilization": 0.5} if device == "cuda" else {}),
        **backend_options(cache, given),
    )
    settings = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts], settings, use_tqdm=False)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        assert len(tokens) == count, (len(tokens), count)
        found.append([a == b for a, b in zip(tokens, choices(model, cache, artifact, prompt, tokens), strict=True)])
    emit(
        "compare",
        {
            "model": str(args.compare_model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "against": "transformers" if cache in OWN else "transformers with kvant.Cache",
            "prompts": len(prompts),
            "prompt_tokens": length,
            "tokens": count,
            **agreement(found),
        },
    )


def agreement(equal: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """For answers of equal length, whether each token is the one that the other run chooses: how far they agree."""
    total = sum(map(len, equal))
    prefixes = [len(each) if all(each) else list(each).index(False) for each in equal]
    return {
        "equal_prefix": prefixes,
        "equal_prefix_share": round(sum(prefixes) / total, 4),
        "equal_choices_share": round(sum(map(sum, equal)) / total, 4),
        "equal_answers": sum(map(all, equal)),
    }


def choices(model: Any, cache: str, artifact: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """What transformers chooses at every token of an answer, after the tokens before it."""
    import torch
    import transformers

    import kvant
    from kvant import recipes
    from kvant.serving.overlay import from_first_token

    if cache in OWN:
        past = transformers.DynamicCache()
    else:  # groups of tokens begin where they do in vLLM
        past = kvant.Cache(model, from_first_token(recipes.get(cache)), artifact=artifact)
    found, given = [], prompt
    with torch.inference_mode():
        for token in answer:
            ids = torch.tensor([given], device=model.device)
            logits = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits
            found.append(int(logits[0, -1].argmax()))
            given = [token]
    return found


def excerpts(tokenizer: Any, num: int, length: int) -> list[list[int]]:
    """So many prompts from the texts that come with kvant, spread over them."""
    from kvant import passages
    from kvant.calibrate.text import cut, encode

    texts = [each for kind in passages.pieces().values() for each in kind if isinstance(each, str)]
    ids = encode(tokenizer, "\n\n".join(texts))
    if num * length > len(ids):
        raise SystemExit(f"--compare: {num} prompts of {length} tokens, but the texts have {len(ids)}")
    return [each.tolist() for each in cut(ids, num * length, length)]
