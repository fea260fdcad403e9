"""kvant serve: vLLM's OpenAI-compatible server with kvant as its attention backend.

Recipe, artifact and model are checked before vLLM starts, so that mistakes are reported before the server listens.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.artifact_options import LocatedArtifact, add_artifact_options, find_or_make
from kvant.cli.common import read_text, say
from kvant.spec import parse_json

if TYPE_CHECKING:
    from kvant.artifact import Artifact
    from kvant.recipe import Recipe

OURS = ("--attention-backend", "--additional-config", "--kv-cache-dtype", "--attention-config", "--model")
KEY = "KVANT_API_KEY"  # environment variable with the API key
LOOPBACK = "127.0.0.1"
CPU_CACHE = 4 << 30  # default bytes of pages on a CPU; at most a quarter of the free memory
OVERLAYS = 4 << 30  # bytes of overlays for which --max-num-seqs is chosen where it is not given
SEQUENCES = 16, 256  # smallest and largest --max-num-seqs that is chosen


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        examples=(
            "kvant serve Qwen/Qwen3-8B --recipe kvant-2 --max-model-len 32768 --port 8000",
            "kvant serve smollm2 --recipe kvant-4",
        ),
        help="serve a model with vLLM, OpenAI-compatible",
        description="Serves a model with vLLM's OpenAI-compatible server from a packed cache, on loopback unless --host says "
        "otherwise. Other options are passed on to vLLM, for instance --port, --max-model-len, "
        f"--tensor-parallel-size. An API key that clients must send is read from the environment variable {KEY} or from a "
        "file, since other users can see the command line of a process.",
        usage="kvant serve M [options] [vLLM's own options]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="M", help="Hugging Face directory or id, or smollm2; must come before all options"
    )
    parser.add_argument("--recipe", metavar="R", help="a recipe (default: the best that kvant check finds good)")
    parser.add_argument(
        "--layers", metavar="JSON", help='recipes for some of the layers, for instance {"0-1": "int8", "2-": "oscar"}'
    )
    parser.add_argument(
        "--sliding", metavar="R", help="a recipe for layers with a sliding window; full keeps them in 16 bits"
    )
    parser.add_argument(
        "--draft-recipe",
        metavar="R",
        help="a recipe for the layers of a draft model (default: 16 bits, by an attention of vLLM's own)",
    )
    add_artifact_options(parser)
    parser.add_argument(
        "--unfit-anyway", action="store_true", help="serve the recipe even if its verdict for this model is unfit"
    )
    parser.add_argument(
        "--no-fold",
        action="store_true",
        help="apply value transforms at every step, even where the weights could hold them",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help=f"file with the API key that clients must send (default: {KEY}, or none)"
    )
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen on (default {LOOPBACK})")
    parser.set_defaults(run=run, passes_on=True)


def run(args: argparse.Namespace) -> int:
    environment = {name: value for name, value in os.environ.items() if name != KEY}
    key = api_key(args.api_key_file)
    check_address(args.host, _value(args.rest, "--port") or "8000")
    if key is not None:
        environment["VLLM_API_KEY"] = key
    command = command_for(args, args.rest, guarded=key is not None)
    say(f"starting vLLM on {args.host}{'' if key is None else ', with a key for every path but /health'}")
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def api_key(file: str | None) -> str | None:
    """The API key that clients must send, from a file or from the environment; None where there is none."""
    if file is not None:
        key, place = read_text(file, "--api-key-file").strip(), f"--api-key-file {file!r}"
    else:
        place = next((name for name in (KEY, "VLLM_API_KEY") if name in os.environ), "")
        key = os.environ.get(place, "")
        if not place:
            return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{place}: expected a key of printable ASCII characters without spaces")
    return key


def check_options(rest: Sequence[str]) -> None:
    """Refuses options that vLLM's server does not take, in its parser's words, before a recipe is checked or fitted."""
    for where in ("common", "launchers", "openai"):  # vLLM 0.33, 0.29 to 0.32, 0.26
        place = f"vllm.entrypoints.{where}.cli_args"
        if importlib.util.find_spec(f"vllm.entrypoints.{where}") and importlib.util.find_spec(place):
            break
    else:
        return  # the server itself will tell
    arguments = importlib.import_module(place)
    parser = arguments.make_arg_parser(arguments.FlexibleArgumentParser())
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            parser.parse_args(list(rest))
    except SystemExit as end:
        if end.code:
            last = " ".join(told.getvalue().strip().splitlines()[-1:])
            raise ValueError(f"vLLM does not take these options: {last.rpartition('error: ')[2]}") from None


def check_address(host: str, port: str) -> None:
    """Refuses a port that cannot be listened on, before a recipe is checked or fitted."""
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"--port must be a number from 1 to 65535, got {port!r}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def command_for(args: argparse.Namespace, rest: Sequence[str], guarded: bool = False) -> list[str]:
    """Checks everything and returns the command line of vLLM's server."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "vLLM is not installed: pip install 'kvant[vllm]', or for CPUs ./scripts/setup --vllm"
        )
    import vllm

    from kvant import models
    from kvant.engines.vllm import versions
    from kvant.engines.vllm.options import UNPACKED
    from kvant.layout import human_bytes

    versions.check(vllm.__version__)
    given = {each.split("=")[0].replace("_", "-") for each in rest if each.startswith("--")}
    for option in sorted(given):
        if option == "--kv-cache-dtype" and _value(rest, option) in UNPACKED:
            continue  # in place of what a checkpoint declares
        if any(ours.startswith(option) for ours in OURS):  # vLLM accepts abbreviated options
            raise ValueError(f"{option} is set by kvant; leave it out")
        if option.startswith("--api-k"):
            raise ValueError(
                f"{option} would show the key to everybody who lists processes: set the environment variable {KEY}, or give a "
                "file with --api-key-file"
            )
    check_options(rest)
    ranges = _ranges(args.layers)
    source = models.resolve(args.model, say)
    kvant: dict[str, Any] = {
        "recipe": args.recipe,
        "layers": ranges,
        "sliding": args.sliding,
        "draft": args.draft_recipe,
    }
    kvant["unfit_anyway"] = args.unfit_anyway
    kvant = {key: value for key, value in kvant.items() if value} | ({"fold": False} if args.no_fold else {})
    paths = check(source, kvant, args, _value(rest, "--revision"))
    if paths:
        kvant["artifact"] = paths
    options = [
        "--host",
        args.host,
        "--attention-backend",
        "CUSTOM",
        "--additional-config",
        json.dumps({"kvant": kvant}),
    ]
    if guarded:
        options += ["--middleware", "kvant.engines.vllm.guard.Guard"]
    if args.model != source and "--served-model-name" not in given:
        options += ["--served-model-name", args.model]
    cpu = _on_cpu()
    if cpu and "--dtype" not in given:
        options += ["--dtype", "float32"]  # vLLM's 16-bit matrix products need instructions that not every CPU has
    if (
        cpu
        and not given & {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}
        and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    ):  # vLLM would take 0.92 of all memory, and fail where that is not free
        size = min(CPU_CACHE, _free_memory() // 4)
        say(f"--kv-cache-memory-bytes {size}: {human_bytes(size)} of memory for pages")
        options += ["--kv-cache-memory-bytes", str(size)]
    for option in vllm_options(source, kvant):
        if not given & {option, option.replace("--no-", "--")}:  # what is given against it, the engine refuses
            say(f"{option}: the recipe is fitted on each request's own prompt")
            options.append(option)
    window = overlay_bytes(source, kvant)
    if (
        not cpu and window and "--max-num-seqs" not in given
    ):  # vLLM's default may be 1024, and every sequence has an overlay row
        count = min(max(OVERLAYS // window, SEQUENCES[0]), SEQUENCES[1])
        say(f"--max-num-seqs {count}: the overlay (first and recent tokens) takes {human_bytes(window)} per sequence")
        options += ["--max-num-seqs", str(count)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", source, *options, *rest]


def check(source: str, kvant: dict[str, Any], args: argparse.Namespace, revision: str | None = None) -> list[str]:
    """Refuses what cannot be served; returns the directories of the artifacts that the recipes need. The model is loaded only where
    an artifact has to be fitted, or where its fingerprint cannot be computed from its files."""

    from kvant import models, recipes
    from kvant.engines import fold
    from kvant.engines.fingerprint import fingerprint, fingerprint_of_files
    from kvant.engines.vllm import options
    from kvant.layout import Layout
    from kvant.recipe import MixedRecipe
    from kvant.shape import ModelShape

    config = models.config_of(
        source, expected=f"a Hugging Face directory or id, or {models.SMOLLM2}", revision=revision
    )
    shape = ModelShape.of(config, hybrid=True)
    options.draft_recipe(kvant)
    if kvant.get("sliding") and all(window is None for window in shape.layers):
        raise ValueError(f"--sliding: {config.model_type} has no layers with a sliding window")
    directory = models.directory_of(source, revision, download=True)

    @functools.cache
    def load() -> tuple[Any, Any]:
        device, dtype = _where_to_fit(config)
        return models.load(source if directory is None else str(directory), dtype, device, say)

    @functools.cache
    def named() -> str:
        found = None if directory is None else fingerprint_of_files(directory)
        if found is None:
            say("the model's fingerprint cannot be computed from its files: loading the model")
            found = fingerprint(load()[0])
        return found

    whole: Recipe | None = None
    if not {"recipe", "layers"} & kvant.keys():
        whole = default_recipe(args, named, load)
        if isinstance(whole, MixedRecipe):  # vLLM's processes read its layers' recipes from the artifact
            kvant["artifact"] = [str(Path(args.artifact[0]).absolute())]
        else:
            kvant["recipe"] = whole.name
    each = list(dict.fromkeys(_recipes(shape, kvant)))
    chosen = [whole] if isinstance(whole, MixedRecipe) else each
    for recipe in each:
        options.check(recipe)
        Layout.of(recipe, shape.heads, shape.head_dim, options.page_tokens(recipe))
    fitted = [recipe for recipe in chosen if recipe.calibrated]
    if not fitted and args.artifact:
        raise ValueError(f"--artifact: recipe {chosen[0].name} takes no artifact")
    found = find_or_make(named(), shape, fitted, args, load) if fitted else {}
    for recipe in chosen:
        fold.served(recipe, found[recipe.name].artifact if recipe.calibrated else None, config)
    packed = [
        recipe for recipe in chosen if recipe != recipes.get("full")
    ]  # layers with a sliding window may be in 16 bits
    if len(packed) == 1 and not args.unfit_anyway:
        require_fit(packed[0], found[packed[0].name].artifact if fitted else None, named, load)
    paths = [_handed_over(found[recipe.name]) for recipe in fitted]
    return list(dict.fromkeys(paths))


def default_recipe(args: argparse.Namespace, named: Callable[[], str], load: Callable[[], tuple[Any, Any]]) -> Recipe:
    """The recipe to serve without --recipe: the artifact's, or the best whose verdict for the model is good."""
    from kvant.artifact import Artifact
    from kvant.engines.vllm import options
    from kvant.eval.choose import cached_choice, choose_recipe

    if args.artifact:
        return Artifact.load(args.artifact[0]).recipe
    found = cached_choice(named(), options.refusal) or choose_recipe(*load(), say, refusal=options.refusal)
    say(found.reason)
    return found.recipe


def require_fit(
    recipe: Recipe, artifact: Artifact | None, named: Callable[[], str], load: Callable[[], tuple[Any, Any]]
) -> None:
    """Refuses a recipe that is unfit for the model. The model is loaded where there is no verdict yet."""
    from kvant import recipes
    from kvant.engines.vllm import options
    from kvant.eval import choose
    from kvant.verdicts import refuse_unfit, verdict

    if recipe == recipes.get("full"):
        return
    found = verdict(named(), recipe, "" if artifact is None else artifact.digest)
    if found is None:
        choose.require_fit(*load(), recipe, artifact, "--unfit-anyway", say, refusal=options.refusal)
    else:
        refuse_unfit(found, "--unfit-anyway")


def _where_to_fit(config: Any) -> tuple[str, str]:
    """Device and dtype for calibration and check: the GPU that will serve the model, in the checkpoint's 16-bit type."""
    if _on_cpu():
        return "cpu", "float32"
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return "cuda", stored if stored in ("bfloat16", "float16") else "bfloat16"


def _handed_over(found: LocatedArtifact) -> str:
    """The directory from which vLLM's processes load an artifact."""
    path = found.path
    if path is None:  # it could not be cached
        path = Path(tempfile.mkdtemp(prefix="kvant-artifact-"))
        try:
            found.artifact.save(path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        say(f"written to {path} for this server")
    return str(Path(path).absolute())


def vllm_options(source: str, kvant: dict[str, Any]) -> list[str]:
    """Options of vLLM that the recipes need."""
    import transformers

    from kvant.shape import ModelShape

    shape = ModelShape.of(transformers.AutoConfig.from_pretrained(source), hybrid=True)
    alone = any(recipe.not_prefix_safe for recipe in _recipes(shape, kvant))
    return ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"] if alone else []


def overlay_bytes(source: str, kvant: dict[str, Any]) -> int:
    """Bytes of a sequence's overlay rows in all layers."""
    import transformers

    from kvant.engines.vllm import options
    from kvant.layout import Layout
    from kvant.shape import ModelShape

    shape = ModelShape.of(transformers.AutoConfig.from_pretrained(source), hybrid=True)
    named = _recipes(shape, kvant)
    each = [named[layer] for layer in shape.attention_layers]
    return sum(Layout.of(one, shape.heads, shape.head_dim, options.page_tokens(one)).overlay_bytes for one in each)


def _recipes(shape: Any, kvant: dict[str, Any]) -> tuple[Recipe, ...]:
    """The recipe of every layer."""
    from kvant import recipes
    from kvant.artifact import Artifact
    from kvant.engines.vllm import options

    default = kvant.get("recipe")
    if default is None and not kvant.get("layers"):
        default = Artifact.load(kvant["artifact"][0]).recipe
    found = options.per_layer(default, kvant.get("layers"), len(shape.layers))
    if kvant.get("sliding"):
        sliding = recipes.get(kvant["sliding"])
        return tuple(one if window is None else sliding for one, window in zip(found, shape.layers, strict=True))
    return found


def _ranges(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f'--layers: expected JSON such as {{"0-1": "int8", "2-": "oscar"}}: {error}') from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"--layers: expected ranges of layers with a recipe each, got {text}")
    return found


def _value(rest: Sequence[str], option: str) -> str | None:
    """The value of an option among those for vLLM; None where it is not given."""
    for place, each in enumerate(rest):
        name, found, value = each.partition("=")
        if name == option:
            return value if found else rest[place + 1] if place + 1 < len(rest) else None
    return None


def _free_memory() -> int:
    """Bytes of free memory, counted by vLLM where it has a function for that."""
    try:
        from vllm.utils.cpu_resource_utils import get_memory_node_info  # respects a container's memory limit
    except ImportError:
        import psutil  # type: ignore[import-untyped]

        return int(psutil.virtual_memory().available)
    return int(get_memory_node_info(0).available_memory)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
