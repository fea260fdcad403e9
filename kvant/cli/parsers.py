"""The parser of all commands: a help text fits a screen of 40 lines and 100 columns, and ends with examples that can be copied.

Types of options that are numbers of tokens: `tokens`, `tokens_from_zero`, `tokens_list`. All take 32k for 32768."""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from kvant.spec import parse_tokens

WIDTH = 100
EXAMPLES = "examples:\n"


def tokens(text: str) -> int:
    """A positive number of tokens."""
    return _tokens(text, 1, "must be positive")


def tokens_from_zero(text: str) -> int:
    """A number of tokens that may be 0."""
    return _tokens(text, 0, "must be at least 0")


def tokens_list(text: str) -> list[int]:
    """Positive numbers of tokens with commas between them."""
    return [tokens(part) for part in text.split(",")]


def _tokens(text: str, least: int, rule: str) -> int:
    try:
        found = parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < least:
        raise argparse.ArgumentTypeError(f"{rule}, got {text}")
    return found


class Formatter(argparse.HelpFormatter):
    """Help of at most WIDTH columns with a short usage: what is required, then [options]. Examples keep their lines."""

    def __init__(self, prog: str, **options: Any) -> None:
        columns = min(WIDTH, shutil.get_terminal_size((WIDTH, 40)).columns)
        super().__init__(prog, max_help_position=27, width=columns, **options)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        actions = list(actions)
        if usage is None:
            needed = [f"{a.option_strings[-1]} {self._metavar(a)}" for a in actions if a.option_strings and a.required]
            options = ["[options]"] if any(a.option_strings and not a.required for a in actions) else []
            places = [self._place(a) for a in actions if not a.option_strings]
            usage = " ".join(["%(prog)s", *places, *needed, *options])
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        """As argparse's; but the indentation of subcommands counts, so that each has one line."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            longest = max(map(len, action.choices), default=0)
            self._action_max_length = max(self._action_max_length, longest + 2 * self._indent_increment)

    def _metavar(self, action: argparse.Action) -> str:
        return str(action.metavar or action.dest.upper())

    def _place(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            name = f"{self._metavar(action)} ..."
            return name if action.required else f"[{name}]"
        name = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else self._metavar(action)
        return {"+": f"{name} [{name} ...]", "*": f"[{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLES):
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """`examples`: command lines that the help ends with; they are in `self.examples` too, for who checks them."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        self.examples = tuple(examples)
        options.setdefault("formatter_class", Formatter)
        if examples:
            options["epilog"] = EXAMPLES + "\n".join(f"  {line}" for line in examples)
        super().__init__(*args, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; but a file name behind a --json that prints is refused as such, whatever else might take it."""
        printed = self._option_string_actions.get("--json")
        if printed is not None and printed.nargs == 0:
            for option, following in itertools.pairwise(args or ()):
                if option == "--json" and following.endswith(".json"):
                    self.error(f"--json: takes no value, got {following!r}; it prints JSON, use > {following}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends in one line, as all mistakes of a user do: "kvant plan: --context: must be positive, got 0"."""
        name, colon, rest = message.removeprefix("argument ").partition(": ")
        action = self._option_string_actions.get(name.split("/")[0])
        if action is not None and rest == "expected one argument":
            rest = f"expected {action.metavar or 'a value'}"
        rest = re.sub("^ignored explicit argument", "takes no value, got", rest)
        self.exit(2, f"{self.prog}: {name}{colon}{rest}\n")
