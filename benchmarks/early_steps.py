"""Does the default score predict single-token steps at the start of a run, too?

Adam divides by a mean of the squared gradients so far. After few of them, a step on one token alone makes much of that
mean itself, which no score of a whole batch can know. As in `benchmarks.validity`, from states of the demo before steps
1, 2, 3, 5 and 10 real optimizer steps are taken on single tokens, in float64; `single_token_step_N` is the mean over
groups of Spearman's rank correlation with the score.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._validity_states import collect, trial_of
from benchmarks.common import emit, machine, parse_arguments
from gradtrace.instruments.verify.measure import Size, planned, spearman
from gradtrace.instruments.verify.verification import exact
from gradtrace.intervals import mean_interval

STEPS = (1, 2, 3, 5, 10)
SEEDS = (11, 12, 13)
GROUPS = 6


def agreement(state: Path, tokens: int) -> list[float]:
    """Of each group: the rank correlation of score and measured effect over some of its tokens."""
    trial = trial_of(state)
    trial.keep(list(trial.members)[:GROUPS])
    scores, found = trial.scores(exact()), []
    for group in planned(trial, Size(groups=GROUPS, tokens=tokens, halves=0), seed=0):
        group.take_all(trial)
        found.append(spearman(torch.tensor(group.predicted(scores)), torch.tensor(group.measured)))
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    torch.set_num_threads(args.threads or 1)
    steps, seeds, tokens = ((1, 2), SEEDS[:1], 4) if args.quick else (STEPS, SEEDS, 24)
    found: dict[int, list[float]] = {step: [] for step in steps}
    for seed in seeds:
        overrides = ["recipe=demo", f"trainer.seed={seed}", f"task.arithmetic.warm_start.seed={seed}"]
        with tempfile.TemporaryDirectory() as folder:
            states = {step: Path(folder) / f"step_{step}.pt" for step in steps}
            collect(overrides, states, GROUPS + 2, Path(folder))
            for step, path in states.items():
                found[step] += agreement(path, tokens)
        print(f"seed {seed}: {[str(mean_interval(values)) for values in found.values()]}", flush=True)
    means = {step: mean_interval(values) for step, values in found.items()}
    ratios: dict[str, Any] = {f"single_token_step_{s}": replace(m, high=min(1.0, m.high)) for s, m in means.items()}
    emit("early_steps", ratios, {"groups": {step: len(values) for step, values in found.items()}, "machine": machine()})


if __name__ == "__main__":
    main()
