"""Artifacts: whole or not at all, and refused by name where they do not belong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvant
from kvant import artifact as artifacts
from kvant import files, recipes
from kvant.artifact import FILE, Artifact
from tests.engines.test_hf import make_model
from tests.fitted import made_up_tensors


def made_up(name: str = "oscar", seed: int = 0, layers: int = 3, heads: int = 2, dim: int = 64) -> Artifact:
    generator = torch.Generator().manual_seed(seed)

    def basis() -> torch.Tensor:
        return torch.linalg.qr(torch.randn(1, dim, dim, generator=generator)).Q

    tensors = {
        layer: {
            "key.transforms[0].basis": basis(),
            "key.codec.clip": torch.tensor(0.9),
            "value.transforms[0].basis": basis(),
            "value.codec.clip": torch.tensor(0.92),
        }
        for layer in range(layers)
    }
    return Artifact(recipes.get(name), heads, dim, layers, tensors, {"tokens": 12, "text_sha256": "ab"})


def test_round_trip(tmp_path: Path) -> None:
    artifact = made_up()
    artifact.tensors[1]["extra.half"] = torch.randn(3, 5).bfloat16()
    path = artifact.save(tmp_path / "new" / "place")
    assert path == tmp_path / "new" / "place" / FILE
    for source in (path, path.parent, str(path)):
        again = Artifact.load(source)
        assert again.digest == artifact.digest
        assert again.recipe == artifact.recipe
        assert again.source == artifact.source
        assert (again.layers, again.heads, again.head_dim) == (3, 2, 64)
        for layer, tensors in artifact.tensors.items():
            assert set(again.tensors[layer]) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(again.tensors[layer][name], tensor)
                assert again.tensors[layer][name].dtype == tensor.dtype
    assert [entry.name for entry in path.parent.iterdir()] == [FILE]


def test_the_digest_names_every_number() -> None:
    artifact = made_up()
    digests = {artifact.digest, made_up(seed=1).digest, made_up("oscar:per_head=true").digest, made_up(heads=3).digest}
    artifact.tensors[2]["key.codec.clip"] = torch.tensor(0.9001)
    digests.add(artifact.digest)
    assert len(digests) == 5
    assert made_up("oscar:recent=0").digest == made_up().digest  # windows decide nothing that is fitted


# --- which recipes and models an artifact fits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "oscar",
        "oscar:recent=0",
        "oscar:sink=0,recent=1024",
        "oscar:clip=1",
        "oscar:k.clip=0.96,v.clip=0.92",
        "oscar:k.clip=0.96",
        "oscar:clip=1,group=32",
        "oscar:clip=1,hadamard=none",
        "oscar:clip=1,bitrev=false",
        "oscar:v.target=none,v.clip=1",
    ],
)
def test_recipes_that_need_what_was_fitted_share_an_artifact(name: str) -> None:
    made_up().check(recipes.get(name), 3, 2, 64)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("oscar:per_head=true", "key.transforms"),
        ("oscar:k.target=keys", "key.transforms"),
        ("oscar:v.target=values", "value.transforms"),
        ("oscar:group=32", "key.codec"),  # the clip was searched for other groups
        ("oscar:v.bits=3", "value.codec"),
        ("oscar:k.hadamard=none", "key.codec"),  # and behind another transform
        ("saw-int4-hessian", "key.transforms"),
    ],
)
def test_another_fit_is_refused_by_name(name: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"fitted for recipe oscar, not for {name}: they differ in {place}"):
        made_up().check(recipes.get(name), 3, 2, 64)


def test_a_fixed_clip_does_not_make_a_calibrated_one() -> None:
    with pytest.raises(ValueError, match=r"they differ in key\.codec"):
        made_up("oscar:clip=1").check(recipes.get("oscar"), 3, 2, 64)
    with pytest.raises(ValueError, match="takes no artifact"):
        made_up().check(recipes.get("saw-int4"), 3, 2, 64)


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 64), (3, 2, 128)])
def test_another_models_shape_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a model of 3 layers, 2 KV heads of 64; this one has"):
        made_up().check(recipes.get("oscar"), *shape)


def test_the_cache_refuses_too(tmp_path: Path) -> None:
    model = make_model("llama")
    path = made_up().save(tmp_path).parent
    assert kvant.Cache(model, "oscar:recent=8", artifact=path).artifact is not None
    with pytest.raises(ValueError, match="not for oscar:per_head=true"):
        kvant.Cache(model, "oscar:per_head=true", artifact=path)
    with pytest.raises(ValueError, match="KV heads"):
        kvant.Cache(make_model("llama-mha"), "oscar", artifact=path)
    with pytest.raises(ValueError, match="needs an artifact"):
        kvant.Cache(model, "oscar")


# --- numbers that nothing can be served with ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "name", "change", "message"),
    [
        ("oscar", "key.transforms[0].basis", lambda t: t * float("nan"), "not finite"),
        ("oscar", "value.transforms[0].basis", lambda t: t / 0, "not finite"),
        ("oscar", "key.transforms[0].basis", lambda t: t * 0, "all zeros"),
        ("oscar", "key.transforms[0].basis", lambda t: t.long(), "expected floating-point numbers, got torch.int64"),
        ("oscar", "key.transforms[0].basis", lambda t: t * 1.5, "expected an orthogonal matrix"),
        (
            "oscar",
            "key.transforms[0].basis",
            lambda t: t[:, :, :1].expand_as(t).clone(),
            "expected an orthogonal matrix",
        ),
        (
            "oscar",
            "key.transforms[0].basis",
            lambda t: t.expand(2, -1, -1).clone(),
            r"expected the shape \[1, 64, 64\]",
        ),
        ("oscar", "key.codec.clip", lambda t: t * 0, r"a ratio in \(0, 1\], got 0"),
        ("oscar", "value.codec.clip", lambda t: t * 2, r"a ratio in \(0, 1\], got 1"),
        ("kvant-2", "key.transforms[0].matrix", lambda t: t * 0, "all zeros"),
        ("kvant-2", "value.transforms[0].matrix", lambda t: t[:, :1].expand_as(t).clone(), "head 0 has no inverse"),
        ("kvant-2", "key.transforms[0].offset", lambda t: t[:1], r"expected the shape \[2, 64\], got \[1, 64\]"),
        ("kvant-2", "key.codec.weights", lambda t: -t, "expected no negative numbers"),
        ("vecinfer-2", "key.codec.codebooks", lambda t: t * 0, "all zeros"),
        ("vecinfer-2", "key.transforms[0].factors", lambda t: t * 0, "expected positive numbers"),
        ("saw-int4-kmeans", "key.codec.centroids", lambda t: t / 0, "not finite"),
    ],
)
def test_numbers_that_cannot_serve_are_refused(
    recipe: str, name: str, change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layer, tensor and reason: when it is written, when it is read, and where it was never on a disk."""
    chosen = recipes.get(recipe)
    tensors = {layer: made_up_tensors(chosen, 2, 64) for layer in range(3)}
    good = Artifact(chosen, 2, 64, 3, tensors)
    good.check(chosen, 3, 2, 64)
    assert name in tensors[1], sorted(tensors[1])
    bad = Artifact(chosen, 2, 64, 3, {**tensors, 1: {**tensors[1], name: change(tensors[1][name])}})
    expected = rf"layer 1, {re.escape(name)}: .*{message}"
    with pytest.raises(ValueError, match=expected):
        bad.check(chosen, 3, 2, 64)
    with pytest.raises(ValueError, match=expected):
        bad.save(tmp_path)
    monkeypatch.setattr(Artifact, "check_tensors", lambda self: None)
    bad.save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"artifact .* cannot be used: {expected}"):
        Artifact.load(tmp_path)


