"""Generation with equal memory is measured on what it says: batches that fit, caches that are filled, failures that are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.bench import generate, memory
from kvant.bench.synthetic import Shape
from kvant.cli import main
from kvant.engines import graphs
from kvant.ops.reference import restored
from tests.engines import recorded

SHAPE = Shape(1, 150, 4, 2, 32, "float32")
COMMAND = [
    "bench",
    "generate",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "32",
    "--layers",
    "2",
    "--threads",
    "1",
]


def run(target: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    code = main([*COMMAND, "--json", str(target), *options])
    return code, json.loads(target.read_text())["results"] if target.exists() else []


@pytest.mark.parametrize("prefill", [False, True])
def test_every_cache_has_the_largest_batch_that_fits(
    prefill: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "VOCABULARY", 1000)
    options = [
        "--memory",
        "1MiB",
        "--context",
        "150",
        "--new-tokens",
        "6",
        "--recipe",
        "saw-int4,oscar:recent=16,kivi-k2v2",
    ]
    code, found = run(tmp_path / "out.json", *options, *(["--prefill"] if prefill else []))
    assert code == 0
    full, room = 2 * 2 * 156 * 2 * 32 * 4, 1 << 20  # layers, keys and values, float32
    most = room // full
    kinds = [(each["cache"], each["largest"]) for each in found]
    packed = [name for name in ("saw-int4", "oscar:recent=16", "kivi-k2v2") for _ in range(2)]
    assert kinds == list(
        zip(["full", *packed, "DynamicCache", "StaticCache"], [True, *[True, False] * 3, True, True], strict=True)
    )
    assert all(each["cache_bytes"] <= room and each["tokens_per_second"] > 0 and not each["failed"] for each in found)
    assert all(each["steps"] == 6 - memory.UNTIMED and not each["graph"] for each in found)
    for each in found:
        if each["largest"]:
            assert each["cache_bytes"] // each["batch"] * (each["batch"] + 1) > room, "one more would not fit"
        else:
            assert each["batch"] == most
    assert found[0]["batch"] == most and found[0]["times"] == 1.0
    assert all(0 < each["error"] < 2e-3 for each in found[1:-2])
    said = " ".join(capsys.readouterr().out.split())
    assert "ran without a graph: model and cache must lie on one CUDA device" in said
    assert ("prefilled by the model" if prefill else "not prefilled") in said


def test_a_sweep_measures_every_batch_and_says_which_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = memory.filled

    def broken(model: Any, recipe: Any, work: Any, batch: int) -> Any:
        if batch == 3:
            raise torch.OutOfMemoryError("there is no more")
        return kept(model, recipe, work, batch)

    monkeypatch.setattr(memory, "VOCABULARY", 1000)
    monkeypatch.setattr(memory, "filled", broken)
    options = ["--context", "70", "--new-tokens", "5", "--recipe", "squat,kivi-k2v2", "--sweep", "--batch"]
    code, found = run(tmp_path / "out.json", *options, "1,3")
    assert code == 0
    expected = [(batch, name) for batch in (1, 3) for name in ("full", "squat", "kivi-k2v2")]
    assert [(each["batch"], each["cache"]) for each in found] == expected
    for each in found:
        fits = each["batch"] == 1 or each["cache"] == "full"
        assert (each["tokens_per_second"] > 0) == fits and ("OutOfMemory" in each["failed"]) != fits
        assert each["peak_bytes"] == 0, "there is no GPU"
        assert not fits or (each["times"] > 0 and (each["times"] == 1.0) == (each["cache"] == "full"))
    assert "out of memory" in capsys.readouterr().out
    for wrong in (["--memory", "1MiB"], ["--model", "smollm2"]):
        assert run(tmp_path / "wrong.json", *options, "1", *wrong)[0] != 0


@pytest.mark.parametrize("name", ["saw-int4", "kvant-2", "kitty"])
def test_caches_are_filled_as_if_prompts_had_been_read(name: str) -> None:
    model = generate.make_model(SHAPE, 2, torch.device("cpu"), 100)
    cache = memory.filled(model, recipes.get(name), memory.Work(SHAPE, 2, 20, 1 << 20, False), 3)
    (group,) = cache.groups
    assert (cache.get_seq_length(), cache.batch_size) == (150, 3)
    pages = [page for seq in group.sequences for page in seq.pages]
    assert len(set(pages)) == len(pages) and pages != sorted(pages)
    batch = group.paged.batch(group.sequences)
    for store in group.paged.stores:
        for stream in ("key", "value"):
            read = restored(store, stream, batch)[:, :150]  # type: ignore[arg-type]
            assert bool(read.isfinite().all()) and float(read.std()) > 0.5
            assert torch.equal(read, restored(group.paged.stores[0], stream, batch)[:1, :150].expand_as(read))  # type: ignore[arg-type]
    with torch.no_grad():
        assert bool(model(torch.zeros(3, 1, dtype=torch.int64), past_key_values=cache).logits.isfinite().all())


def test_a_cache_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = memory.filled

    def broken(model: Any, recipe: Any, work: Any, batch: int) -> Any:
        if recipe.name == "int4":
            raise torch.OutOfMemoryError("there is no more")
        return kept(model, recipe, work, batch)

    monkeypatch.setattr(memory, "VOCABULARY", 1000)
    monkeypatch.setattr(memory, "filled", broken)
    options = ["--memory", "1MiB", "--context", "150", "--new-tokens", "5", "--recipe", "int4,int2"]
    code, found = run(tmp_path / "out.json", *options)
    assert code == 2
    assert [bool(each["failed"]) for each in found] == [False, True, True, False, False, False, False]
    assert "could not be measured: int4 at batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1KiB", "--context", "150"], "holds no full cache of 278 tokens"),
        (["--memory", "1GiB", "--context", "150", "--new-tokens", "3"], "--new-tokens must be more than 3"),
        (["--memory", "1GiB", "--batch", "3"], "--memory is for generate with random weights and without --batch"),
        (["--memory", "many", "--context", "150"], "memory must be a number of bytes"),
        (["--memory", "1GiB", "--context", "150,200"], "--memory takes one --context"),
    ],
)
def test_mistakes_end_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["full", "StaticCache"])
def test_full_caches_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a cache of transformers says nothing to the host, and replayed it gives what it gives eagerly."""
    captured = recorded.install(monkeypatch)
    work = memory.Work(SHAPE, 2, 20, 1 << 20, False)
    said = []
    for graph in (False, True):
        torch.manual_seed(3)
        model = generate.make_model(SHAPE, 2, torch.device("cpu"), 100)
        steps = memory._transformers(model, name, work, 3, "sdpa" if name == "full" else None, graph)
        with torch.inference_mode(), steps as step:
            said.append(torch.stack([step(torch.tensor([1, at, 3])).clone() for at in range(9)]))
    assert torch.equal(*said)
    assert len(captured) == 1 and captured[0].replays == 9 - graphs.WARM_UP
    assert bool(said[0].isfinite().all()) and not torch.equal(said[0][3], said[0][4])
