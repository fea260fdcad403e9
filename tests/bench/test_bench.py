"""What is measured is checked first, on a CPU as on a GPU; no test looks at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kvant import recipes
from kvant.bench import append, attention, prefill
from kvant.bench.synthetic import Shape, copies, fill, fitted
from kvant.cli import main
from kvant.ops import reference, registry

CPU = torch.device("cpu")
SHAPE = Shape(2, 150, 4, 2, 64, "float32")


@pytest.mark.parametrize("name", ["full", "int4", "quarot-int2-win", "oscar", "kvant-4", "kvant-2", "kivi-k2v2"])
def test_attention_is_checked_and_compared(name: str) -> None:
    found = attention.measure(recipes.get(name), SHAPE, CPU, repeat=1)
    assert found.implementation == "reference"
    assert found.error < 1e-5
    compared = attention.compare(found, SHAPE, {"slow": 2.0, "fast": 1.0})
    assert compared.baseline == "sdpa fast"
    assert compared.times == pytest.approx(1.0 / found.seconds)
    assert compared.limit == SHAPE.full_bytes / found.packed_bytes
    assert set(attention.baseline(SHAPE, CPU, repeat=1)) <= {"flash", "math"}


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **kwargs: object) -> torch.Tensor:
        return reference.decode(*args, **kwargs) * 1.01  # type: ignore[arg-type]

    broken = registry.Implementation("decode", "wrong", wrong, lambda layout, device: None, rank=99)
    monkeypatch.setitem(registry._FOUND, ("decode", "wrong"), broken)
    with pytest.raises(
        ValueError, match="wrong decodes recipe int4 with a relative error of 1.00e-02, more than 0.002: not timed"
    ):
        attention.measure(recipes.get("int4"), SHAPE, CPU, repeat=1)


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
    for name in ("int4", "squat", "kvant-4"):
        found = append.measure(recipes.get(name), SHAPE, CPU, repeat=1)
        assert (found.error, found.differing) == (0.0, 0.0)
    assert prefill.measure(recipes.get("saw-int4"), SHAPE, CPU, repeat=1, new_tokens=20).error < 1e-5


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
    assert [(r["recipe"], r["shape"]["batch"]) for r in report["results"]] == [
        ("int4", 1),
        ("int2", 1),
        ("int4", 2),
        ("int2", 2),
    ]
    assert "int2" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "int4", "--batch", "1,2", "--context", "3,4,5"], "must name as many numbers"),
        (["--recipe", "int4", "--batch", "many"], "--batch must be numbers separated by commas, got 'many'"),
        (["--recipe", "int4", "--context", "0"], "--context must be positive"),
        (["--recipe", "int4", "--heads", "3", "--kv-heads", "2"], "heads must be a multiple of kv_heads"),
        (["--recipe", "int4", "--device", "tpu"], "--device must be cpu or cuda"),
        (["--recipe", "nothing"], "nothing"),
    ],
)
def test_mistakes_end_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *options]) == 2
    assert message in capsys.readouterr().err