def test_a_tensor_that_is_changed_in_place_is_looked_at_again() -> None:
    artifact = made_up()
    artifact.check(artifact.recipe, 3, 2, 64)
    artifact.tensors[0]["key.transforms[0].basis"][0, 3, 4] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        artifact.check(artifact.recipe, 3, 2, 64)


def test_every_calibrated_part_says_what_it_expects() -> None:
    """Found, not listed: what is fitted has the shapes that the parts name."""
    for name in recipes.names():
        recipe = recipes.get(name)
        made = made_up_tensors(recipe, 2, 64)
        expected = {
            f"{stream}.{place}.{key}": list(what.shape)
            for stream, each in recipe.streams.items()
            for place, part in each.parts.items()
            for key, what in part.expects(2, 64).items()
        }
        assert {key: list(tensor.shape) for key, tensor in made.items()} == expected, name


def test_it_is_shown_in_a_line() -> None:
    assert repr(made_up()) == "Artifact(recipe='oscar', layers=3, heads=2, head_dim=64, nbytes=98328)"


def test_what_is_no_file_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    for path in (tmp_path, tmp_path / FILE):
        with pytest.raises(ValueError, match="expected a file or directory, got a FIFO"):
            Artifact.load(path)
    with pytest.raises(ValueError, match="expected a file, got a FIFO"):
        made_up().save(tmp_path)
    with pytest.raises(ValueError, match="expected a file or directory, got a device"):
        Artifact.load("/dev/null")


