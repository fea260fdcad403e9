from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import models
from kvant.artifact import Artifact
from kvant.calibrate.run import calibrate
from kvant.engines.fingerprint import MARK, fingerprint_of_files
from kvant.engines.fold import folded
from kvant.files import making_directory
from tests.cli.test_cli import run, text, tiny  # noqa: F401 (fixtures)
from tests.conftest import relative_error

SMALL = "oscar:sink=4,recent=16"


@pytest.fixture(scope="module")
def fitted(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:  # noqa: F811
    model, tokenizer = models.load(tiny)
    artifact = calibrate(model, tokenizer, SMALL, "The keeper lit the lamp. " * 40, tokens=300)
    return str(artifact.save(tmp_path_factory.mktemp("fitted")).parent)


def logits(model: Any, cache: Any = None) -> torch.Tensor:
    ids = torch.arange(4, 84)[None]
    with torch.inference_mode():
        return torch.cat([model(ids[:, a : a + 20], past_key_values=cache).logits for a in range(0, 80, 20)], 1)


def test_folds_and_serves(capsys: pytest.CaptureFixture[str], tiny: str, fitted: str, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "a" / "folded"
    code, printed, _ = run(capsys, "fold", tiny, "--artifact", fitted, "--out", str(out), "--json")
    assert code == 0
    report = json.loads(printed)
    config = json.loads((out / "config.json").read_text())
    artifact = Artifact.load(fitted)
    assert config[MARK]["recipe"] == report["recipe"] == artifact.recipe.name
    assert config[MARK]["artifact"] == report["artifact"] == artifact.digest
    assert config[MARK]["layers"] == report["layers"] == config["num_hidden_layers"]
    assert report["logits_changed"] < 1e-4 and report["dtype"] == "float32"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["folded"]  # nothing is left beside it
    assert fingerprint_of_files(out) == fingerprint_of_files(tiny) == report["fingerprint"]
    (model, _), (again, tokenizer) = models.load(tiny), models.load(str(out))
    assert tokenizer("lamp").input_ids
    # a full cache holds v A, and the output projection undoes A
    torch.testing.assert_close(
        logits(again, kvant.Cache(again, "full")), logits(model, kvant.Cache(model, "full")), rtol=1e-3, atol=1e-3
    )
    caches = [kvant.Cache(each, SMALL, artifact=fitted) for each in (model, again)]
    assert [len(cache.recipe.value.transforms) for cache in caches] == [1, 0]
    assert relative_error(logits(again, caches[1]), logits(model, caches[0])) < 1e-2
    code, _, error = run(
        capsys,
        "generate",
        "--model",
        str(out),
        "--recipe",
        SMALL,
        "--artifact",
        fitted,
        "--max-new-tokens",
        "3",
        "--prompt",
        "a lamp",
    )
    assert code == 0, error


def test_what_is_served_with_other_value_transforms_is_refused(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Before, the values of a folded model were transformed twice, without a word."""
    out = str(tmp_path / "folded")
    code, printed, error = run(capsys, "fold", tiny, "--recipe", "quarot-int2", "--out", out)
    assert code == 0, error
    assert printed.strip() == out and "folded quarot-int2 into" in error
    code, _, error = run(
        capsys,
        "generate",
        "--model",
        out,
        "--recipe",
        "saw-int4-kv:order=16",
        "--max-new-tokens",
        "2",
        "--prompt",
        "a lamp",
    )
    assert code == 2
    assert "have other value transforms folded in than those of recipe saw-int4-kv:order=16" in error
    assert "the value transforms of recipe quarot-int2" in error
    code, _, error = run(capsys, "fold", out, "--recipe", "saw-int4-kv:order=16", "--out", str(tmp_path / "twice"))
    assert code == 2 and "folded into it already" in error
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "int4"], "recipe int4 has no value transforms to fold"),
        (["--recipe", "oscar"], "it needs an artifact made by kvant calibrate"),
        (["--recipe", "oskar"], "unknown recipe"),
        ([], "give --artifact DIR"),
        (["--artifact", "/nowhere"], "/nowhere"),
        (["--recipe", "quarot-int2", "--artifact", "FITTED"], "takes no artifact"),
        (["--recipe", "quarot-int2", "--device", "tpu"], "--device must be"),
        (["MODEL", "--recipe", "quarot-int2"], "expected a Hugging Face directory"),
    ],
)
def test_mistakes_leave_nothing(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    fitted: str,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    given = [fitted if each == "FITTED" else each for each in options]
    model = "/nowhere/model" if "MODEL" in given else tiny
    given = [each for each in given if each != "MODEL"]
    code, printed, error = run(capsys, "fold", model, *given, "--out", str(tmp_path / "out"))
    assert code == 2
    assert printed == ""
    assert message in error
    assert not list(tmp_path.iterdir())


def test_quantized_weights_are_refused_before_they_are_loaded(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = json.loads((Path(tiny) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    code, _, error = run(
        capsys, "fold", str(tmp_path / "quantized"), "--recipe", "quarot-int2", "--out", str(tmp_path / "out")
    )
    assert code == 2 and "its weights are quantized" in error


def test_a_directory_with_files_is_not_overwritten(
    capsys: pytest.CaptureFixture[str],
    tiny: str,  # noqa: F811
) -> None:
    before = sorted(os.listdir(tiny))
    code, _, error = run(capsys, "fold", tiny, "--recipe", "quarot-int2", "--out", tiny)
    assert code == 2 and "there are files in it" in error
    assert sorted(os.listdir(tiny)) == before
    code, _, error = run(capsys, "fold", tiny, "--recipe", "quarot-int2", "--out", f"{tiny}/config.json")
    assert code == 2 and "expected a new directory, got a file" in error


def test_what_is_not_written_whole_is_not_there(tmp_path: Path) -> None:
    target = tmp_path / "x"

    def interrupted() -> None:
        with making_directory(target) as directory:
            (directory / "weights").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
    left, young = tmp_path / f".x-{'0' * 16}", tmp_path / f".x-{'1' * 16}"
    for path in (left, young):
        path.mkdir()
    os.utime(left, (time.time() - 10**6,) * 2)
    target.mkdir()
    with making_directory(target) as directory:
        (directory / "weights").write_text("whole")
    assert (target / "weights").read_text() == "whole" and not left.exists() and young.exists()


def test_weights_keep_their_type(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:  # noqa: F811
    """A 16-bit checkpoint is rounded once more: to less than what its type rounds in one pass of the model."""
    model, tokenizer = models.load(tiny, "bfloat16")
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "half")
    exact, rounded = logits(models.load(str(tmp_path / "half"))[0]), logits(model)
    code, printed, error = run(
        capsys, "fold", str(tmp_path / "half"), "--recipe", "quarot-int2", "--out", str(tmp_path / "out"), "--json"
    )
    assert code == 0, error
    report = json.loads(printed)
    assert report["dtype"] == "bfloat16" and 1e-4 < report["logits_changed"] < 0.05
    assert fingerprint_of_files(tmp_path / "out") == fingerprint_of_files(tmp_path / "half")
    again, _ = models.load(str(tmp_path / "out"))  # as float32
    assert models.config_of(str(tmp_path / "out")).dtype == torch.bfloat16
    assert folded(again.config) is not None
    assert relative_error(logits(again), exact) < 2 * relative_error(rounded.float(), exact)
