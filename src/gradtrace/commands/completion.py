"""Print a shell script that completes gradtrace's commands, options and configuration keys.

examples:
  eval "$(gradtrace completion bash)"        in ~/.bashrc
  eval "$(gradtrace completion zsh)"         in ~/.zshrc
  gradtrace train trainer.inf<TAB>           then completes trainer.influence_trace.…
"""

from __future__ import annotations

import argparse

TAKE_CONFIG_KEYS = {"train", "ablate"}

# Words end in `=` (configuration keys) or name an option; only the latter are followed by a space.
SCRIPT = """\
_gradtrace() {
  local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@COMMANDS@"
  else
    case "$command" in
@CASES@
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [ "${#COMPREPLY[@]}" -eq 0 ]; then
    COMPREPLY=($(compgen -f -- "$word"))
  elif [ "${#COMPREPLY[@]}" -eq 1 ] && [ "${COMPREPLY[0]%=}" != "${COMPREPLY[0]}" ]; then
    compopt -o nospace 2>/dev/null
  fi
}
complete -F _gradtrace gradtrace
"""
ZSH_PREAMBLE = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="which shell to complete in")


def run(args: argparse.Namespace) -> None:
    print(script(args.shell), end="")


def script(shell: str) -> str:
    from gradtrace.cli import COMMANDS
    from gradtrace.config.keys import schema_keys
    from gradtrace.config.root import Config

    known = set(schema_keys(Config))
    sections = {key.rpartition(".")[0] for key in known}
    keys = " ".join(f"{key}=" for key in sorted(known - sections))
    cases = []
    for name in COMMANDS:
        words = " ".join(options_of(name)) + (f" {keys}" if name in TAKE_CONFIG_KEYS else "")
        cases.append(f'      {name}) words="{words}" ;;')
    body = SCRIPT.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@CASES@", "\n".join(cases))
    return (ZSH_PREAMBLE if shell == "zsh" else "") + body


def options_of(command: str) -> list[str]:
    """Long options, names of sub-subcommands and fixed choices of a command."""
    from gradtrace.cli import build_parser

    subparsers = next(
        action for action in build_parser([command])._actions if isinstance(action, argparse._SubParsersAction)
    )
    words: list[str] = []
    for action in subparsers.choices[command]._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if action.choices is not None and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    return words
