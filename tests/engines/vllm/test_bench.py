"""The serving benchmark: what it counts, what it refuses before an engine starts, and real runs at a size that a CPU bears."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.vllm.engines import byte_tokenizer, needs_vllm, tiny_model

SCRIPT = Path(__file__).parents[3] / "scripts" / "vllm_bench.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("vllm_bench")


@pytest.fixture
def timing(bench: Any) -> Any:
    return importlib.import_module("vllm_bench_engine")


def command(*options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *options]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(*options), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


# --- what it counts ---


class FakeEngine:
    """An engine whose steps take known times: a request's prompt in chunks, then a token a step, no more than `room` at once."""

    def __init__(self, clock: list[float], room: int, chunk: int = 10) -> None:
        self.clock, self.room, self.chunk = clock, room, chunk
        self.asked: list[tuple[int, int]] = []
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.engine_core = types.SimpleNamespace(engine_core=types.SimpleNamespace(scheduler=self))

    def add_request(self, name: str, prompt: dict[str, list[int]], settings: Any) -> str:
        size, output = len(prompt["prompt_token_ids"]), settings.max_tokens
        self.asked.append((size, output))
        self.waiting.append(types.SimpleNamespace(name=f"{name}-inside", size=size, left=size, output=output, made=0))
        return f"{name}-inside"

    def abort_request(self, names: list[str]) -> None:
        inside = {f"{name}-inside" for name in names}
        self.waiting = [each for each in self.waiting if each.name not in inside]
        self.running = [each for each in self.running if each.name not in inside]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def update_from_output(self, scheduled: Any, made: Any) -> Any:
        outputs = [types.SimpleNamespace(request_id=name, new_token_ids=tokens) for name, tokens in made.items()]
        return {0: types.SimpleNamespace(outputs=outputs)}

    def step(self) -> list[Any]:
        while self.waiting and len(self.running) < self.room:
            self.running.append(self.waiting.pop(0))
        counts, made = {}, {}
        for each in self.running:
            counts[each.name] = min(self.chunk, each.left) if each.left else 1
            each.left = max(0, each.left - self.chunk)
            if not each.left:
                each.made += 1
                made[each.name] = [7]
        prefill = any(each.made == 0 or (each.made == 1 and each.name in made) for each in self.running)
        self.clock[0] += 2.0 if prefill else 0.5
        self.update_from_output(types.SimpleNamespace(num_scheduled_tokens=counts), made)
        ended = [each for each in self.running if each.made == each.output]
        self.running = [each for each in self.running if each.made < each.output]
        return [
            types.SimpleNamespace(
                finished=True,
                request_id=each.name.removesuffix("-inside"),
                num_cached_tokens=3,
                outputs=[types.SimpleNamespace(token_ids=[7] * each.output)],
            )
            for each in ended
        ]


