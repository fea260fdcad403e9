"""Calibration artifacts: the tensors that a recipe was fitted with, in one safetensors file that says what it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvant.files import replacing
from kvant.recipe import Recipe

Tensor = torch.Tensor
FORMAT = "kvant-artifact-2"
UNSEALED = "kvant-artifact-1"  # written before headers had a seal; still read
FILE = "artifact.safetensors"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """Calibrated tensors per layer, e.g. tensors[3]["key.transforms[0].matrix"], and where they come from."""

    recipe: Recipe
    heads: int
    head_dim: int
    layers: int
    tensors: dict[int, dict[str, Tensor]]
    source: dict[str, Any] = dataclasses.field(default_factory=dict)  # model fingerprint, tokens, text hash, ...

    @property
    def digest(self) -> str:
        """Names the tensors and what they were fitted for: two artifacts with the same digest are interchangeable."""
        shape = [self.recipe.fits, self.heads, self.head_dim, self.layers]
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
        for name, tensor in sorted(self._flat().items()):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _flat(self) -> dict[str, Tensor]:
        return {f"layers.{i}.{name}": t.cpu() for i, layer in self.tensors.items() for name, t in layer.items()}

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the artifact whole or not at all; what was there before stays until then."""
        target = Path(directory) / FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "format": FORMAT,
            "digest": self.digest,
            "recipe": self.recipe.to_json(),
            "shape": json.dumps({"layers": self.layers, "heads": self.heads, "head_dim": self.head_dim}),
            "source": json.dumps(self.source),
        }
        header["seal"] = _seal(header)
        with replacing(target) as temporary:
            save_file({name: t.contiguous() for name, t in self._flat().items()}, temporary, metadata=header)
        return target

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Artifact:
        """Reads an artifact's directory or file; a damaged one is refused by name."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(f"artifact {str(path)!r}: no such file or directory")
        try:
            with safe_open(file, framework="pt") as opened:
                header = opened.metadata() or {}
                if header.get("format") not in (FORMAT, UNSEALED):
                    raise ValueError(f"expected the format {FORMAT}, got {header.get('format')!r}")
                if header.pop("seal", None) != (_seal(header) if header["format"] == FORMAT else None):
                    raise ValueError("its header is not what was written")
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
        except (SafetensorError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"artifact {str(path)!r} cannot be read: {error}") from error
        if artifact.digest != header.get("digest"):
            raise ValueError(f"artifact {str(path)!r} is damaged: its digest is not that of its tensors")
        return artifact

    def check(self, recipe: Recipe, layers: int, heads: int, head_dim: int, fingerprint: str | None = None) -> None:
        """Refuses a recipe or a model that the artifact was not fitted for. What a recipe does not need from it, and
        what does not decide the fit (windows, a fixed clip in place of the fitted one), may differ. The model's
        fingerprint is looked at where both sides know one."""
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
        if fingerprint is not None and fitted_to is not None and fitted_to != fingerprint:
            raise ValueError(
                f"the artifact was fitted to another model of the same shape: its fingerprint is {fitted_to:.16}..., this "
                f"model's is {fingerprint:.16}...; calibrate this model"
            )


def _seal(header: dict[str, str]) -> str:
    """Names everything that a header says but the seal itself."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
