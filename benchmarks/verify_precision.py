"""Is float32 enough for `gradtrace verify` above 50 million parameters, where it does not go to float64 by itself?

The same single-token steps are taken twice, in float32 and in float64, from states of SmolLM2-135M in a run of its
countdown recipe, one group of each. Reported: the rank correlation of the two measurements within a group
(`rank_correlation_float32_float64`, mean over groups), their median relative difference over all steps, and what the
default score has against each. States and results stay in --folder: what is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._validity_states import collect, countdown_overrides, trial_of
from benchmarks.common import emit, machine, median_interval, parse_arguments, study_folder
from gradtrace.instruments.verify.measure import Effects, Size, planned, spearman
from gradtrace.instruments.verify.verification import exact
from gradtrace.intervals import mean_interval

STEPS, TOKENS = (2, 3, 4), 8
GROUPS_KEPT = 4
"""Of each rollout: all of the recipe's. The first with accepted and rejected responses is measured."""


def measured(state: Path, dtype: torch.dtype, tokens: int, scored: bool) -> tuple[Effects, list[float]] | None:
    """Steps on single tokens of a state's first group in this precision, and the default score of each if `scored`;
    None where no group has a contrast."""
    trial = trial_of(state, dtype)
    if not trial.members:
        return None
    trial.keep(list(trial.members)[:1])
    (steps,) = planned(trial, Size(groups=1, tokens=tokens, halves=0), seed=0)
    steps.take_all(trial)
    return steps, steps.predicted(trial.scores(exact())) if scored else []


def compared(state: Path, tokens: int) -> dict[str, Any] | None:
    """How far the measurements in both precisions are apart."""
    single = measured(state, torch.float32, tokens, scored=True)
    double = measured(state, torch.float64, tokens, scored=False)
    if single is None or double is None:
        return None
    (steps, scores), (exact_steps, _) = single, double
    rounded, truth = (torch.tensor(some.measured, dtype=torch.float64) for some in (steps, exact_steps))
    return {
        "group": steps.groups[0],
        "steps": len(truth),
        "rank_correlation": spearman(rounded, truth),
        "relative_differences": ((rounded - truth).abs() / truth.abs()).tolist(),
        "median_effect": float(truth.abs().median()),
        "largest_difference": float((rounded - truth).abs().max()),
        "score_against_float32": spearman(torch.tensor(scores), rounded),
        "score_against_float64": spearman(torch.tensor(scores), truth),
    }


def measure(steps: tuple[int, ...], tokens: int, folder: Path) -> list[dict[str, Any]]:
    """One entry for each step whose rollout had a mixed group."""
    found, states = [], {step: folder / f"state_{step}.pt" for step in steps}
    for step in steps:
        result = folder / f"step_{step}_{tokens}.json"
        if not result.exists():
            collect(countdown_overrides(), {s: path for s, path in states.items() if s >= step}, GROUPS_KEPT, folder)
            result.write_text(json.dumps(compared(states[step], tokens)))
            states[step].unlink()
            print(f"step {step}: {result.read_text()}", flush=True)
        found.append(json.loads(result.read_text()))
    return [row for row in found if row is not None]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=study_folder("verify_precision"), help="where results stay")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, add_options)
    torch.set_num_threads(args.threads or 1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "quick" if args.quick else args.folder
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure((2,) if args.quick else STEPS, 3 if args.quick else TOKENS, folder)
    if not rows:
        raise SystemExit("benchmark: no rollout had a group with accepted and rejected responses")
    agreement = mean_interval([row["rank_correlation"] for row in rows])
    ratios = {
        "rank_correlation_float32_float64": replace(agreement, high=min(1.0, agreement.high)),
        "median_relative_difference_float32": median_interval([d for row in rows for d in row["relative_differences"]]),
    }
    emit("verify_precision", ratios, {"groups": rows, "machine": machine()})


if __name__ == "__main__":
    main()