@pytest.fixture
def clock(timing: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return iter([now])


@needs_vllm
def test_times_of_requests_and_steps(timing: Any, clock: Iterator[list[float]]) -> None:
    """Two requests of 20 + 5 in flight and a third after them: two steps of 2 s for the prompts, then four of 0.5 s."""
    server = timing.Server(types.SimpleNamespace(llm_engine=FakeEngine(next(clock), room=2)))
    found = server.serve([[1] * 20] * 3, output=5, concurrency=2)
    assert found["requests"] == 3 and found["at_once"] == 2
    assert found["ttft_s"] == {"median": 4.0, "p99": 4.0}  # each waits for its own prompt alone
    assert found["tpot_ms"] == {"median": 500.0, "p99": 500.0}
    assert found["seconds"] == 12.0 and found["output_tokens_per_second"] == 1.25
    assert found["output_tokens_per_second_each"]["median"] == round(5 / 6, 4)
    assert (found["prefill_tokens"], found["prefill_seconds"]) == (60, 8.0)
    assert (found["decode_tokens"], found["decode_seconds"]) == (12, 4.0) and found["decode_tokens_per_second"] == 3.0
    assert (found["prompt_tokens"], found["cached_tokens"]) == (60, 9)


@needs_vllm
def test_waiting_for_room_counts_as_time_to_the_first_token(timing: Any, clock: Iterator[list[float]]) -> None:
    server = timing.Server(types.SimpleNamespace(llm_engine=FakeEngine(next(clock), room=1)))
    found = server.serve(
        [[1] * 10] * 3, output=3, concurrency=3
    )  # 2 s and two steps of 0.5 s each, one after the other
    assert found["ttft_s"] == {"median": 5.0, "p99": 8.0} and found["at_once"] == 1
    assert found["prompt_tokens_per_second_until_last_first_token"] == round(30 / 8, 2)


@needs_vllm
def test_the_steady_state_counts_tokens_after_the_fill(timing: Any, clock: Iterator[list[float]]) -> None:
    """Four requests of 10 + 8 of which two at once find room: they are spread over their answers, and one that ends
    gives way to the next, whose prompt is a step of 2 s."""
    engine = FakeEngine(next(clock), room=2, chunk=100)
    server = timing.Server(types.SimpleNamespace(llm_engine=engine))
    found = server.steady(lambda count: [1] * count, timing.Point("work", 4, 4, 10, 8), seconds=20.0)
    assert found["seconds"] >= 20 and found["fill_seconds"] > 0 and found["at_once"] == 2
    steps = server.steps.steps
    window = steps[-next(i for i in range(1, len(steps)) if sum(s[0] for s in steps[-i:]) >= found["seconds"]) :]
    assert found["output_tokens"] == sum(step[2] for step in window)
    assert found["output_tokens_per_second"] == found["output_tokens"] / found["seconds"]
    assert found["ended"] >= 3 and found["drafts_accepted"] is None
    assert not engine.running and not engine.waiting  # given up
    assert sorted(engine.asked[:4]) == [(10, 8), (12, 6), (14, 4), (16, 2)] and set(engine.asked[4:]) == {(10, 8)}


@needs_vllm
def test_drafts_that_are_verified_are_no_prompt(timing: Any, clock: Iterator[list[float]]) -> None:
    engine = FakeEngine(next(clock), room=1)
    steps = timing.Steps(engine)
    steps.begin()
    steps.sent["a"] = 0.0
    scheduled = types.SimpleNamespace(num_scheduled_tokens={"a": 5}, scheduled_spec_decode_tokens={})
    steps._timed(scheduled, {"a": [7]})
    scheduled = types.SimpleNamespace(num_scheduled_tokens={"a": 4}, scheduled_spec_decode_tokens={"a": [1, 2, 3]})
    steps._timed(scheduled, {"a": [7, 8]})
    assert [step[1:3] for step in steps.steps] == [(5, 1), (0, 2)]
    assert (steps.drafted, steps.accepted) == (3, 1)


def test_caches_with_speculation_are_measured_beside_those_without(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "--tiny --against cpu --recipe saw-int4 --ngram saw-int4,cpu --seconds 5 --work 4x100+8"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *asked.split()])
    found: list[Any] = []
    monkeypatch.setattr(bench, "check", lambda args, own, chosen, points: found.append((own, chosen)) or exit(0))
    with pytest.raises(SystemExit):
        bench.main()
    assert found == [(["cpu", "cpu+ngram"], ["saw-int4", "saw-int4+ngram"])]


def test_percentiles_are_measured_values(timing: Any) -> None:
    values = [float(i) for i in range(1, 201)]
    assert timing.percentile(values, 0.99) == 198.0 and timing.percentile(values, 0.5) == 100.0
    assert timing.percentile([3.0], 0.99) == 3.0
    assert timing.percentile([2.0, 1.0], 0.99) == 2.0  # of a few, the largest


def test_agreement_counts_the_prefix_and_every_choice(timing: Any) -> None:
    found = timing.agreement([[True] * 4, [True, False, True, True], [False] * 4])
    assert found["equal_prefix"] == [4, 1, 0] and found["equal_answers"] == 1
    assert found["equal_prefix_share"] == round(5 / 12, 4) and found["equal_choices_share"] == round(7 / 12, 4)


