"""kvant completion: a script that lets a shell complete commands, options and recipes.

The script is written from the parsers, so that it knows what this version knows.
"""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish")
RECIPES = ("--recipe", "--candidates")  # options that take recipes
PLACES = (
    "--artifact",
    "--out",
    "--text",
    "--calibration-text",
    "--json",
    "--html",
    "--bench",
    "--api-key-file",
    "--model",
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        examples=(
            "kvant completion bash > ~/.local/share/bash-completion/completions/kvant",
            "kvant completion fish > ~/.config/fish/completions/kvant.fish",
        ),
        help="print a script for the shell that completes commands, options and recipes",
        description="Prints a script for bash, zsh or fish that completes commands, options and recipes.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvant import recipes
    from kvant.cli import parser

    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](commands, recipes.names()), end="")
    return 0


def _choices(action: argparse.Action) -> list[str]:
    return list(map(str, action.choices or ()))


def _positional(found: argparse.ArgumentParser) -> list[str]:
    return [choice for action in found._actions if not action.option_strings for choice in _choices(action)]


def bash(commands: Any, recipes: list[str]) -> str:
    """A function _kvant that fills COMPREPLY. Recipes may be several with commas between them: the last one is completed."""
    options: list[str] = []
    values: dict[str, list[str]] = {}
    for name, found in commands.choices.items():
        words = [option for action in found._actions for option in action.option_strings]
        options.append(f"    {name}) words={' '.join([*words, *_positional(found)])!r} ;;")
        values |= {o: _choices(a) for a in found._actions for o in a.option_strings if a.choices}
    cases = [f"    {option}) words={' '.join(choices)!r} ;;" for option, choices in values.items()]
    return f"""\
# kvant completion bash > ~/.local/share/bash-completion/completions/kvant
_kvant() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words= lead=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(commands.choices)} --help --version' -- "$word")); return
  fi
  case "$before" in
    {"|".join(RECIPES)})
      case "$word" in *,*) lead="${{word%,*}}," ;; esac
      COMPREPLY=($(compgen -P "$lead" -W '{" ".join(recipes)} all' -- "${{word##*,}}")); return ;;
    {"|".join(PLACES)}) COMPREPLY=($(compgen -f -- "$word")); return ;;
{chr(10).join(cases)}
  esac
  [ -n "$words" ] || case "$command" in
{chr(10).join(options)}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -F _kvant kvant
"""


def zsh(commands: Any, recipes: list[str]) -> str:
    """zsh runs bash's function."""
    start = "# kvant completion zsh > ~/.kvant.zsh, and in ~/.zshrc: source ~/.kvant.zsh\n"
    start += "autoload -U +X bashcompinit && bashcompinit\n"
    return start + bash(commands, recipes).partition("\n")[2]


def fish(commands: Any, recipes: list[str]) -> str:
    lines = ["# kvant completion fish", "complete -c kvant -f"]
    for name, found in commands.choices.items():
        help_of = next(action.help or "" for action in commands._choices_actions if action.dest == name)
        lines.append(f"complete -c kvant -n __fish_use_subcommand -a {name} -d {_quoted(help_of)}")
        inside = f"complete -c kvant -n '__fish_seen_subcommand_from {name}'"
        if _positional(found):
            lines.append(f"{inside} -a {_quoted(' '.join(_positional(found)))}")
        for action in found._actions:
            for option in (each for each in action.option_strings if each.startswith("--")):
                takes = "" if action.nargs == 0 else " -r"
                words = [*recipes, "all"] if option in RECIPES else _choices(action)
                if words:
                    takes += f" -a {_quoted(' '.join(words))}"
                elif option in PLACES:
                    takes += " -F"
                lines.append(f"{inside} -l {option[2:]}{takes} -d {_quoted((action.help or '').split(';')[0])}")
            lines += [f"{inside} -s h -d 'show help'"] * ("-h" in action.option_strings)
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
