"""Score the stored rollouts of a run under a model, without training: which tokens would push where, if it trained.

  gradtrace attribute runs/theirs --model models/mine               all steps of imported rollouts
  gradtrace attribute runs/theirs --model models/mine --step 3 --group 0 --group 4 --budget 10m
  gradtrace attribute runs/demo --model runs/demo/checkpoints/step_000020 --step 21 --output runs/anew
  gradtrace attribute runs/theirs --model models/mine trainer.influence_trace.credit=position actor.mini_batch_size=16

RUN is any run with rollouts: imported (`gradtrace trace import`), recorded or our own. MODEL is a transformers folder,
a checkpoint or a run. Scores are those of the influence trace, as training would write them at these weights: the
geometry is the optimizer's state if MODEL is a checkpoint that has one, else what AdamW's first step would use, the
step's own gradient; the command and the files say which. The run's settings (algorithm, mini-batch, clipping) count;
KEY=VALUE sets others.

Scores go to RUN/influence_trace, entropies and log-probs to RUN/entropy_trace where the run has none; a run that was
traced in training keeps its own: --output makes a new run, --replace replaces. When the budget is spent the same
command goes on where it was. Then `gradtrace view RUN` shows them, `gradtrace verify RUN --model MODEL` checks them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradtrace.errors import GradtraceError
from gradtrace.terminal import command, no_foreign_bars, progress_bar, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="a run with stored rollouts")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    add("--model", required=True, help="a transformers folder, a checkpoint or a run")
    add("--step", type=int, action="append", default=[], help="may be repeated (default: all)")
    add(
        "--group",
        type=int,
        action="append",
        default=[],
        help="index of a group; may be repeated (default: all whose rewards differ)",
    )
    add("--budget", default="", help="stop after the step in which so long has passed, e.g. 90s or 5m")
    add("--output", type=Path, metavar="NEW", help="a new run for the scores")
    add("--replace", action="store_true", help="replace scores that the run has of these steps")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gradtrace.commands.rollouts.attribution import attribute

    no_foreign_bars()
    if args.output is not None and args.output.resolve() == args.run_dir.resolve():
        raise GradtraceError("--output is the run itself: leave it out, or give another name")
    console = Console(highlight=False)
    with progress_bar(console) as progress:
        found = attribute(args, lambda what, done, total: progress(done, total, what), lambda text: say(console, text))
    if found.optimizer:
        say(console, f"Optimizer: {found.optimizer}.")
    console.print(
        f"{len(found.done)} steps scored: {found.responses} responses, {found.tokens} tokens"
        + (f"; {len(found.before)} were scored before" if found.before else "")
        + "."
    )
    if found.left:
        console.print(f"The budget is used up: {len(found.left)} steps are left. The same command goes on.")
    say(console, f"Look at it: {command()} view {found.folder}")
    return 0
