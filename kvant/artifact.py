"""Calibration artifacts: the fitted tensors of a recipe for one model, in one self-describing safetensors file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvant.files import check_replaceable, directory_for, kind, replacing
from kvant.recipe import MixedRecipe, Recipe
from kvant.spec import Expected

Tensor = torch.Tensor
FORMAT = "kvant-artifact-2"
UNSEALED = "kvant-artifact-1"  # written before headers had a seal; still read
FILE = "artifact.safetensors"
SCHEME = 2  # version of the fingerprints that name models (engines.fingerprint); an artifact without one has version 1
ORTHOGONAL = 1e-2  # largest entry of U^T U - 1 of a matrix that counts as orthogonal
CONDITION = 1e9  # condition number ||A|| ||A^-1|| above which a matrix counts as singular
_UNREADABLE = (SafetensorError, OSError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Artifact:
    """Calibrated tensors per layer, e.g. tensors[3]["key.transforms[0].matrix"], and where they come from."""

    recipe: Recipe
    heads: int
    head_dim: int
    layers: int
    tensors: dict[int, dict[str, Tensor]]
    source: dict[str, Any] = dataclasses.field(default_factory=dict)  # model fingerprint, tokens, text hash, ...

    def __repr__(self) -> str:
        return (
            f"Artifact(recipe={self.recipe.name!r}, layers={self.layers}, heads={self.heads}, head_dim={self.head_dim}, "
            f"nbytes={sum(tensor.nbytes for layer in self.tensors.values() for tensor in layer.values())})"
        )

    def serving(self, recipe: Recipe) -> Artifact:
        """The same tensors for another recipe whose fit is the same, for example one that differs only in windows."""
        if recipe.fits != self.recipe.fits:
            raise ValueError(f"the artifact was fitted for recipe {self.recipe.name}, not for {recipe.name}")
        return dataclasses.replace(self, recipe=recipe)

    @property
    def digest(self) -> str:
        """Digest of the tensors and of what they were fitted for: artifacts with the same digest are interchangeable."""
        shape = [self.recipe.fits, self.heads, self.head_dim, self.layers]
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
        for name, tensor in sorted(self._flat().items()):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _flat(self) -> dict[str, Tensor]:
        return {f"layers.{i}.{name}": t.cpu() for i, layer in self.tensors.items() for name, t in layer.items()}

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the artifact atomically; an existing file is replaced when the new one is complete."""
        self.check_tensors()
        target = Path(directory) / FILE
        check_replaceable(target, "artifact")
        header = {
            "format": FORMAT,
            "digest": self.digest,
            "recipe": self.recipe.to_json(),
            "shape": json.dumps({"layers": self.layers, "heads": self.heads, "head_dim": self.head_dim}),
            "source": json.dumps(self.source),
        }
        header["seal"] = _seal(header)
        with directory_for(target.parent), replacing(target) as temporary:
            save_file({name: t.contiguous() for name, t in self._flat().items()}, temporary, metadata=header)
        return target

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Artifact:
        """Reads an artifact's directory or file; a damaged one is refused by name."""
        file = _file(path)
        try:
            with safe_open(file, framework="pt") as opened:
                header = _checked_header(opened)
                shape = json.loads(header["shape"])
                recipe = Recipe.from_json(header["recipe"])
                tensors: dict[int, dict[str, Tensor]] = {}
                for key in opened.keys():  # noqa: SIM118 (not a dict)
                    place, layer, name = key.split(".", 2)
                    if place != "layers" or int(layer) not in range(shape["layers"]):
                        raise ValueError(f"it has a tensor {key!r:.80}")
                    tensors.setdefault(int(layer), {})[name] = opened.get_tensor(key)
                artifact = Artifact(
                    recipe, shape["heads"], shape["head_dim"], shape["layers"], tensors, json.loads(header["source"])
                )
                if not all(type(n) is int and n > 0 for n in (artifact.heads, artifact.head_dim, artifact.layers)):
                    raise ValueError(f"its model has {shape}")
                if not isinstance(artifact.source, dict):
                    raise ValueError("it does not say where it comes from")
        except _UNREADABLE as error:
            raise ValueError(f"artifact {str(path)!r} cannot be read: {error}") from error
        if artifact.digest != header.get("digest"):
            raise ValueError(f"artifact {str(path)!r} is damaged: its digest is not that of its tensors")
        try:
            artifact.check_tensors()
        except ValueError as error:
            raise ValueError(f"artifact {str(path)!r} cannot be used: {error}") from error
        return artifact

    def check_tensors(self) -> None:
        """Refuses tensors that cannot be used: not finite, of another shape, or a singular matrix where an inverse is needed.
        Missing layers and tensors are refused later, by the part that needs them."""
        tensors = [tensor for layer in self.tensors.values() for tensor in layer.values()]
        state = [(id(t), 0 if t.is_inference() else t._version) for t in tensors]
        if getattr(self, "_sound", None) == state:
            return  # checked before; a server makes a cache for every request
        if isinstance(self.recipe, MixedRecipe) and len(self.recipe.layers) != self.layers:
            raise ValueError(f"its recipe is for {len(self.recipe.layers)} layers, it has {self.layers}")
        for layer, named in self.tensors.items():
            expected = self._expected(self.recipe.at(layer))
            for name, tensor in named.items():
                wrong = _wrong(tensor, expected.get(name))
                if wrong is not None:
                    raise ValueError(f"layer {layer}, {name}: {wrong}")
        object.__setattr__(
            self, "_sound", state
        )  # not a dataclass field, so that a copy with other tensors is checked again

    def _expected(self, recipe: Recipe) -> dict[str, Expected]:
        """The tensors of a layer with this recipe."""
        out: dict[str, Expected] = {}
        for stream, parts in ((name, stream.parts) for name, stream in recipe.streams.items()):
            for place, part in parts.items():
                found = part.expects(self.heads, self.head_dim)
                out |= {f"{stream}.{place}.{name}": what for name, what in found.items()}
        return out

    def check(self, recipe: Recipe, layers: int, heads: int, head_dim: int, fingerprint: str | None = None) -> None:
        """Refuses a recipe or a model that the artifact was not fitted for. What a recipe does not need from it, and
        what does not decide the fit (windows, a fixed clip in place of the fitted one), may differ. The model's
        fingerprint is compared where both are known."""
        self.check_tensors()
        if not recipe.calibrated:
            raise ValueError(f"recipe {recipe.name} takes no artifact, got one of recipe {self.recipe.name}")
        fitted = self.recipe.fits
        for place, digest in recipe.fits.items():
            if fitted.get(place) != digest:
                raise ValueError(
                    f"the artifact was fitted for recipe {self.recipe.name}, not for {recipe.name}: "
                    f"they differ in {place}, or in what comes before it"
                )
        mine, theirs = (self.layers, self.heads, self.head_dim), (layers, heads, head_dim)
        if mine != theirs:
            raise ValueError(
                "the artifact was fitted for a model of {} layers, {} KV heads of {}; this one has {}, {} of {}".format(
                    *mine, *theirs
                )
            )
        fitted_to = self.source.get("fingerprint")
        if fingerprint is None or fitted_to is None:
            return
        if self.source.get("fingerprint_scheme", 1) != SCHEME:
            raise ValueError(
                "the artifact was fitted by another version of kvant, whose fingerprints of models differ, so that it cannot be "
                "verified for this model; calibrate again"
            )
        if fitted_to != fingerprint:
            raise ValueError(
                f"the artifact was fitted to another model of the same shape: its fingerprint is {fitted_to:.16}..., this "
                f"model's is {fingerprint:.16}...; calibrate this model"
            )