def test_choices_of_another_recipe_are_other_choices(timing: Any, tmp_path: Path) -> None:
    """Greedy tokens of a model are its own choices, and those of a 2-bit cache differ: a comparison can fail."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model")).eval()
    prompt = torch.randint(3, 512, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    answer = answer[0, 80:].tolist()
    assert timing.choices(model, "cpu", None, prompt, answer) == answer
    packed = timing.choices(model, "int2", None, prompt, answer)
    assert packed != answer


def test_tables_fit_a_terminal(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With figures as large as an H200 prints."""
    args = bench.arguments().parse_args(["--concurrency=256", "--hits=0.5", "--long=100000", "--compare=16"])
    bench.complete(args)
    points = bench.points_of(args)
    pair = {"median": 123.45, "p99": 234.56}
    found = {"at_once": 256, "ttft_s": pair, "tpot_ms": pair, "output_tokens_per_second_each": pair}
    found |= {f"{kind}_tokens_per_second": 123456.7 for kind in ("output", "prefill", "decode")}
    found |= {"cached_tokens": 1, "prompt_tokens": 2}
    results: list[dict[str, Any]] = [
        {
            "cache": name,
            "tokens_that_fit": 1282560,
            "points": [{"name": str(point), **found} for point in points],
            "compare": {"equal_prefix_share": 1, "equal_choices_share": 1, "equal_answers": 16, "prompts": 16},
        }
        for name in ("bf16", "int4_per_token_head")
    ]
    results[0]["compare"]["equal_prefix"] = [64] * 16
    results[1]["compare"] = {"skipped": "no such cache outside vLLM"}
    results.append({"cache": "oscar", "points": [], "failed": "over 60 s"})
    bench.report(args, points, results)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100, printed
    for text in ("int4_per_token_head", "failed (over 60 s)", "no such cache outside vLLM", "16 of 16", "1.00"):
        assert text in printed


# --- what it refuses before an engine starts ---


