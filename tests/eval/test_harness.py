"""The model "kvant" inside lm-evaluation-harness itself, on task files of our own and a tiny random model."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant.cli import main
from kvant.engines import graphs
from kvant.eval.loglikelihood import Continuation, score
from tests.cli.test_cli import save_tokenizer
from tests.engines.test_hf import make_model
from tests.engines.vllm.engines import lfm2_like
from tests.test_models import write_gguf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'kvant[lm-eval]'"
)

CHOICE = """
task: local_choice
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
WRITE = """
task: local_write
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
ROLLING = """
task: local_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
"""
DATA = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
"""
RECIPE = "int2:sink=2,recent=4"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    model = make_model("llama", num_hidden_layers=1, vocab_size=256 + 4, eos_token_id=2)
    model.save_pretrained(path)
    save_tokenizer(path, eos_token="<eos>")
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tasks: texts of many lengths, choices of one and of several tokens."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "text": f"{'The keeper lit lamp ' * (1 + n % 3)}{n}.",
            "choices": ["A", "B", "C"] if n % 2 else [" a green book", " ships", f" lamp {n}"],
            "answer": n % 3,
            "written": "x",
        }
        for n in range(6)
    ]
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for task in (CHOICE, WRITE, ROLLING):
        name = task.split()[1]
        (path / f"{name}.yaml").write_text(task + DATA.format(path=path / "data.jsonl"))
    return path


@pytest.fixture(autouse=True)
def _harness(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, no log that outlives a test, and none of the thousands of tasks that the harness brings, which take seconds to
    list."""
    import datasets
    import lm_eval.__main__
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(lm_eval.__main__, "setup_logging", lambda: None)
    listing = TaskManager.__init__

    def own_tasks_only(self: Any, *args: Any, **options: Any) -> None:
        listing(self, *args, **{**options, "include_defaults": False})

    monkeypatch.setattr(TaskManager, "__init__", own_tasks_only)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def evaluated(tasks: Path, model: str, names: list[str], batch: int, **arguments: Any) -> dict[str, Any]:
    """What the harness's own `simple_evaluate` gives; "responses" has every response by task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import kvant.eval.harness  # noqa: F401

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks)),
        batch_size=batch,
        device="cpu",
        bootstrap_iters=0,
    )
    found["responses"] = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in found["samples"].items()
    }
    return found


def values(responses: list[Any]) -> list[float]:
    """Log-likelihoods of responses, one after another."""
    return [float(each[0] if isinstance(each, (list, tuple)) else each) for one in responses for (each,) in one]


def test_the_full_recipe_scores_as_the_harness_own_model(tiny: Path, tasks: Path) -> None:
    names = ["local_choice", "local_write", "local_rolling"]
    theirs = evaluated(tasks, "hf", names, 3, pretrained=str(tiny))
    ours = evaluated(tasks, "kvant", names, 3, pretrained=str(tiny), recipe="full")
    for name, metric in (("local_choice", "acc,none"), ("local_write", "exact_match,none")):
        assert ours["results"][name][metric] == theirs["results"][name][metric]
    assert ours["responses"]["local_write"] == theirs["responses"]["local_write"]
    for name in ("local_choice", "local_rolling"):
        found, expected = values(ours["responses"][name]), values(theirs["responses"][name])
        assert len(found) == (18 if name == "local_choice" else 6)
        assert found == pytest.approx(expected, rel=1e-3)


def test_a_hybrid_model_scores_as_the_harness_own_model(tasks: Path, tmp_path: Path) -> None:
    path = lfm2_like(tmp_path / "model")
    save_tokenizer(path, eos_token="<eos>")
    names = ["local_choice", "local_write", "local_rolling"]
    theirs = evaluated(tasks, "hf", names, 3, pretrained=str(path), dtype="float32")
    ours = evaluated(tasks, "kvant", names, 3, pretrained=str(path), dtype="float32", recipe="full")
    assert ours["responses"]["local_write"] == theirs["responses"]["local_write"]
    for name in ("local_choice", "local_rolling"):
        assert values(ours["responses"][name]) == pytest.approx(values(theirs["responses"][name]), rel=1e-3)
    assert ours["config"]["kvant_bits_per_element"] > 16


