"""The command line. Every module of this package that defines `add` is a command; there is no list of commands.

A user's mistake ends in one line on stderr and exit code 2; anything else is a bug and keeps its traceback. Ctrl-C ends in one
line and exit code 130. Command modules import torch, transformers and rich late, so that --help and --version are fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from kvant.cli.parsers import Parser
from kvant.cli.quiet import one_line_warnings
from kvant.version import VERSION

START = f"""\
kvant {VERSION}: serve large language models from a 2- to 4-bit KV cache

try it
  kvant doctor                                      can this machine, and if not why
  kvant generate --prompt "Why is the sky blue?"    SmolLM2-135M answers from a packed cache (94 MB, once)

with your model M: a Hugging Face directory or id, or a .gguf file
  kvant doctor --model M                            is it supported, and what serves it here
  kvant plan --model M --memory 24GiB               how many tokens and requests fit
  kvant check --model M                             which recipes fit it: good, usable, unfit
  kvant eval --model M --recipe kvant-2 --text F    what a recipe costs on your text
  kvant serve M --recipe kvant-2                    an OpenAI-compatible server, on vLLM

kvant --help lists all commands, kvant COMMAND --help shows examples of each
"""


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="kvant",
        description="Serve large language models from a 2- to 4-bit KV cache.",
        examples=("kvant doctor", 'kvant generate --prompt "Why is the sky blue?"'),
    )
    top.add_argument("--version", action="version", version=f"kvant {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "add"):
            module.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None:  # from a shell: libraries' warnings are not the user's business
        with one_line_warnings():
            return main(sys.argv[1:])
    label = "kvant"
    try:
        if not argv:
            print(START, end="", flush=True)
            return 0
        args, rest = parser().parse_known_args(argv)
        label = f"kvant {args.command}"
        if rest and not hasattr(args, "passes_on"):
            raise ValueError(f"unrecognized arguments: {' '.join(rest)}; {label} --help lists what it takes")
        args.rest = rest  # for a command that passes them to another program
        if rest and args.command == "serve" and argv.index(rest[0]) < argv.index(args.model):
            parser().error(f"the model comes before options of vLLM: kvant {args.command} MODEL {rest[0]} ...")
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe, as in `kvant recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output must not raise again at exit
        return 141
    except KeyboardInterrupt as interrupt:
        told = " ".join(str(interrupt).split())
        start = "\n" if sys.stderr.isatty() else ""  # after the ^C that a terminal echoes
        print(f"{start}{label}: interrupted{f'; {told}' if told else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        if not _mistake(error):
            raise
        first = " ".join(str(error).split()) or type(error).__name__
        print(f"{label}: {first}", file=sys.stderr)
        return 2


def _mistake(error: Exception) -> bool:
    """Whether an error is a user's mistake, and not a bug."""
    if isinstance(error, (ValueError, OSError, ModuleNotFoundError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and ("not enough memory" in str(error) or "out of memory" in str(error)):
        return True  # torch's, on a CPU and on a GPU
    cache = sys.modules.get("kvant.cache")  # where it was not imported, the error is not from there
    return cache is not None and isinstance(error, cache.PoolFull)
