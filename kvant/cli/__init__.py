"""The command line. Every module of this package that defines `add` is a command, found because it exists.

A user's mistake ends in one line on stderr and exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
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
    args, rest = parser().parse_known_args(argv)
    if rest and not hasattr(args, "passes_on"):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest  # for a command that hands them on
    from kvant.cache import PoolFull

    try:
        return int(args.run(args))
    except (ValueError, PoolFull, OSError, ModuleNotFoundError) as error:
        first = " ".join(str(error).split()) or type(error).__name__
        print(f"kvant {args.command}: {first}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"kvant {args.command}: interrupted", file=sys.stderr)
        return 130