@needs_vllm
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--recipe nosuch", "nosuch"),
        ("--recipe kivi-k2v2:k.recent=32", "cannot be served inside vLLM"),
        ("--against fp4", "unknown fp4; known: bf16"),
        ("--recipe int4,int4", "int4: named twice"),
        ("--long 9000", "9008 tokens are more than the model's 8192 positions"),
        ("--fill 6000 --recipe int4 --kv-gib 0.01", "cpu: one request of fill 6000+8 has 6008 tokens"),
        ("--concurrency 8 --max-num-seqs 4", "--concurrency 8 is more than --max-num-seqs 4"),
        ("--concurrency 8,0", "expected numbers from 1"),
        ("--concurrency 8,8", "names a value twice"),
        ("--concurrency 8 --hits 1.5", "expected shares from 0 to 1"),
        ("--concurrency 8 --lengths 100", "expected INPUT+OUTPUT"),
        ("--work 8x", "work must be"),
        ("--recipe oscar --max-num-seqs 4000", "oscar: the overlay of 4000 sequences takes"),
        ("--json /nowhere/at/all.json", "there is no directory /nowhere/at"),
        ("--compare 2 --compare-model /nowhere", "/nowhere"),
        ("--first-only fp8", "fp8 is not among the caches"),
        ("--seconds 5 --long 100", "--seconds is for --work"),
        ("--ngram fp4", "fp4"),
        ("--against bf16", "needs a GPU"),
    ],
)
def test_mistakes_are_told_before_an_engine_starts(
    options: str, message: str, bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", *options.split()])
    monkeypatch.setattr(bench, "process", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_compared_context_beyond_the_model(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    model = tiny_model(tmp_path / "model")
    asked = f"--tiny --recipe int4 --compare 2 --compare-model {model} --compare-lengths 2000+100"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *asked.split()])
    with pytest.raises(SystemExit):
        bench.main()
    assert "2100 tokens" in (text := capsys.readouterr().err) and "2048 positions" in text


def test_recipes_may_be_measured_alone(bench: Any) -> None:
    parse = bench.arguments().parse_args
    assert bench.own_caches(parse(["--against", "none"])) == bench.own_caches(parse(["--against", ""])) == []
    assert bench.own_caches(parse(["--against", "bf16,fp8"])) == ["bf16", "fp8"]
    assert bench.own_caches(parse([])) == ["bf16", "fp8", "int4_per_token_head"]
    assert bench.own_caches(parse(["--tiny"])) == ["cpu"]


def test_int4_stands_beside_saw_int4(bench: Any) -> None:
    chosen = bench.arguments().parse_args([]).recipe.split(",")
    assert {"int4", "saw-int4"} <= set(chosen)


# --- real runs ---


@pytest.mark.slow
@needs_vllm
def test_tiny(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("--tiny", "--recipe", "oscar:recent=16", "--against", "cpu", "--json", str(report))
    plain, packed = json.loads(report.read_text())["results"]
    assert packed["tokens_that_fit"] > 10 * plain["tokens_that_fit"]  # 2.5 bits against 32, less the windows
    rates = packed["output_tokens_per_second"]
    assert len(rates) == 2 and min(rates.values()) > 0 and "| oscar:recent=16 |" in done.stdout


@needs_vllm
def test_serving(tmp_path: Path) -> None:
    """Two concurrencies, three shares of hits, a long context and as many as fit, on one engine."""
    report = tmp_path / "report.json"
    asked = "--tiny --recipe saw-int4 --concurrency 1,4 --hits 0,0.5,1 --lengths 512+6 --rounds 2 --long 700 --fill 600"
    done = run(*asked.split(), "--kv-gib", "0.004", "--json", str(report))
    plain, packed = json.loads(report.read_text())["results"]
    for found in (plain, packed):
        points = {(p["kind"], p["concurrency"], p["hits"]): p for p in found["points"]}
        assert len(points) == 8
        for (_, concurrency, hits), point in points.items():
            assert point["ttft_s"]["p99"] >= point["ttft_s"]["median"] > 0 and point["tpot_ms"]["median"] > 0
            assert point["prefill_seconds"] + point["decode_seconds"] == pytest.approx(point["seconds"], rel=0.25)
            assert point["prefill_tokens"] + point["cached_tokens"] >= point["prompt_tokens"]
            if point["kind"] == "serving":
                assert point["requests"] == 2 * concurrency and point["at_once"] <= concurrency
            if concurrency == 1 and point["kind"] == "serving":  # blocks of 128, and never the whole prompt
                assert point["cached_tokens"] == {0: 0, 0.5: 512, 1: 768}[hits]
        assert points["long", 1, 0]["at_once"] == 1
    fill = [next(p for p in found["points"] if p["kind"] == "fill") for found in (plain, packed)]
    assert fill[0]["requests"] == fill[0]["at_once"] == 3  # 15 blocks of 128 hold three times 608 tokens
    assert fill[1]["requests"] == fill[1]["at_once"] == 4  # all of --max-num-seqs
    assert "4 in flight of 8, 512 + 6 tokens, 50% served before" in done.stdout


@pytest.mark.slow
@needs_vllm
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """vLLM's own cache against transformers' own, and a recipe against the same recipe in kvant.Cache."""
    report, model = tmp_path / "report.json", tiny_model(tmp_path / "model")
    byte_tokenizer(model)
    asked = f"--tiny --recipe saw-int4 --compare 3 --compare-lengths 150+12 --compare-model {model}"
    done = run(*asked.split(), "--json", str(report))
    for found in json.loads(report.read_text())["results"]:
        compared = found["compare"]
        assert compared["against"] == "transformers" + (" with kvant.Cache" if found["cache"] == "saw-int4" else "")
        assert len(compared["equal_prefix"]) == 3 and compared["equal_choices_share"] > 0.9, compared
    assert "equal prefix" in done.stdout and "one request" not in done.stdout


@pytest.mark.slow
@needs_vllm
def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = "--tiny --recipe saw-int4 --concurrency 1,2,4 --lengths 64+400 --rounds 3"
    child = subprocess.Popen(
        [*command(*options.split()), "--json", str(report)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("cpu: 1 at once"):
            break
    child.send_signal(signal.SIGTERM)
    child.stderr.read()  # ends when no process of the run is left that holds it
    assert child.wait(60) == 143
    (found,) = json.loads(report.read_text())["results"]
    assert found["points"][0]["requests"] == 3 and len(found["points"]) < 3
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


@pytest.mark.slow
@needs_vllm
def test_a_cache_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = "--tiny --recipe saw-int4 --concurrency 1 --lengths 64+400 --rounds 5000 --limit 15"
    done = subprocess.run(
        [*command(*options.split()), "--json", str(report)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr[-2000:]
    for found in json.loads(report.read_text())["results"]:
        assert found["failed"] == "over 15 s" and found["tokens_that_fit"] > 0
    assert "failed (over 15 s)" in done.stdout
