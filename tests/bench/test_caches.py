"""Caches side by side on a model: the same tokens for all, contexts that stay equal, shares that add up. No test looks at a time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import models, recipes
from kvant.bench import caches
from kvant.cli import main
from tests.engines.test_hf import make_model


def tiny() -> Any:
    return make_model("llama", vocab_size=97, head_dim=64)


def test_every_cache_reads_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "HOPELESS", float("inf"))
    model = tiny()
    chosen = [recipes.get(name) for name in ("int4", "kivi-k2v2")]
    readers, missing = caches.contenders(model, chosen, dict.fromkeys(("int4", "kivi-k2v2")), None, 99, None)
    names = [reader.name for reader in readers]
    assert names[0] == "DynamicCache"
    assert names[-2:] == ["int4", "kivi-k2v2"]
    assert {"QuantizedCache hqq", "QuantizedCache quanto"} <= {*names, *missing}
    assert ("llama.cpp" in missing) and ("GGUF" in missing["llama.cpp"] or "not installed" in missing["llama.cpp"])
    tokens = torch.randint(0, model.config.vocab_size, (70 + 6,)).tolist()
    found = caches.measure(readers, tokens, [70, 40], new_tokens=2, repeat=3, say=lambda text: None)
    assert [(r.name, r.context) for r in found] == [(name, context) for context in (40, 70) for name in names]
    for reader in readers:
        assert isinstance(reader, caches.OfTransformers)
        assert reader.cache.get_seq_length() == 76
    full = found[len(names)]
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 76
    assert full.cache_bytes == numbers * model.dtype.itemsize
    assert (full.times, full.append, full.decode) == (1.0, None, None)
    for result in found:
        assert 0 < result.low <= result.tokens_per_second <= result.high
        if result.name in ("int4", "kivi-k2v2"):
            assert result.append is not None and result.decode is not None
            assert 0 < result.append < 1 and 0 < result.decode < 1 and result.append + result.decode < 1
            assert result.cache_bytes > 0
    assert found[-2].cache_bytes < full.cache_bytes / 4


class Tiring(caches.OfTransformers):
    """Reads no token after the prompt, which takes it long."""

    def read(self, tokens: Any) -> None:
        self.steps = getattr(self, "steps", 0) + (len(tokens) == 1)

    def warm_up(self, tokens: Any) -> None:
        pass


def test_a_hopeless_cache_is_left_out_after_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    readers, _ = caches.contenders(model, [recipes.get("int4")], {"int4": None}, None, 99, None)
    first, last, slow = readers[0], readers[-1], Tiring(model, "slow", lambda: None)
    measured = caches.timed
    monkeypatch.setattr(
        caches, "timed", lambda call: (call(), (99.0, 0.0))[1] if call.func == slow.read else measured(call)
    )
    told: list[str] = []
    tokens = torch.randint(0, model.config.vocab_size, (60,)).tolist()
    found = caches.measure([first, slow, last], tokens, [40], new_tokens=2, repeat=3, say=told.append)
    assert [result.name for result in found] == ["DynamicCache", "int4"]
    assert slow.steps == 2
    assert told[-1] == "left out, since it is at least 10 times slower than DynamicCache: slow"


def test_every_cache_is_warmed_up_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads a prompt and a token before anything is timed, with another cache than the one that is measured."""
    monkeypatch.setattr(caches, "HOPELESS", float("inf"))
    monkeypatch.setattr(caches, "WARM_UP", 20)
    model = tiny()
    reads: list[tuple[str, int, int]] = []
    read = caches.OfTransformers.read

    def seen(self: Any, tokens: Any) -> None:
        reads.append((self.name, len(tokens), id(self.cache)))
        read(self, tokens)

    monkeypatch.setattr(caches.OfTransformers, "read", seen)
    readers, _ = caches.contenders(model, [recipes.get("int4")], {"int4": None}, None, 99, None)
    assert {reader.name for reader in readers} >= {"DynamicCache", "int4"}
    own = {reader.name: id(reader.cache) for reader in readers if isinstance(reader, caches.OfTransformers)}
    tokens = torch.randint(0, model.config.vocab_size, (44,)).tolist()
    caches.measure(readers, tokens, [40], new_tokens=2, repeat=1, say=lambda text: None)
    first = reads[: 2 * len(own)]
    assert [(name, count) for name, count, _ in first] == [(name, count) for name in own for count in (20, 1)]
    assert all(cache != own[name] for name, _, cache in first)
    assert all(cache == own[name] for name, _, cache in reads[2 * len(own) :])


def test_contexts_too_close_are_refused() -> None:
    model = tiny()
    readers, _ = caches.contenders(model, [], {}, None, 99, None)
    with pytest.raises(ValueError, match="contexts must be 6 tokens apart, got \\[10, 12\\]"):
        caches.measure(readers[:1], [1] * 30, [10, 12], new_tokens=2, repeat=3, say=lambda text: None)


@pytest.mark.model
@pytest.mark.skipif(not (models.cache_dir() / "smollm2-135m-instruct").exists(), reason="SmolLM2 has not been fetched")
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama.cpp would want its own file")
def test_the_command_measures_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    options = ["--recipe", "saw-int4", "--context", "70", "--new-tokens", "2", "--repeat", "1", "--threads", "1"]
    assert main(["bench", "generate", *options, "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert report["threads"] == 1
    assert {"DynamicCache", "saw-int4", "llama.cpp"} <= {result["name"] for result in report["results"]}
    out = capsys.readouterr().out
    assert "generation, smollm2, 70 tokens, 1 threads" in out
    assert "llama.cpp: not installed: pip install llama-cpp-python" in out
    assert main(["bench", "generate", *options, "--batch", "2"]) == 2
    assert "takes one sequence" in capsys.readouterr().err
