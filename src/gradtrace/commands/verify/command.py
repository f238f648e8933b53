"""Say how far the scores of this model, optimizer and data can be trusted, by taking the steps that they speak of.

  gradtrace verify runs/demo                               the newest checkpoint whose next step was traced
  gradtrace verify runs/demo/checkpoints/step_000020       this one
  gradtrace verify runs/demo --fresh                       sample and score anew, at the latest checkpoint
  gradtrace verify runs/demo --budget 10m --groups 16      more groups, smaller intervals
  gradtrace verify runs/big/checkpoints/global_step_40     one of verl's: it is joined into a plain one first
  gradtrace verify runs/demo/policy optimizer=adamw lr=1e-4    a plain model: say whose steps
  gradtrace verify runs/theirs --model models/mine lr=1e-5     scores that `gradtrace attribute` made of stored rollouts
  gradtrace verify runs/demo trainer.influence_trace.credit=position --fresh     another score, without training again

A token's influence says, in nats, what training on this token does to the objective of its mini-batch. So from the
checkpoint's weights and optimizer state real optimizer steps are taken with the gradient of the mini-batch, in which a
single token, a single response or a random half of a group's tokens weighs half as much again, and half as much. The
difference of the objective between the two is what training on them does; momentum drops out. Shown are rank
correlations with what scores said, for the mini-batch's objective and for that of the token's own prompt, beside
|A|(1−p), which needs no gradient. 1 is perfect, 0 is chance. Sums over groups are compared with what the step did to
the groups as well.

The verdict is about the influence that the run stored, where the step after the checkpoint was traced: on its first
mini-batch, which was scored at these weights. Else it is about fresh responses. Nothing of the run is changed.

Results go to RUN/verify/step_N: report.html (with pictures), report.json, predicted_vs_measured.svg. When the budget is
spent, or after Ctrl-C, the same command goes on where it was. KEY=VALUE sets a key of the run, or optimizer
(checkpoint, adamw, sgd) and lr. Exit code 0: trustworthy; 1: not; 3: too little was measured to say.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.terminal import no_foreign_bars, progress_bar, say, seconds, settings_from

EXIT = {True: 0, False: 1, None: 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="a run, a checkpoint, or a transformers folder",
    )
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run; optimizer, lr")
    add("--budget", default="120s", help="time to spend: 90, 120s, 10m, 1h, none (default: 120s)")
    add("--fresh", action="store_true", help="sample and score anew, even if scores are stored")
    add("--groups", type=int, default=8, help="groups to measure at most (default: 8)")
    add(
        "--tokens",
        type=int,
        default=24,
        help="single tokens per group, drawn at random; 0 = all (default: 24)",
    )
    add("--halves", type=int, default=12, help="random halves per group; 0 = single tokens only (default: 12)")
    add(
        "--precision",
        choices=("auto", "float32", "float64"),
        default="auto",
        help="auto: float64 below 50 million parameters. Weights in bf16 are measured in float32",
    )
    add("--seed", type=int, default=0, help="of sampling and of the random choices (default: 0)")
    add(
        "--model",
        default="",
        help="takes the steps, on stored rollouts of RUN: a transformers folder or a checkpoint",
    )
    add("--step", type=int, help="with --model: of these rollouts (default: the latest with scores)")
    add("--output", type=Path, help="where results go (default: RUN/verify/step_N)")
    add("--json", action="store_true", help="print the report as JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gradtrace.commands.verify.page import books_sentence, terminal_table
    from gradtrace.commands.verify.session import run_verify

    no_foreign_bars()
    console = Console(stderr=args.json)
    settings, overrides = settings_of(args), run_overrides(args.overrides)
    try:
        with progress_bar(console) as progress:
            outcome = run_verify(
                args.checkpoint,
                overrides,
                settings,
                lambda what, done, total: progress(done, total, what),
                lambda text: say(console, text),
            )
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on where it was.")
        return 130
    record = outcome.write()
    if args.json:
        print((outcome.folder / "report.json").read_text())
        return EXIT[record["trustworthy"]]
    console.print(terminal_table(record))
    left = record["steps_planned"] - record["steps_taken"]
    if left or record["left_out"]:
        scores = f" and {len(record['left_out'])} scores" if record["left_out"] else ""
        say(console, f"The budget is spent: {left} steps{scores} are left. The same command goes on.")
    colour = {True: "green", False: "red", None: "yellow"}[record["trustworthy"]]
    say(console, record["verdict"], mark=f"[{colour}]verdict[/{colour}]")
    say(console, f"Scores: {record['scores']}. Pictures: {outcome.folder / 'report.html'}")
    if books := books_sentence(record):
        say(console, books)
    return EXIT[record["trustworthy"]]


OWN_KEYS = ("optimizer", "lr")


def run_overrides(words: list[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0] not in OWN_KEYS]


def settings_of(args: argparse.Namespace) -> Any:
    from gradtrace.commands.verify.session import Settings
    from gradtrace.instruments.verify.measure import Size

    for name, least in (("groups", 1), ("tokens", 0), ("halves", 0)):
        if getattr(args, name) < least:
            raise GradtraceError(f"--{name} {getattr(args, name)}: it is at least {least}")
    own = dict(word.split("=", 1) for word in args.overrides if word.partition("=")[0] in OWN_KEYS and "=" in word)
    if args.step is not None and not args.model:
        raise GradtraceError("--step needs --model; a checkpoint RUN/checkpoints/step_N has the scores of step N + 1")
    optimizer = own.get("optimizer", "checkpoint")
    if optimizer not in ("checkpoint", "adamw", "sgd"):
        raise GradtraceError(f"optimizer={optimizer}: it can be checkpoint, adamw or sgd")
    try:
        lr = float(own.get("lr", 0.0))
    except ValueError:
        raise GradtraceError(f"lr={own['lr']}: a learning rate is a number, e.g. 1e-5") from None
    if not 0 <= lr < math.inf:
        raise GradtraceError(f"lr={own['lr']}: a learning rate is positive, e.g. 1e-5")
    size = Size(args.groups, args.tokens, args.halves)
    return settings_from(args, Settings, size=size, budget=seconds(args.budget), optimizer=optimizer, lr=lr)