def read_header(path: str | os.PathLike[str]) -> tuple[str, str, dict[str, Any]]:
    """An artifact's digest, the name of its recipe, and its source. The tensors are neither read nor checked."""
    file = _file(path)
    try:
        with safe_open(file, framework="pt") as opened:
            header = _checked_header(opened)
            source = json.loads(header["source"])
            if not isinstance(source, dict):
                raise ValueError("it does not say where it comes from")
            return header["digest"], Recipe.from_json(header["recipe"]).name, source
    except _UNREADABLE as error:
        raise ValueError(f"artifact {str(path)!r} cannot be read: {error}") from error


def _file(path: str | os.PathLike[str]) -> Path:
    """The file of an artifact. Anything but a regular file is refused before it is opened: a FIFO would wait for a writer."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        raise ValueError(f"artifact {str(path)!r}: no such file or directory") from None
    except OSError as error:
        raise ValueError(f"artifact {str(path)!r} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"artifact {str(path)!r}: expected a file or directory, got {kind(mode)}")
    return file


def _checked_header(opened: Any) -> dict[str, str]:
    header: dict[str, str] = opened.metadata() or {}
    if header.get("format") not in (FORMAT, UNSEALED):
        raise ValueError(f"expected the format {FORMAT}, got {header.get('format')!r}")
    if header.pop("seal", None) != (_seal(header) if header["format"] == FORMAT else None):
        raise ValueError("its header is not what was written")
    return header


def _wrong(tensor: Tensor, expected: Expected | None) -> str | None:
    """Why a calibrated tensor cannot be used, or None. For a tensor that the recipe does not declare,
    only the numbers are checked."""
    shape = list(tensor.shape)
    if expected is not None and shape != list(expected.shape):
        return f"expected the shape {list(expected.shape)}, got {shape}"
    if not tensor.is_floating_point():
        return f"expected floating-point numbers, got {tensor.dtype}"
    wide = tensor.detach().double()
    if not bool(wide.isfinite().all()):
        return "it has numbers that are not finite"
    being = "any" if expected is None else expected.being
    if being in ("nonzero", "weights", "invertible", "orthogonal") and not bool(wide.any()):
        return "it is all zeros"
    if being == "weights" and bool((wide < 0).any()):
        return f"expected no negative numbers, got {float(wide.min()):.3g}"
    if being == "positive" and not bool((wide > 0).all()):
        return f"expected positive numbers, got {float(wide.min()):.3g}"
    if being == "ratio" and not 0.0 < float(wide) <= 1.0:
        return f"expected a ratio in (0, 1], got {float(wide):.3g}"
    if being == "orthogonal":
        eye = torch.eye(shape[-1], dtype=wide.dtype, device=wide.device)
        off = float((wide.mT @ wide - eye).abs().max())
        if off > ORTHOGONAL:
            return f"expected an orthogonal matrix, U^T U is off by {off:.3g}"
    if being == "invertible":
        back, failed = torch.linalg.inv_ex(wide)
        sizes = [m.abs().sum(-2).amax(-1) for m in (wide, back)]  # the 1-norms
        condition = torch.where(failed == 0, sizes[0] * sizes[1], torch.inf).nan_to_num(torch.inf)
        worst = int(condition.argmax())
        if not float(condition.max()) <= CONDITION:
            return f"head {worst} has no inverse: expected a condition number below {CONDITION:.0e}"
    return None


def _seal(header: dict[str, str]) -> str:
    """Digest of everything in a header except the seal itself."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