def test_a_recipe_is_read_packed_and_padding_does_not_matter(tiny: Path, tasks: Path) -> None:
    names = ["local_choice", "local_write", "local_rolling"]
    full = evaluated(tasks, "kvant", names, 3, pretrained=str(tiny), recipe="full")
    many = evaluated(tasks, "kvant", names, 4, pretrained=str(tiny), recipe=RECIPE)
    alone = evaluated(tasks, "kvant", names, 1, pretrained=str(tiny), recipe=RECIPE)
    assert many["responses"]["local_write"] == alone["responses"]["local_write"]
    for name in ("local_choice", "local_rolling"):
        found = values(many["responses"][name])
        assert found == pytest.approx(values(alone["responses"][name]), rel=0.01)
        exact = values(full["responses"][name])
        far = [abs(a - b) > 0.02 * abs(b) for a, b in zip(found, exact, strict=True)]
        assert sum(far) > len(far) // 2, "the packed context shows, also in continuations of one token"
    info = many["config"]
    assert (info["kvant_recipe"], info["kvant_artifact"]) == (RECIPE, None)
    assert info["kvant_bits_per_element"] < 4
    assert set(info["kvant_kernels"]) == {"append", "decode", "prefill"}


def test_log_likelihoods_are_kvants_own(tiny: Path, tasks: Path) -> None:
    import transformers

    found = evaluated(tasks, "kvant", ["local_choice"], 5, pretrained=str(tiny), recipe=RECIPE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    rows = [json.loads(line) for line in (tasks / "data.jsonl").read_text().splitlines()]
    expected = []
    for row in rows:
        for choice in row["choices"]:
            ids = [tokenizer(part)["input_ids"] for part in (row["text"], f" {choice}")]
            ((value, _),) = score(model, kvant.Cache(model, RECIPE), [Continuation.of(*ids, 512)])
            expected.append(value)
    assert values(found["responses"]["local_choice"]) == pytest.approx(expected, rel=0.01)


def test_the_command_registers_the_model_and_passes_arguments_on(
    tiny: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "kvant", "--model_args", f'pretrained={tiny},recipe="{RECIPE}"', "--tasks", "local_choice"]
    options = ["--include_path", str(tasks), "--device", "cpu", "--batch_size", "auto", "--output_path", str(tmp_path)]
    assert main(["lm-eval", *arguments, *options, "--limit", "2"]) == 0
    assert "local_choice" in capsys.readouterr().out
    (report,) = tmp_path.rglob("results*.json")
    config = json.loads(report.read_text())["config"]
    assert (config["model"], config["kvant_recipe"]) == ("kvant", RECIPE)


def test_help_is_ours_and_the_harness(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm-eval", "--help"]) == 0
    assert 'Registers the model "kvant"' in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", "run", "--help"])
    assert not stop.value.code
    assert "--num_fewshot" in capsys.readouterr().out


def test_a_calibrated_recipe_finds_or_makes_its_artifact(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvant.eval.harness import KvantLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = KvantLM(str(tiny), recipe="kvant-4-fast", device="cpu")
    assert made.artifact is not None
    (kept,) = (path.parent for path in tmp_path.rglob("artifact.safetensors"))
    assert KvantLM(str(tiny), recipe="kvant-4-fast", device="cpu").artifact.digest == made.artifact.digest
    given = KvantLM(str(tiny), artifact=str(kept), device="cpu")
    assert (given.recipe.name, given.artifact.digest) == ("kvant-4-fast", made.artifact.digest)
    text = tmp_path / "text.txt"
    text.write_text("The keeper wrote the names of the ships into a green book. " * 20)
    other = KvantLM(str(tiny), recipe="kvant-4-fast", calibration_text=str(text), device="cpu")
    assert other.artifact.digest != made.artifact.digest


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from lm_eval.api.instance import Instance

    from kvant import models
    from kvant.eval.harness import KvantLM

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    lm = KvantLM(str(file), recipe="int4", device="cpu", dtype="float32")
    request = Instance("loglikelihood", {}, ("the path over the hill", " and the other way"), 0)
    ((found, _),) = lm.loglikelihood([request], disable_tqdm=True)
    model, tokenizer = models.load(str(file))
    ids = [tokenizer(text)["input_ids"] for text in request.args]
    ((expected, _),) = score(model, kvant.Cache(model, "int4"), [Continuation.of(*ids, 128)])
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs recipe=NAME or artifact=DIR"),
        ({"recipe": "int5"}, "unknown recipe 'int5'"),
        ({"recipe": "int2:sink=2", "recent": 4}, 'cut the recipe at a comma.*recipe="int2:sink=2,recent=4"'),
        ({"recipe": "int4", "parallelize": True}, "parallelize cannot be served"),
        ({"recipe": "int4", "calibration_text": "nowhere.txt"}, "No such file or directory: 'nowhere.txt'"),
        ({"artifact": "nowhere"}, "nowhere"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    tiny: Path, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvant.eval.harness import HFLM, KvantLM

    monkeypatch.setattr(HFLM, "__init__", lambda *args, **options: pytest.fail("HFLM was reached"))
    with pytest.raises((ValueError, OSError), match=message):
        KvantLM(str(tiny), **arguments)


def test_a_model_that_the_recipe_does_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    from kvant.eval.harness import KvantLM

    make_model("llama", head_dim=24).config.save_pretrained(tmp_path)  # there are no weights to read
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="head_dim"):
        KvantLM(str(tmp_path), recipe="saw-int4:order=64", device="cpu")


def test_a_batch_that_does_not_fit_is_halved(
    tiny: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvant.eval import harness

    names = ["local_choice", "local_write"]
    expected = evaluated(tasks, "kvant", names, 1, pretrained=str(tiny), recipe="full")
    generate, scored, rows = harness.HFLM._model_generate, harness.loglikelihood.score, []

    def small_generate(self: Any, context: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rows.append(len(context))
        if len(context) > 2:
            raise torch.OutOfMemoryError
        return generate(self, context, *args, **options)

    def small_score(model: Any, cache: Any, some: list[Continuation], **options: Any) -> Any:
        if len({one.inputs for one in some}) > 2:
            raise torch.OutOfMemoryError
        return scored(model, cache, some, **options)

    monkeypatch.setattr(harness.HFLM, "_model_generate", small_generate)
    monkeypatch.setattr(harness.loglikelihood, "score", small_score)
    with caplog.at_level(logging.WARNING, logger="kvant"):
        found = evaluated(tasks, "kvant", names, 6, pretrained=str(tiny), recipe="full")
    assert rows == [6, 3, 1, 2, 3, 1, 2]
    assert "out of memory, 3 rows at a time" in caplog.text
    assert found["responses"]["local_write"] == expected["responses"]["local_write"]
    assert values(found["responses"]["local_choice"]) == pytest.approx(
        values(expected["responses"]["local_choice"]), rel=1e-3
    )


def test_a_graph_is_used_where_it_can_be(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the same fixed steps, run eagerly, write what transformers' own loop writes."""
    from lm_eval.api.instance import Instance

    from kvant.eval.harness import KvantLM

    lm = KvantLM(str(tiny), recipe="int4", device="cpu", batch_size=3)
    texts = ["The keeper", "The keeper lit lamp 7 and wrote", "Ships"]
    options = {"until": ["\n\n"], "max_gen_toks": 7}
    requests = [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(texts)]
    assert not lm._captures({})
    expected = lm.generate_until(requests, disable_tqdm=True)
    steps, used = functools.partial(graphs.sample, capture=False), []

    def sample(*args: Any, **inputs: Any) -> Any:
        used.append(inputs["past_key_values"])
        return steps(*args, **inputs)

    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "refuse", lambda *args: None)
    monkeypatch.setattr(graphs, "sample", sample)
    assert lm._captures({})
    assert not lm._captures({"num_beams": 2})
    assert lm.generate_until(requests, disable_tqdm=True) == expected
    assert used == [lm.cache], "one batch, from the packed cache"
    assert lm.cache.batch_size == -1


def test_a_plain_forward_pass_is_refused(tiny: Path) -> None:
    from kvant.eval.harness import KvantLM

    lm = KvantLM(str(tiny), recipe="int4", device="cpu")
    with pytest.raises(RuntimeError, match="says nothing of a recipe"):
        lm._model_call(torch.ones(1, 4, dtype=torch.int64))
