"""The `gradtrace` command. Each subcommand lives beside the code it drives and is imported only when called,
so that `gradtrace --help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from gradtrace import __version__

# name: (module of gradtrace with `add_arguments(parser)` and `run(args) -> int | None`, one line of help)
COMMANDS = {
    "train": ("commands.train", "train a policy; without arguments, the demo"),
    "view": ("commands.view", "look at runs in the browser: curves, groups, token heat maps"),
    "report": ("commands.report", "one HTML file of a run, to send or to keep"),
    "trace": ("commands.trace", "list, show, export or import the traces of a run"),
    "compare": ("commands.compare.command", "curves of several runs with intervals over seeds, at equal cost"),
    "eval": ("commands.eval.command", "how good a model is at a task, and whether it got better"),
    "data": ("commands.data", "make data sets ready for training: gsm8k, dapo_math, mbpp …"),
    "verify": (
        "commands.verify.command",
        "how far the scores of a run can be trusted, measured by real optimizer steps",
    ),
    "probe": ("commands.probe.command", "what the next update will do to entropy, predicted, measured, and by whom"),
    "blame": ("commands.blame", "who made a step's gradient, entropy, reward, length or KL what it is"),
    "attribute": (
        "commands.attribute",
        "score stored rollouts, imported or your own, under any model, without training",
    ),
    "select": ("commands.select", "rank a data set or saved rollouts by how much they help a validation set"),
    "counterfactual": (
        "commands.counterfactual",
        "what was each token worth: expected reward with and without it, by sampled continuations",
    ),
    "ablate": ("commands.ablate.command", "one rollout scored with every combination of influence settings"),
    "doctor": ("commands.doctor.command", "check the installation, a run, a new GPU, or the gradients of a model"),
    "completion": ("commands.completion", "print a script that completes commands and keys in your shell"),
}

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Set before torch is imported, which reads it: threads that wait sleep instead of spinning. Spinning ones take the
time of those they wait for, and beside another busy process sampling became an order of magnitude slower."""

EPILOG = """\
examples:
  gradtrace train                             the demo: a tiny model learns arithmetic, about three minutes
  gradtrace view                              the latest run in the browser, also while it trains
  gradtrace trace show runs/demo --step 3     one group in the terminal, tokens coloured by influence
  gradtrace verify runs/demo                  do its scores predict what training does?
  gradtrace report runs/demo -o report.html   one file to send to a colleague
  gradtrace data prepare gsm8k                a data set, clean and split, ready for `gradtrace train recipe=grpo_gsm8k`
  gradtrace eval runs/grpo_gsm8k --task gsm8k mean@n and pass@k with intervals
  gradtrace doctor --model runs/demo/policy   which layers can be traced, and what it costs

`gradtrace COMMAND --help` explains each command.
"""


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradtrace",
        description="RL post-training for language models that shows its work.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gradtrace {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == wanted:
            module = importlib.import_module(f"gradtrace.{module_name}")
            subparser.description = module.__doc__
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of a command, with its options before, between or after its words."""
    parser = build_parser(argv)
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    if not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    command = commands[argv[0]]
    if any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
        return parser.parse_args(argv)
    return command.parse_intermixed_args(argv[1:], argparse.Namespace(command=argv[0]))


def main(argv: list[str] | None = None) -> int:
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    from gradtrace.errors import GradtraceError

    try:
        return args.run(args) or 0
    except GradtraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `gradtrace trace show … | head`
        sys.stderr.close()
        return 0
    except OSError as error:  # a folder that may not be written, a disk that is full
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
