"""What was a token worth? ΔV of the tokens of a group: how much each changed the reward that could be expected.

  gradtrace counterfactual runs/demo --step 20                    the first group whose rewards differ
  gradtrace counterfactual runs/demo --step 20 --group 3 --k 64   more continuations, narrower intervals
  gradtrace counterfactual runs/gsm8k --step 8 --tokens interesting:10 --budget 5m
  gradtrace counterfactual runs/mine --step 8 reward.path=my_rewards.py:mine

V of a prefix is the reward that the policy gets on average when it goes on from there; ΔV of a token is V with it minus
V before it. The policy is the checkpoint nearest to the one that wrote the responses, sampled as in the run and judged
by the run's reward. A reward in a file of its own is executed only if the command names it, as the last example does.

Results go to RUN/counterfactual: `gradtrace view RUN` shows them, `gradtrace trace show RUN --kind counterfactual`
prints them. What was interrupted goes on when the same command is given again; with a larger --k more is added.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError
from gradtrace.terminal import command, no_foreign_bars, progress_bar, seconds

if TYPE_CHECKING:
    from gradtrace.commands.resampling import Resampler
    from gradtrace.instruments.counterfactual.columns import MeasuredGroup

BARS = "▁▂▃▄▅▆▇█"
DECISIVE = 3
"""Tokens of a response that the table names."""
MOST_K = 100_000
REWARD_ROUNDING = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="a run, or RUN/checkpoints/step_N to sample from")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run, e.g. reward.path=…")
    add("--step", type=int, help="training step (default: the latest that was traced)")
    add("--group", type=int, help="index of the group (default: the first whose rewards differ)")
    add("--response", type=int, help="its tokens only, counted from 0 within the group")
    add(
        "--tokens",
        default="auto",
        help="all; interesting, entropy, influence or difference, each with :N for so many of each response; positions "
        "such as 0,4-9; auto (default): all of a short group, else the interesting ones",
    )
    add("--k", type=int, default=16, help="continuations of a prefix, on average (default: 16)")
    add("--budget", default="", help="stop after so long, e.g. 90s or 5m; the same command goes on")
    add("--model", type=Path, help="a transformers folder to sample from, instead of a checkpoint")
    add("--seed", type=int, default=0)
    add("--fresh", action="store_true", help="forget what was measured of this group before")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gradtrace.commands.resampling import Resampler

    no_foreign_bars()
    if not 1 <= args.k <= MOST_K:
        raise GradtraceError(f"--k {args.k}: it is at least 1 and at most {MOST_K}")
    budget = seconds(args.budget)
    console = Console(highlight=False)
    resampler = Resampler(args.run_dir, args.overrides, args.model)
    try:
        step, group, complete = measure(resampler, args, budget, console)
    except KeyboardInterrupt:
        console.print("Interrupted. What was sampled is kept; the same command goes on.")
        return 130
    show(console, resampler, step, group)
    if not complete:
        console.print("The budget is used up. The same command goes on where it was.")
    console.print(f"Look at it: {command()} view {resampler.run_dir}", soft_wrap=True)
    return 0


def measure(
    resampler: Resampler, args: argparse.Namespace, budget: float, console: Any
) -> tuple[int, MeasuredGroup, bool]:
    """(step, the group with all samples, whether all that was asked for is there)."""
    from gradtrace.commands.resampling import described
    from gradtrace.instruments.counterfactual.measure import choose
    from gradtrace.instruments.counterfactual.sampling import missing

    steps = resampler.steps()
    step = args.step if args.step is not None else (steps[-1] if steps else 0)
    source = resampler.group(step, args.group)
    only = None
    if args.response is not None:
        if not 0 <= args.response < len(source.responses):
            raise GradtraceError(f"no response {args.response}; the group has 0 to {len(source.responses) - 1}")
        only = [args.response]
    console.print(f"Step {step}, group {source.index}: {len(source.responses)} responses.")
    console.print(f"Sampling from {described(resampler.nearest(step), step)}.", soft_wrap=True)
    with resampler.writing() as writer:
        group = None if args.fresh else resampler.stored(step, source)
        continuations = None
        if group is None:
            continuations = resampler.continuations(step, source, args.seed)
            group = resampler.begin(step, source, continuations)
            other = int((abs(group.measurement.rewards - source.rewards) > REWARD_ROUNDING).sum())
            if other:
                console.print(
                    f"{other} responses have another reward now than in training (flipped, shaped, or another reward "
                    "function); V is about the reward as it judges now."
                )
        group.measurement.measure(choose(args.tokens, group.measurement, source.clues, only))
        if missing(group.measurement, args.k) > 0:
            continuations = continuations or resampler.continuations(step, source, args.seed)
            found = group

            def save() -> None:
                resampler.save(writer, step, found)

            with progress_bar(console, "continuations") as progress:
                complete = continuations.run(
                    group.measurement, args.k, budget=budget, progress=progress, after_round=save
                )
        else:
            complete = True
        resampler.save(writer, step, group)
    return step, group, complete


def show(console: Any, resampler: Resampler, step: int, group: MeasuredGroup) -> None:
    """A line per response: its reward, V along it, and the tokens that changed most."""
    import numpy as np
    from rich.table import Table
    from rich.text import Text

    from gradtrace.instruments.counterfactual.measure import results
    from gradtrace.trace.token_text import pieces

    found = results(group.measurement)
    of_prompt = f"{found[0].value[0]:.3f} ± {found[0].value_stderr[0]:.3f}"
    console.print(f"{len(group.measurement.samples)} continuations; V(prompt) = {of_prompt} (standard error)")
    table = Table("response", "reward", "V along it", "most decisive tokens: ΔV ± standard error")
    for index, (result, ids) in enumerate(zip(found, group.measurement.responses, strict=True)):
        shown = pieces(ids, resampler.run.token_bytes, continues=True)
        known = np.flatnonzero(np.isfinite(result.delta_v))
        most = known[np.argsort(-np.abs(result.delta_v[known]), kind="stable")][:DECISIVE]
        words = [f"{shown[t]!r} at {t}: {result.delta_v[t]:+.3f} ± {result.stderr[t]:.3f}" for t in most]
        table.add_row(str(index), f"{result.reward:g}", Text(curve(result.value)), Text("\n".join(words)))
    console.print(table)


def curve(values: Any, width: int = 40) -> str:
    """V as a row of blocks, from the lowest to the highest reward that it comes to (0 to 1 at least)."""
    import numpy as np

    known = np.array([value for value in values if np.isfinite(value)])
    low, high = min(0.0, known.min()), max(1.0, known.max())
    picked = known[np.linspace(0, len(known) - 1, min(width, len(known))).round().astype(int)]
    return "".join(BARS[int((value - low) / (high - low) * (len(BARS) - 1) + 0.5)] for value in picked)
