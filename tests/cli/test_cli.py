"""The command line as a user meets it: a tiny model on disk, real processes' argv, exit codes and files."""

from __future__ import annotations

import argparse
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from kvant import recipes
from kvant.cli import _mistake, main, parser
from kvant.cli.common import print_table
from kvant.cli.recipes import RECOMMENDED
from kvant.engines.vllm import versions
from kvant.eval.tasks import get as get_task
from kvant.layout import Layout
from kvant.ops import OPS, choose
from kvant.ops.cpu import library
from tests.engines.test_hf import make_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a byte-level tokenizer, saved as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("tiny")
    make_model("llama", vocab_size=256 + 4).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def save_tokenizer(path: Path, **options: str) -> None:
    """A byte-level tokenizer of 260 tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **options).save_pretrained(path)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("The keeper lit the lamp and wrote the names of the ships into a green book. " * 20)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_recipes_lists_all_with_the_fields_others_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "recipes", "--json")
    found: list[dict[str, Any]] = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in found] == recipes.names()
    for entry in found:
        assert {"name", "paper", "bpe", "windows", "calibration", "engines", "prefix_safe"} <= entry.keys()
    by_name = {entry["name"]: entry for entry in found}
    assert by_name["saw-int4"]["bpe"] == 4.25
    assert by_name["quarot-int2-win"]["windows"]["key"] == {
        "sink": 64,
        "recent": 256,
        "flush": 1,
        "window_dtype": "model",
    }
    assert [by_name["kvant-2"]["windows"][side]["window_dtype"] for side in ("key", "value")] == ["model", "fp8"]
    assert by_name["quarot-int2-win"]["bpe_32k"] > by_name["quarot-int2"]["bpe_32k"] == 2.25
    assert by_name["int4"]["prefix_safe"] is True
    code, out, _ = run(capsys, "recipes", "--all", "--head-dim", "64")
    assert code == 0
    assert "4.500" in out
    lines = [line.split()[0] for line in out.splitlines() if line.split()]
    assert [name for name in lines if name in by_name] == recipes.names()  # none is wrapped
    assert "served in vLLM: all;" in out and "all but squat, squat-pre" in " ".join(out.split())


def test_recipes_recommends_a_few(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "recipes")
    named = [line.split()[0] for line in out.splitlines() if line.split() and line.split()[0] in recipes.names()]
    assert (code, named) == (0, list(RECOMMENDED))
    assert recipes.DEFAULT in named and recipes.PLAIN in named
    assert "2.20" in out and f"all {len(recipes.names())}" in out


def test_recipes_shows_those_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "recipes", "kvant-2")
    assert code == 0
    for line in (
        "kvant-2: keys in bands of 4, 2 and 0 bits",
        "bits      2.125 per cached number of a full page, 2.197 at 32k tokens with windows (head_dim 128)",
        "windows   4 first and 192 last tokens, keys in full precision and values in fp8",
        "artifact  needed: commands fit it to a model once, or kvant calibrate --recipe kvant-2 --out DIR",
        "Window sink=4 recent=192 flush=1 rollback=0",
        "Window sink=4 recent=192 flush=1 rollback=0 window_dtype=fp8",
    ):
        assert line in out
    code, out, _ = run(capsys, "recipes", "int8", "kvant-2:recent=64", "--json", "--head-dim", "64")
    plain, fitted = json.loads(out)
    assert (code, plain["name"], plain["calibration"], fitted["calibration"]) == (0, "int8", False, True)
    assert fitted["name"] == "kvant-2:recent=64" and fitted["windows"]["key"]["recent"] == 64
    assert fitted["head_dim"] == 64 and fitted["streams"] == {
        side: stream.to_dict() for side, stream in recipes.get("kvant-2:recent=64").streams.items()
    }
    assert [entry["name"] for entry in json.loads(run(capsys, "recipes", "int8,int4", "--json")[1])] == ["int8", "int4"]
    assert "artifact  not needed" in run(capsys, "recipes", "int8")[1]
    for name in recipes.names():
        code, out, _ = run(capsys, "recipes", name)
        assert code == 0 and out.startswith(f"{name}: ") and max(map(len, out.splitlines())) <= 100
    code, _, err = run(capsys, "recipes", "kvant-2", "--all")
    assert code == 2 and "one of the two" in err
    assert "did you mean kvant-2" in run(capsys, "recipes", "kvnt-2")[2]


def test_doctor_names_every_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert {entry["op"] for entry in found["implementations"]} == {"append", "decode", "prefill"}
    reference = [e for e in found["implementations"] if e["name"] == "reference" and e["device"] == "cpu"]
    assert all(e["serves"] == recipes.names() and not e["refused"] for e in reference)
    code, out, _ = run(capsys, "doctor", "--all")
    assert code == 0
    assert "yes transformers ready" in out
    assert "refuses" in out
    assert found["taken"] == []
    used = found["cpu"]["used"]
    assert ("no compiled operations" in out) if used is None else (f"compiled operations use {used}" in out)
    assert used is None or (used in found["cpu"]["instruction_sets"] and found["cpu"]["missing"] is None)


def test_doctor_says_what_serves_a_recipe_and_why_nothing_better(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "doctor", "--recipe", "int4,gear", "--head-dim", "64", "--json")
    found = {(e["recipe"], e["op"]): e for e in json.loads(out)["taken"] if e["device"] == "cpu"}
    assert found.keys() == {(recipe, op) for recipe in ("int4", "gear") for op in OPS}
    for (recipe, op), entry in found.items():
        layout = Layout.of(recipes.get(recipe), 8, 64, device="cpu")
        assert entry["by"] == choose(op, layout, "cpu").name
        assert entry["by"] not in entry["refused"]
    assert "LowRank" in found["gear", "decode"]["refused"]["cpu"] or library.missing()
    code, out, _ = run(capsys, "doctor", "--recipe", "gear")
    assert code == 0
    assert "is done by" in out
    assert run(capsys, "doctor", "--recipe", "nothing")[0] == 2


def test_doctor_answers_for_a_model_in_a_screen(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:
    for argv in (("doctor",), ("doctor", "--model", tiny), ("doctor", "--model", "qwen3-8b")):
        code, out, _ = run(capsys, *argv)
        assert code == 0
        assert len(out.splitlines()) <= 40
        assert all(name in out for name in RECOMMENDED)
    assert "yes model        qwen3-8b: 36 layers, 8 KV heads of 128, bfloat16" in out
    assert "4.5 GiB" in out  # of 32k tokens in 16 bits
    assert "implementation" not in out
    config = transformers.MiMoV2FlashConfig(num_hidden_layers=2)
    config.save_pretrained(tmp_path / "other")
    code, out, _ = run(capsys, "doctor", "--model", str(tmp_path / "other"))
    assert code == 1
    assert "no  model" in out and "other KV heads" in out
    code, out, _ = run(capsys, "doctor", "--model", "no/such/model", "--json")
    assert code == 1
    assert "or a preset (" in json.loads(out)["model"]["refused"]


def test_doctor_says_inside_which_vllm_kvant_was_run_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "ON_GPU", {"0.26": "without torch.compile", "0.33": "with vLLM's defaults"})
    _, out, _ = run(capsys, "doctor")
    told = "inside vLLM 0.26 (without torch.compile), 0.33 (with vLLM's defaults); not inside 0.29, 0.30, 0.31, 0.32"
    assert f"kvant was run on a GPU {told}\n" in out
    _, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)["vllm_on_gpu"]
    assert tuple(found) == versions.KNOWN and found["0.33"] == "with vLLM's defaults" and found["0.32"] is None


@pytest.mark.parametrize(("version", "served"), [("0.29.0", True), ("0.26.0", False), (None, True)])
def test_doctor_says_which_vllm_serves_sliding_windows(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    version: str | None,
    served: bool,
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64}
    transformers.Gemma3TextConfig(num_hidden_layers=6, **sizes).save_pretrained(tmp_path)
    monkeypatch.setattr("kvant.cli.doctor._vllm_version", lambda: version)
    code, out, _ = run(capsys, "doctor", "--model", str(tmp_path))
    assert code == 0 and "5 of them with a sliding window" in out
    assert ("layers with a sliding window need vLLM 0.29 or newer" not in " ".join(out.split())) == served


def test_the_plain_reference_on_a_cpu_is_told(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    options = ("--model", tiny, "--prompt", "hello there", "--max-new-tokens", "2", "--recipe")
    _, _, err = run(capsys, "generate", *options, "gear")
    assert "gear decodes by the slow reference (cpu: it " in err
    _, _, err = run(capsys, "generate", *options, "int4")
    assert ("slow reference" in err) == (library.missing() is not None)


def test_generate_one_recipe(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    code, out, err = run(
        capsys, "generate", "--model", tiny, "--recipe", "int4", "--prompt", "hello there", "--max-new-tokens", "5"
    )
    assert code == 0
    assert "int4: 5 tokens" in err
    assert "3.56 times smaller than 16-bit" in err
    code, out, _ = run(
        capsys,
        "generate",
        *("--model", tiny, "--recipe", "saw-int4", "--prompt", "hello", "--max-new-tokens", "4", "--json"),
    )
    (result,) = json.loads(out)["results"]
    assert result["recipe"] == "saw-int4"
    assert len(result["tokens"]) == 4
    assert result["bpe"] == 4.5


def test_generate_compares_recipes_with_the_full_cache(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    arguments = [
        "generate",
        "--model",
        tiny,
        "--recipe",
        "full,int8,int2:recent=2",
        "--prompt",
        "hello there",
        "--max-new-tokens",
        "8",
    ]
    code, out, _ = run(capsys, *arguments, "--json")
    full, int8, int2 = json.loads(out)["results"]
    assert code == 0
    assert abs(full["kl"]) < 1e-6
    assert full["top1"] == 1.0
    assert 0 < int8["kl"] < int2["kl"]
    assert full["cache_bytes"] > int8["cache_bytes"] > 0
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "int2:recent=2" in out.replace("\n", "")


def test_sampling_repeats_with_its_seed(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    arguments = [
        "generate",
        "--model",
        tiny,
        "--recipe",
        "saw-int4",
        "--prompt",
        "a",
        "--max-new-tokens",
        "12",
        "--temperature",
        "2",
        "--json",
        "--seed",
    ]
    first, again, other = (
        json.loads(run(capsys, *arguments, seed)[1])["results"][0]["tokens"] for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_eval_writes_the_report_others_rely_on(
    capsys: pytest.CaptureFixture[str], tiny: str, text: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    code, out, _ = run(
        capsys, "eval", "--model", tiny, "--recipe", "full,int4", "--text", text, "--context", "60", "--tokens", "50",
        "--prompt", "20", "--chunk", "3", "--json", str(report),
    )  # fmt: skip
    assert code == 0
    data = json.loads(report.read_text())
    assert {"model", "text_sha256", "context", "tokens", "results"} <= data.keys()
    assert (data["context"], data["tokens"], data["prompt"]) == (60, 50, 20)
    for entry in data["results"]:
        assert {"recipe", "bpe", "ppl", "kl", "top1", "attn_rel_mse", "seconds"} <= entry.keys()
    assert [entry["recipe"] for entry in data["results"]] == ["full", "int4"]
    assert "int4" in out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "no temporary file is left"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("generate --model {tiny} --recipe int5 --prompt hi", "unknown recipe 'int5' (did you mean "),
        ("generate --model {tiny} --recipe kvant-2:recent=10000000000 --prompt hi", "recent must be from 0 to 1048576 tokens, got 10000000000"),
        ("generate --model {tiny} --recipe int4:order=2 --prompt hi", "recipe int4 has no field 'order'"),
        ("generate --model {tiny} --recipe saw-int4:order=128 --prompt hi", "order must be a power of two that divides head_dim 64"),
        ("generate --model {tiny} --prompt=", "--prompt is empty: expected some text"),
        ("generate --model {tiny} --prompt hi --max-new-tokens 0", "--max-new-tokens: must be positive, got 0"),
        ("generate --model {tiny} --recipe saw-int4 --prompt hi --max-cache-tokens 5 --max-new-tokens 99 --json", "the cache is full: 1 more pages"),
        ("generate --model /no/such/place --prompt hi", "model '/no/such/place': expected a Hugging Face directory or id, or smollm2"),
        ("generate --model {tiny} --device tpu --prompt hi", "--device must be cpu, cuda or auto, got 'tpu'"),
        ("eval --model {tiny} --recipe int4 --text {text} --context 99999", "text.txt': the text has "),
        ("eval --model {tiny} --recipe int4 --text {text} --context 99999", "a context of 99999 needs at least 100000"),
        ("eval --model {tiny} --recipe int4 --text /no/such/text", "--text '/no/such/text': there is no such file"),
        ("eval --model {tiny} --recipe int4 --text {text} --context 60 --json /no/such/dir/x", "--json '/no/such/dir/x': there is no directory"),
        ("eval --model {tiny} --recipe int4 --text {text} --context 60 --json /dev/null", "--json '/dev/null': expected a file, got a device"),
        ("eval --model {tiny} --recipe int4 --text {text} --json", "--json: expected FILE"),
        ("eval --json --recipe int4", "--json: expected FILE"),
        ("check --json out.json", "--json: takes no value, got 'out.json'; it prints JSON, use > out.json"),
        ("check --json=out", "--json: takes no value, got 'out'"),
        ("recipes --json out.json", "--json: takes no value, got 'out.json'"),
        ("artifacts --json out.json", "--json: takes no value, got 'out.json'"),
        ("artifacts show --json out.json", "--json: takes no value, got 'out.json'"),
        ("plan --context", "--context: expected N"),
        ("eval --model {tiny} --recipe , --text {text}", "expected one or more recipes"),
        ("eval --model {tiny} --recipe int4 --text {text} --context 60 --chunk 0", "--chunk: must be positive, got 0"),
        ("eval --model {tiny} --recipe int4 --text {text} --context 60 --offset -5", "--offset: must be at least 0, got -5"),
        ("eval --model {tiny} --recipe int4 --text {text} --context 60 --offset 999999", "--offset 999999: the model has"),
        ("eval --model {tiny} --recipe int4 --task file", "unknown task 'file'"),
        ("generate --model {tiny} --prompt hi --threads 100000", "--threads must be from 1 to "),
        ("generate --model {tiny} --prompt hi --temperature nan", "--temperature must be a finite number of at least 0, got nan"),
        ("generate --model {tiny} --prompt \udcff", "--prompt: expected text in UTF-8"),
        ("plan --context 32x", "--context: expected a number of tokens such as 8192 or 32k, got '32x'"),
        ("plan --context k", "--context: expected a number of tokens such as 8192 or 32k, got 'k'"),
        ("bench attention --context 1k,0", "--context: must be positive, got 0"),
        ("plan --colour", "unrecognized arguments: --colour"),
        ("recipes --head-dim 0", "--head-dim must be positive, got 0"),
        ("doctor --head-dim 0", "heads and head_dim must be positive, got 8 and 0"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tiny: str, text: str, argv: str, message: str
) -> None:
    code, out, err = run(capsys, *argv.format(tiny=tiny, text=text).split())
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("kvant: ")]
    assert len(lines) == 1, err
    assert message in lines[0]


@pytest.mark.parametrize(
    "argv",
    [
        "eval --recipe int4 --task needle --model",
        "eval --recipe int4 --text {text} --model",
        "tune --bits 2.5 --out {out} --model",
        "calibrate --recipe oscar --out {out} --model",
        "fold --recipe quarot-int2 --out {out}",
        "check --model",
        "generate --prompt hi --model",
        "plan --model",
    ],
)
def test_an_unknown_model_is_one_line_that_says_what_was_expected(
    capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, why in (("nobody/nothing", ""), ("/no/such/place", "there is no such directory")):
        code, out, err = run(capsys, *argv.format(text=text, out=tmp_path / "out").split(), name)
        assert (code, out) == (2, "")
        start = f"kvant {argv.split()[0]}: model {name!r}: expected a Hugging Face directory or id, "
        assert err.startswith(start) and err.count("expected") == err.count("\n") == 1 and why in err


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
    ],
)  # fmt: skip
def test_memory_that_is_not_there_is_one_line(error: Exception, mistake: bool) -> None:
    assert _mistake(error) is mistake


def test_a_narrow_terminal_breaks_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Output that is no terminal has 100 columns: 14 numbers of 9 digits do not fit."""
    columns = [("cache", "left"), *((f"bytes a token {i}", "right") for i in range(14)), ("why", "left")]
    print_table("", columns, [["kvant-4-fast", *["1,165,056"] * 14, "a reason of some words"]])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "kvant-4-fast" in line]
    assert row.count("1,165,056") == 14


