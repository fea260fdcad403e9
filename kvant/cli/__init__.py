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

from kvant.version import VERSION


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="kvant", description="Serve large language models from a 2- to 4-bit KV cache.")
    top.add_argument("--version", action="version", version=f"kvant {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "add"):
            module.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    label = "kvant"
    try:
        args, rest = parser().parse_known_args(argv)
        if rest and not hasattr(args, "passes_on"):
            parser().error(f"unrecognized arguments: {' '.join(rest)}")
        args.rest = rest  # for a command that passes them to another program
        label = f"kvant {args.command}"
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
    if isinstance(error, (ValueError, OSError, ModuleNotFoundError)):
        return True
    cache = sys.modules.get("kvant.cache")  # where it was not imported, the error is not from there
    return cache is not None and isinstance(error, cache.PoolFull)
