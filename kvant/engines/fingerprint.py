"""Fingerprints of models, so that an artifact or a snapshot of one model is not used with another.

A fingerprint is a SHA-256 over the config and over every weight of the checkpoint: its name, its shape, and of up to 64 runs
of 64 neighbouring elements spread over it

    the signs       which rounding to another floating type never changes, not even of numbers that become zero;
    the values      rounded to bfloat16, where nearly all signs are equal, as in the weights of norms.

Guarantee: a checkpoint that is stored in bfloat16 or float16 has one fingerprint, whether it is loaded as float32,
bfloat16 or float16. One that is stored in float32 has one fingerprint as float32 and as bfloat16. Loaded as float16 it may have
another one, if it has norms that are no bfloat16 numbers: float32 -> float16 -> bfloat16 rounds twice. Only signs are
the same after all three conversions: rounding may move a number across every boundary except zero.

The same fingerprint can be computed from the files of a checkpoint (`fingerprint_of_files`), a few kilobytes of every tensor.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvant.artifact import SCHEME
from kvant.files import open_regular

Tensor = torch.Tensor
RUNS, RUN = 64, 64  # runs of a tensor that are hashed, and elements of a run
ALIKE = 16  # values are hashed too where fewer than one sign in this many differs from the others
LEAST, MOST = 2.0**-16, 65280.0  # range of magnitudes that all three types can represent
MARK = "kvant_folded"  # in a config: what was folded into the weights, see fold.py
VOLATILE = (
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
    MARK,
)
_HEADER_LIMIT = 100 << 20  # as safetensors has it
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def fingerprint(model: Any) -> str:
    """Names a transformers model. One with folded value transforms has the name of the model that it was, as long as its
    weights are those that were folded."""
    model = getattr(model, "_orig_mod", model)  # of a model that torch.compile has wrapped
    named, samples = [], []
    for name, (_, weight) in _weights(model).items():
        if weight.is_meta:
            raise ValueError(f"cannot name this model: its weight {name} is not in memory")
        named.append((name, tuple(weight.shape)))
        samples.append(_sampled(weight.detach()))
    return _original(model.config, _name(model.config, zip(named, _hashed(samples), strict=True)))


def fingerprint_of_files(directory: str | os.PathLike[str]) -> str | None:
    """The fingerprint of the model that `AutoModelForCausalLM.from_pretrained(directory)` gives, without loading it. None where
    it cannot be computed: the files are no safetensors, are quantized, or have other names than the model's weights."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        if getattr(config, "quantization_config", None) is not None:
            return None
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        stored = _stored(Path(directory))
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None  # loading the model will raise the error
    named, samples = [], []
    for name, (aliases, weight) in _weights(model).items():
        found = [stored[alias] for alias in aliases if alias in stored]
        if not found or any(one.shape != tuple(weight.shape) for one in found):
            return None
        copies = [one.sampled() for one in found]
        if any(not torch.equal(copies[0], other) for other in copies[1:]):
            return None  # tied in the config, two tensors in the files
        named.append((name, tuple(weight.shape)))
        samples.append(copies[0])
    return _original(config, _name(config, zip(named, _hashed(samples), strict=True)))


def _original(config: Any, own: str) -> str:
    """What a model was before value transforms were folded into it."""
    mark = getattr(config, MARK, None)
    return mark["base"] if isinstance(mark, Mapping) and mark.get("weights") == own else own


def _weights(model: torch.nn.Module) -> dict[str, tuple[list[str], Tensor]]:
    """Parameters and the buffers that belong to a checkpoint by name -> all names, tensor. Tied ones are there once, under
    the first of their names."""
    aliases: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Tensor | None] = dict(module._parameters)
        own |= {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, tensor in own.items():
            if tensor is not None:
                aliases.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
                found[id(tensor)] = tensor
    return {min(names): (sorted(names), found[key]) for key, names in aliases.items()}


def _places(count: int) -> list[int]:
    """Where the runs of a tensor of so many elements start."""
    return [i * (count - RUN) // (RUNS - 1) for i in range(RUNS)]


def _sampled(weight: Tensor) -> Tensor:
    flat = weight.reshape(-1)
    if len(flat) <= RUNS * RUN:
        return flat
    return flat[_index(len(flat), flat.device)]


@functools.lru_cache(maxsize=64)
def _index(count: int, device: torch.device) -> Tensor:
    start = torch.tensor(_places(count), device=device)
    return (start[:, None] + torch.arange(RUN, device=device)).flatten()


def _codes(sample: Tensor) -> Tensor:
    """int16 codes that do not depend on the floating type: bits of the bfloat16 number, its sign foremost."""
    if not sample.is_floating_point():
        return sample.to(torch.int16)
    rounded = sample.to(torch.bfloat16)
    size = rounded.abs()
    size = torch.where(size < LEAST, torch.zeros_like(size), size.clamp(max=MOST))
    return torch.copysign(size, rounded).view(torch.int16)


def _hashed(samples: list[Tensor]) -> Iterator[bytes]:
    """What is hashed of every sample. Those of one device and type are coded and copied to the host together."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for sample in samples:
        alike.setdefault((sample.device, sample.dtype), []).append(sample)
    whole = {kind: _codes(torch.cat(each)).cpu().numpy() for kind, each in alike.items()}
    at = dict.fromkeys(whole, 0)
    for sample in samples:
        kind = sample.device, sample.dtype
        start = at[kind]
        at[kind] += len(sample)
        codes = whole[kind][start : at[kind]]
        signs = codes < 0
        minority = min(int(signs.sum()), len(signs) - int(signs.sum()))
        values = codes.astype("<i2").tobytes() if minority * ALIKE < len(signs) else b""
        yield signs.tobytes() + values


def _name(config: Any, weights: Iterable[tuple[tuple[str, tuple[int, ...]], bytes]]) -> str:
    plain = {
        key: value
        for key, value in config.get_text_config(decoder=True).to_dict().items()
        if key not in VOLATILE and not key.startswith("_") and value is not None
    }
    found = hashlib.sha256(json.dumps([SCHEME, plain], sort_keys=True, default=str).encode())
    for (name, shape), data in sorted(weights):
        found.update(f"{name}:{shape}:{len(data)}:".encode())
        found.update(data)
    return found.hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


class _Stored:
    """A tensor in a safetensors file."""

    def __init__(self, path: Path, entry: Mapping[str, Any], start: int, size: int) -> None:
        self.path, self.dtype = path, _TYPES[entry["dtype"]]
        self.shape = tuple(entry["shape"])
        self.count = torch.Size(self.shape).numel()
        first, last = entry["data_offsets"]
        self.start = start + first
        if not 0 <= first <= last or start + last > size or last - first != self.count * self.dtype.itemsize:
            raise ValueError(f"{path}: a tensor is not where its header says")

    def sampled(self) -> Tensor:
        """As `_sampled` of the tensor."""
        whole = self.count <= RUNS * RUN
        runs, length = ([0], self.count) if whole else (_places(self.count), RUN)
        size = self.dtype.itemsize
        data = bytearray()
        with open(self.path, "rb", buffering=0) as file:
            for run in runs:
                file.seek(self.start + run * size)
                data += file.read(length * size)
        return torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)


def _stored(directory: Path) -> dict[str, _Stored]:
    """The tensors of a checkpoint, in one file or in several with an index."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        return _header(directory / "model.safetensors")
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {name: _header(directory / name) for name in sorted(set(places.values())) if Path(name).name == name}
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _header(path: Path) -> dict[str, _Stored]:
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise ValueError(f"{path}: a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: _Stored(path, entry, 8 + length, size) for name, entry in header.items()}