def test_unknown_commands_and_options_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "fly")[0] == 2
    assert run(capsys, "recipes", "--colour")[0] == 2
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("kvant 0.")


def test_plan_counts_from_a_config_alone(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    code, out, _ = run(
        capsys, "plan", "--model", "llama-3.1-8b", "--recipe", "saw-int4,kitty", "--memory", "16GiB", "--json"
    )
    assert code == 0
    first, second = json.loads(out)["plans"]
    assert first["recipe"]["bytes_per_token"] == 32 * 2 * 8 * 128 * 4.25 / 8
    assert first["bf16"]["requests"] == 16 < first["fp8"]["requests"] == 32 < first["recipe"]["requests"] == 60
    assert second["recipe"]["sequence_bytes"] > 0 == first["recipe"]["sequence_bytes"]
    code, out, _ = run(
        capsys,
        "plan",
        "--model",
        tiny,
        "--recipe",
        "saw-int4",
        "--memory",
        "10MB",
        "--context",
        "100",
        "--tensor-parallel",
        "2",
    )
    assert code == 0
    assert "saw-int4" in out
    assert "with 1 KV heads" in " ".join(out.split())
    code, out, _ = run(capsys, "plan", "--presets")
    assert "qwen3-32b" in out
    code, out, _ = run(capsys, "plan", "--presets", "--json")
    assert json.loads(out)["presets"]["qwen3-32b"] == {"layers": 64, "kv_heads": 8, "head_dim": 128}
    code, _, err = run(capsys, "plan", "--memory", "24")
    assert code == 2
    assert "24GiB?" in err
    code, _, err = run(capsys, "plan", "--model", "/no/such", "--memory", "1GiB")
    assert code == 2
    assert "expected a Hugging Face directory or id" in err


def test_numbers_of_tokens_take_k_and_m() -> None:
    def given(line: str) -> argparse.Namespace:
        return parser().parse_args(line.split())

    assert given("plan --context 32768").context == 32768
    assert [given(f"plan --context {text}").context for text in ("32k", "128K", "1M")] == [32 << 10, 128 << 10, 1 << 20]
    text = given("eval --context 2k --tokens 4k --prompt 1k --chunk 1k --offset 16k --html x --request-context 1M")
    assert (text.context, text.tokens, text.prompt, text.chunk) == (2048, 4096, 1024, 1024)
    assert (text.offset, text.request_context, given("eval --offset 0").offset) == (16 << 10, 1 << 20, 0)
    bench = given("bench prefill --context 4k,8192 --new 1k,2k --new-tokens 1k --sliding-window 4k")
    assert (bench.context, bench.new, bench.new_tokens, bench.sliding_window) == (
        [4096, 8192],
        [1024, 2048],
        1024,
        4096,
    )
    generate = given("generate --max-new-tokens 1k --max-cache-tokens 8k")
    assert (generate.max_new_tokens, generate.max_cache_tokens) == (1024, 8192)
    calibrate = given("calibrate --recipe oscar --out x --tokens 4k --max-position 1M")
    assert (calibrate.tokens, calibrate.max_position) == (4096, 1 << 20)
    assert (given("check --tokens 1k").tokens, given("tune --bits 2 --out x --tokens 8k").tokens) == (1024, 8192)
    assert get_task("needle:length=8k") == get_task("needle:length=8192")


def test_no_tokens_are_refused_by_the_parser(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nothing is loaded, and no other mistake of the command line is looked for."""
    monkeypatch.setattr("kvant.models.load", lambda *args: pytest.fail("loaded"))
    required = {"calibrate": ("--recipe", "oscar", "--out", "x"), "tune": ("--bits", "2", "--out", "x")}
    for command in ("calibrate", "check", "eval", "tune"):
        for count in ("0", "-3"):
            code, out, err = run(capsys, command, *required.get(command, ()), "--tokens", count)
            assert (code, out, err) == (2, "", f"kvant {command}: --tokens: must be positive, got {count}\n")
    code, _, err = run(capsys, "check", "--recipe", "int4", "--tokens", "15")
    assert (code, err) == (2, "kvant check: --tokens must be at least 16, got 15\n")


def test_plan_refuses_what_serving_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers.MiMoV2FlashConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    code, out, err = run(capsys, "plan", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert "cannot serve mimo_v2_flash: its sliding layers have other KV heads" in err
    transformers.GPTJConfig().save_pretrained(tmp_path)
    code, out, err = run(capsys, "plan", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert "cannot serve gptj: its attention does not go through" in err


def test_a_chat_reuses_its_pages(
    capsys: pytest.CaptureFixture[str], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("how are you\n\nand you\n"))
    arguments = ["generate", "--model", tiny, "--recipe", "full", "--chat", "--max-new-tokens", "6"]
    code, out, err = run(capsys, *arguments, "--prompt", "hello", "--json")
    assert code == 0, err
    turns = json.loads(out)["turns"]
    assert [turn["prompt"] for turn in turns] == ["hello", "how are you", "and you"]
    assert turns[0]["reused"] == 0
    for before, after in itertools.pairwise(turns):
        assert before["prompt_tokens"] <= after["reused"] < after["prompt_tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhow are you\nand you\n"))
    code, out, err = run(capsys, *arguments)
    assert out.splitlines() == [line for turn in turns for line in turn["text"].splitlines()]
    assert f"{turns[1]['reused']} of {turns[1]['prompt_tokens']} prompt tokens re-used" in err
    assert run(capsys, "generate", "--model", tiny, "--chat", "--recipe", "int4,int8")[0] == 2
    assert run(capsys, "generate", "--model", tiny)[0] == 2