# --- damage and death ------------------------------------------------------------------------------------------------


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="no such file"):
            Artifact.load(path)


@pytest.mark.parametrize("where", [0, 9, 300, -5, -2000])
def test_a_flipped_bit_is_refused(tmp_path: Path, where: int) -> None:
    path = made_up().save(tmp_path)
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"artifact .* (cannot be read|is damaged)"):
        Artifact.load(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_torn_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = made_up().save(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"artifact .* cannot be read"):
        Artifact.load(tmp_path)


def test_another_file_or_header_is_refused(tmp_path: Path) -> None:
    path = made_up().save(tmp_path)
    tensors = load_file(path)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="expected the format kvant-artifact-2, got None"):
        Artifact.load(path)
    for version in (1, 2):
        save_file(tensors, path, metadata={"format": f"kvant-artifact-{version}"})
        with pytest.raises(ValueError, match="cannot be read"):
            Artifact.load(path)
    header = {"format": "kvant-artifact-1", "digest": "0" * 64, "recipe": recipes.get("oscar").to_json()}
    header |= {"shape": '{"layers": 3, "heads": 2, "head_dim": 64}', "source": "{}"}
    save_file(tensors, path, metadata=header)
    with pytest.raises(ValueError, match="its digest is not that of its tensors"):
        Artifact.load(path)


@pytest.mark.parametrize("step", ["save_file", "_flush"])
def test_a_failed_write_leaves_the_old_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    old = made_up()
    old.save(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        if step == "save_file":
            Path(args[1]).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(artifacts if hasattr(artifacts, step) else files, step, fail)
    with pytest.raises(KeyboardInterrupt):
        made_up(seed=1).save(tmp_path)
    assert Artifact.load(tmp_path).digest == old.digest
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE]


WRITER = """
import sys, torch
from kvant import recipes
from kvant.artifact import Artifact
artifact = Artifact(recipes.get("oscar"), 2, 64, 1, {0: {"big": torch.arange(1 << 20).float()}})
print(artifact.digest, flush=True)
while True:
    artifact.save(sys.argv[1])
"""


@pytest.mark.parametrize(("existing", "patience"), [(True, 0.004), (False, 0.05)])
def test_killed_it_leaves_the_old_artifact_or_a_whole_one(tmp_path: Path, existing: bool, patience: float) -> None:
    """A process that does nothing but save is killed; what it leaves is the old artifact, none, or its own whole."""
    allowed = set()
    if existing:
        old = made_up()
        old.save(tmp_path)
        allowed.add(old.digest)
    root = Path(kvant.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    allowed.add(process.stdout.readline().decode().strip())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if existing or (tmp_path / FILE).exists():
        assert Artifact.load(tmp_path).digest in allowed
    made_up(seed=1).save(tmp_path)  # what was left behind is in nobody's way
    assert Artifact.load(tmp_path).digest == made_up(seed=1).digest
