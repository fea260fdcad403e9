"""What is measured is checked first, on a CPU as on a GPU; no test looks at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.bench import append, attention, generate, prefill, timing
from kvant.bench.synthetic import Shape, copies, fill, fitted
from kvant.bench.timing import DISTURBED, Times, compared, in_turn, waiting
from kvant.cli import main
from kvant.ops import choose, reference, registry

CPU = torch.device("cpu")
SHAPE = Shape(2, 150, 4, 2, 64, "float32")


@pytest.mark.parametrize("name", ["full", "int4", "quarot-int2-win", "oscar", "kvant-4-fast", "kvant-2", "kivi-k2v2"])
def test_attention_is_checked_and_compared(name: str) -> None:
    work = attention.packed(recipes.get(name), SHAPE, CPU)
    assert work.result.implementation == choose("decode", work.calls[0].args[0].layout, CPU).name  # type: ignore[attr-defined]
    assert 0 <= work.result.error < 1e-3
    others = [attention.Work(dataclasses.replace(work.result, name=n, packed_bytes=8), [], n != "c") for n in "abc"]
    times = {
        work.result.name: Times(0.5, 0.4, 0.6),
        "a": Times(2.0, 1, 3),
        "b": Times(1.0, 1, 3),
        "c": Times(0.1, 0, 1),
    }
    found = attention.compared([work, *others], times)
    assert [r.name for r in found] == [name, "a", "b", "c"]
    assert {r.baseline for r in found} == {"b"}  # c is quicker, but no SDPA
    assert (found[0].seconds, found[0].low, found[0].high, found[0].times) == (0.5, 0.4, 0.6, 2.0)
    assert found[0].limit == 8 / work.result.packed_bytes
    assert found[0].share == found[0].times / found[0].limit


def test_attention_over_full_caches_is_right_in_every_type() -> None:
    found = [work.result for work in attention.full(SHAPE, CPU)]
    kinds = {"sdpa {}, rows", "sdpa {}, grouped", "sdpa {}, repeated", "matmul {}"}
    limits = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
    assert {r.name for r in found} == {kind.format(dtype) for kind in kinds for dtype in limits}
    for result in found:
        assert 0 < result.error < limits[result.shape["dtype"]], result.name


def test_the_recipe_full_in_pages_of_random_order_is_one_of_them() -> None:
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    assert attention.full_layout(shape, CPU).bits_per_element() == 16
    chosen = choose("decode", attention.full_layout(shape, CPU), CPU, "reference")
    call, error = attention._own(shape, CPU, chosen)
    table = call.args[2].block_table  # type: ignore[attr-defined]
    assert sorted(table.flatten().tolist()) == list(range(6))
    assert 0 < error < attention.LIMIT
    wrong = dataclasses.replace(chosen, name="wrong", run=lambda *args, **options: 1.01 * chosen.run(*args, **options))
    with pytest.raises(
        ValueError, match="wrong decodes recipe full with a relative error of 1.0.e-02, more than 0.002"
    ):
        attention._own(shape, CPU, wrong)
    assert attention.OWN not in {work.result.name for work in attention.full(shape, CPU)}  # of GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_baselines_have_our_own_kernel() -> None:
    shape, device = dataclasses.replace(SHAPE, dtype="bfloat16"), torch.device("cuda")
    found = {work.result.name: work for work in attention.full(shape, device)}
    assert found[attention.OWN].full and found[attention.OWN].result.implementation == "cuda-full"
    assert 0 < found[attention.OWN].result.error < attention.LIMIT
    assert attention.OWN not in {work.result.name for work in attention.full(shape, device, paged=False)}
    assert attention.own(SHAPE, device) is None  # float32


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **kwargs: object) -> torch.Tensor:
        return reference.decode(*args, **kwargs) * 1.01  # type: ignore[arg-type]

    broken = registry.Implementation("decode", "wrong", wrong, lambda layout, device: None, rank=99)
    monkeypatch.setitem(registry._FOUND, ("decode", "wrong"), broken)
    with pytest.raises(
        ValueError, match="wrong decodes recipe int4 with a relative error of 1.00e-02, more than 0.002: not timed"
    ):
        attention.measure([recipes.get("int4")], SHAPE, CPU, repeat=1)


def test_bytes_read_are_pages_and_windows() -> None:
    plain = fill(recipes.get("int4"), SHAPE, CPU)
    assert attention.read_bytes(plain) == 2 * 3 * plain.cache.layout.page_bytes
    shape = dataclasses.replace(SHAPE, batch=1, dtype="bfloat16")
    windowed = fill(recipes.get("int4:sink=64,recent=20"), shape, CPU)  # 64 + 66 packed + 20
    assert attention.read_bytes(windowed) == 2 * windowed.cache.layout.page_bytes + 2 * 84 * 2 * 64 * 2


def test_pages_are_shuffled_and_read_as_before() -> None:
    filled = fill(recipes.get("int2:sink=3,recent=5"), SHAPE, CPU)
    assert sorted(filled.batch.block_table.flatten().tolist()) == list(range(6))
    query = torch.randn(2, 4, 64)
    out = reference.decode(filled.store, query, filled.batch, scale=0.1)
    for store in copies(filled, 3 * filled.store.nbytes):
        assert torch.equal(reference.decode(store, query, filled.batch, scale=0.1), out)


def test_append_and_prefill_are_checked() -> None:
    for name in ("int4", "squat", "kvant-4-fast"):
        (found,) = append.measure([recipes.get(name)], SHAPE, CPU, repeat=1)
        assert found.error < 1e-3
        assert found.differing < 1e-3
        assert found.share == found.bandwidth / found.copy_bandwidth
    one = dataclasses.replace(SHAPE, batch=1, context=1)  # its token waits in the overlay for a group of 128
    (found,) = append.measure([recipes.get("kitty-pro")], one, CPU, repeat=1)
    assert (found.error, found.differing) == (0.0, 0.0)
    for window in (None, 30):
        recipe = recipes.get("saw-int4")
        done = prefill.measure(recipe, SHAPE, CPU, repeat=1, new_tokens=20, sliding_window=window)
        assert done.error < 1e-5 and done.sliding_window == window


def test_calibrated_recipes_are_fitted() -> None:
    assert fitted(recipes.get("int4"), SHAPE, CPU) == {}
    assert set(fitted(recipes.get("oscar"), SHAPE, CPU)) == {
        *("key.transforms[0].basis", "value.transforms[0].basis", "key.codec.clip", "value.codec.clip")
    }


@pytest.mark.parametrize("work", ["attention", "append", "prefill"])
def test_the_command_writes_its_results(work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    shape = ["--batch", "1,2", "--context", "70,50", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
    assert main(["bench", work, "--recipe", "int4,int2", *shape, "--repeat", "1", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert report["work"] == work
    named = [(r.get("recipe") or r["name"], r["shape"]["batch"]) for r in report["results"]]
    assert [each for each in named if each[0] in ("int4", "int2")] == [
        ("int4", 1),
        ("int2", 1),
        ("int4", 2),
        ("int2", 2),
    ]
    out, err = capsys.readouterr()
    left_out = sum(line.count("x)") for line in err.splitlines() if "left out" in line)
    assert len(named) + left_out == (4 if work != "attention" else 4 + 2 * 12)
    assert "int2" in out


def test_baselines_that_are_ten_times_slower_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {
        "fast": iter([(3.0, 0.0), (1.0, 0.0), (1.2, 0.0)]),  # its first run was slow
        "slower": iter([(9.0, 0.0)]),
        "disturbed": iter([(50.0, 20.0), (2.0, 0.0)]),
        "disturbed and hopeless": iter([(80.0, 20.0), (30.0, 0.0)]),
        "disturbed twice": iter([(80.0, 75.0), (90.0, 86.0)]),  # fast, on a machine that is busy all the time
        "hopeless": iter([(40.0, 0.0)]),  # not tried again
    }
    monkeypatch.setattr(timing, "timed", lambda call: next(took[call()]))
    found = timing.hopeless({name: lambda name=name: name for name in took})  # type: ignore[misc]
    assert found == {"disturbed and hopeless": 30.0, "hopeless": 40.0}
    monkeypatch.undo()

    slow = attention.full(SHAPE, CPU)[0].result.name
    monkeypatch.setattr(attention, "hopeless", lambda calls: {slow: 31.0})
    told: list[str] = []
    results = attention.measure([recipes.get("int4")], SHAPE, CPU, repeat=1, say=told.append)
    assert slow not in {result.name for result in results}
    assert told == [f"left out, since they are at least ten times slower than the fastest baseline: {slow} (31x)"]


def test_decode_of_several_queries_is_checked_and_compared_with_one(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    shape = ["--batch", "2", "--context", "90", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    command = ["bench", "attention", "--recipe", "int4:recent=8,int2", *shape, "--queries", "3,1", "--repeat", "1"]
    assert main([*command, "--json", str(target)]) == 0
    results = json.loads(target.read_text())["results"]
    assert [(x["name"].split(":")[0], x["queries"]) for x in results] == [
        ("int4", 1), ("int4", 3), ("int2", 1), ("int2", 3),
    ]  # fmt: skip
    for one, three in zip(results[::2], results[1::2], strict=True):
        assert one["times_one"] == 1.0 and three["times_one"] == three["seconds"] / one["seconds"]
        assert 0 <= three["error"] < 2e-3
    assert main(["bench", "append", "--recipe", "int4", *shape, "--queries", "2"]) == 2


def test_prefill_of_several_numbers_of_new_tokens(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    shape = ["--batch", "1,2", "--context", "70,50", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
    command = ["bench", "prefill", "--recipe", "int4", *shape, "--new", "3,9", "--repeat", "1", "--json", str(target)]
    assert main(command) == 0
    results = json.loads(target.read_text())["results"]
    assert [(r["shape"]["batch"], r["new_tokens"]) for r in results] == [(1, 3), (1, 9), (2, 3), (2, 9)]
    for result in results:
        assert (
            result["baselines"][result["baseline"]] == result["baseline_seconds"] == min(result["baselines"].values())
        )
        assert result["times"] == result["baseline_seconds"] / result["seconds"]


def test_prefill_of_a_layer_with_a_sliding_window(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--batch", "1", "--context", "70", "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--repeat", "1"]
    assert main(["bench", "prefill", "--recipe", "int4", *shape, "--sliding-window", "40"]) == 0
    assert "window of 40" in capsys.readouterr().out
    assert main(["bench", "append", "--recipe", "int4", *shape, "--sliding-window", "40"]) == 2
    assert "--sliding-window is for prefill" in capsys.readouterr().err


def test_generation_is_measured_with_every_cache(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    shape = ["--batch", "2", "--context", "70", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    assert (
        main(
            [
                "bench",
                "generate",
                "--recipe",
                "int8,int4",
                *shape,
                "--layers",
                "2",
                "--new-tokens",
                "3",
                "--json",
                str(target),
            ]
        )
        == 0
    )
    found = json.loads(target.read_text())["results"]
    assert [r["recipe"] for r in found] == ["transformers", "int8", "int4"]
    assert found[0]["cache_bytes"] == 2 * 2 * 2 * 73 * 2 * 32 * 4  # layers, sequences, keys and values, float32
    assert found[0]["cache_bytes"] > found[1]["cache_bytes"] > found[2]["cache_bytes"]
    assert all(r["tokens_per_second"] > 0 for r in found)
    assert found[0]["error"] == 0
    assert all(0 < r["error"] < 2e-3 for r in found[1:])
    assert main(["bench", "generate", "--recipe", "oscar", *shape, "--layers", "1"]) == 2


@pytest.mark.parametrize("name", [None, "int4"])
def test_generation_is_warmed_up_with_every_cache(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is thrown away reads a prompt and a token before the clock is read."""
    shape = Shape(2, 70, 4, 2, 32, "float32")
    model = generate.make_model(shape, 2, CPU)
    seen: list[Any] = []
    step, now = generate._step, generate._now

    def recorded(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        seen.append((tuple(tokens.shape), cache))
        return step(model, tokens, cache)

    def clock(device: torch.device) -> float:
        seen.append("clock")
        return now(device)

    monkeypatch.setattr(generate, "WARM_UP", 20)
    monkeypatch.setattr(generate, "_step", recorded)
    monkeypatch.setattr(generate, "_now", clock)
    generate.measure(model, None if name is None else recipes.get(name), shape, 3)
    one = (2, 1)
    shapes = [each if each == "clock" else each[0] for each in seen]
    assert shapes == [(2, 20), one, "clock", (2, 70), "clock", one, one, one, "clock"]
    spare, own = seen[0][1], seen[3][1]
    assert spare is seen[1][1] is not own and type(spare) is type(own)


def test_a_folded_recipe_is_read_without_its_value_transforms(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--context", "200"]
    assert main(["bench", "attention", "--recipe", "oscar", "--folded", *shape, "--json", str(target)]) == 0
    found = json.loads(target.read_text())["results"][0]
    assert found["name"] == "oscar, folded" and 0 < found["error"] < 2e-3
    assert main(["bench", "generate", "--recipe", "oscar", "--folded", *shape]) == 2


def test_a_recipe_without_value_transforms_is_timed_as_it_is_beside_folded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--context", "200"]
    assert main(["bench", "attention", "--recipe", "saw-int4,oscar", "--folded", *shape, "--json", str(target)]) == 0
    assert [each["name"] for each in json.loads(target.read_text())["results"][:2]] == ["saw-int4", "oscar, folded"]
    told = [line for line in capsys.readouterr().err.splitlines() if "to fold" in line]
    assert told == ["kvant: recipe saw-int4 has no value transforms to fold: it is timed as it is"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "int4,saw-int4", "--folded"], "recipe int4, saw-int4 has no value transforms to fold"),
        (["--recipe", "int4", "--batch", "1,2", "--context", "3,4,5"], "must have the same number of entries"),
        (["--recipe", "int4", "--batch", "many"], "--batch must be numbers separated by commas, got 'many'"),
        (["--recipe", "int4", "--heads", "3", "--kv-heads", "2"], "heads must be a multiple of kv_heads"),
        (["--recipe", "int4", "--device", "tpu"], "--device must be cpu or cuda"),
        (["--recipe", "nothing"], "nothing"),
        (["--recipe", "int4", "--folded"], "recipe int4 has no value transforms to fold"),
    ],
)
def test_mistakes_end_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--memory", "1KiB"], ["--sweep", "--batch", "1"]])
def test_generation_in_memory_has_one_context_by_default(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def stop(shape: Shape, *rest: Any) -> Any:
        seen.append(shape.context)
        raise ValueError("made")

    monkeypatch.setattr(generate, "make_model", stop)
    small = ["--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--layers", "1", "--new-tokens", "4"]
    assert main(["bench", "generate", "--recipe", "int4", *small, *options]) == 2
    told = capsys.readouterr().err
    assert seen == [8192] if "--sweep" in options else "holds no full cache of 8196 tokens" in told, told


def test_disturbed_runs_count_only_where_there_are_no_others() -> None:
    some = [(1.0, 0.0), (2.0, DISTURBED), (3.0, 0.0), (9.0, 1.0)]
    loud = [(s, 1.0) for s in (1.0, 3.0, 5.0, 7.0, 9.0)]
    assert compared({"some": some})["some"] == Times(2.0, 1.5, 2.5, runs=3, disturbed=1)
    both = compared({"some": some, "loud": loud})  # like is compared with like
    assert both["some"] == Times(2.5, 1.75, 4.5, runs=4, disturbed=1)
    assert both["loud"] == Times(5.0, 3.0, 7.0, runs=5, disturbed=5)
    assert Times.of([4.0]) == Times(4.0, 4.0, 4.0, runs=1)
    assert waiting() >= 0


def test_what_is_compared_runs_in_turn() -> None:
    ran: list[str] = []
    found = in_turn({name: (lambda name=name: ran.append(name)) for name in "ab"}, 3)
    assert set(found) == {"a", "b"}
    assert ran[:2] == ["a", "b"]  # these did not count
    assert "".join(ran[2:]) == "ab" * ((len(ran) - 2) // 2)
    assert 6 <= len(ran) - 2 <= 2 * 3 * 4
    assert all(times.low <= times.median <= times.high for times in found.values())
