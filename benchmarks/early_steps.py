"""What does influence say of the first steps of a run, when Adam's state is empty?

Influence has two readings. *What training on the token does*: the change of the mini-batch's objective when the token
weighs half as much again, and half as much, in a real step. *What the step does to the token*: the change of its own
term by the real step, less what momentum and weight decay do alone. With an empty state Adam's step is like the
gradient's sign, which hardly depends on how much one token weighs: there the first reading fails and the second holds.

As in `benchmarks.validity`, in true float64, from states of the demo before steps 1 to 6; scores in float32.
`training_on_it_step_N` and `done_to_it_step_N`: Spearman's rank correlation over the tokens of a mini-batch, mean over
mini-batches; `baseline_step_N`: that of |A|(1−p) with the first reading.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._validity_states import collect
from benchmarks.common import emit, machine, parse_arguments
from benchmarks.validity import demo_overrides, judge
from gradtrace.instruments.verify.trial import BASELINE
from gradtrace.instruments.verify.verification import INFLUENCE
from gradtrace.intervals import mean_interval

STEPS = (1, 2, 3, 4, 5, 6)
SEEDS = (11, 12, 13)
GROUPS, MINI_BATCHES = 8, 1
READINGS = {
    "training_on_it": ("batch", INFLUENCE),
    "done_to_it": ("done", INFLUENCE),
    "baseline": ("batch", BASELINE),
}


def measured(state: Path, tokens: int, mini_batches: int) -> list[dict[str, float]]:
    """Of each mini-batch at this state: reading → rank correlation."""
    found = [judge(state, number, GROUPS, tokens, factors=False) for number in range(mini_batches)]
    return [{name: one[key][score][0] for name, (key, score) in READINGS.items()} for one in found if one]


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    torch.set_num_threads(args.threads or 1)
    steps, seeds, tokens, count = ((1, 3), SEEDS[:1], 6, 1) if args.quick else (STEPS, SEEDS, 8, MINI_BATCHES)
    found: dict[int, list[dict[str, float]]] = {step: [] for step in steps}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            states = {step: Path(folder) / f"step_{step}.pt" for step in steps}
            collect(demo_overrides(seed), states, GROUPS * count, Path(folder))
            for step, path in states.items():
                found[step] += measured(path, tokens, count)
        said = {step: [round(one["training_on_it"], 2) for one in some] for step, some in found.items()}
        print(f"seed {seed}: {said}", flush=True)
    ratios: dict[str, Any] = {}
    for name in READINGS:
        for step, some in found.items():
            mean = mean_interval([one[name] for one in some])
            ratios[f"{name}_step_{step}"] = replace(mean, high=min(1.0, mean.high))
    counts = {step: len(some) for step, some in found.items()}
    emit("early_steps", ratios, {"mini_batches": counts, "machine": machine()})


if __name__ == "__main__":
    main()
