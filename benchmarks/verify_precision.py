"""Is float32 enough for `gradtrace verify` above 50 million parameters, where it does not go to float64 by itself?

The same pairs of single-token steps are taken twice, in float32 and in true float64, from states of SmolLM2-135M in a
run of its countdown recipe. Reported: the rank correlation of the two measurements over the tokens of a mini-batch
(`rank_correlation_float32_float64`, mean over states), their median relative difference over all steps, and what
influence has against each. States and results stay in --folder: what is there is not made again.
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
from gradtrace.instruments.verify.measure import Size, planned, pooled, spearman
from gradtrace.instruments.verify.trial import Scores
from gradtrace.intervals import mean_interval

STEPS, TOKENS = (3, 4, 5), 3
GROUPS = 4
"""Of each rollout: all of the recipe's."""


def measured(state: Path, dtype: torch.dtype, tokens: int, scores: Scores | None) -> tuple[Scores, torch.Tensor, float]:
    """Influence (unless it is given), the change of the objective by every step in this precision, and the rank
    correlation of the two."""
    trial = trial_of(state, dtype)
    scores = trial.influence() if scores is None else scores
    effects = [one.take_all(trial) for one in planned(trial, Size(GROUPS, tokens, halves=0), seed=0)]
    changes = torch.tensor([step[0] for one in effects for step in one.measured], dtype=torch.float64)
    return scores, changes, pooled([one.pairs(scores) for one in effects], spearman)


def compared(state: Path, tokens: int) -> dict[str, Any] | None:
    """How far the measurements in both precisions are apart; None where no group has different rewards."""
    if not trial_of(state, torch.float32).members:
        return None
    scores, rounded, of_rounded = measured(state, torch.float32, tokens, None)
    _, truth, of_truth = measured(state, torch.float64, tokens, scores)
    return {
        "steps": len(truth),
        "rank_correlation": spearman(rounded, truth),
        "relative_differences": ((rounded - truth).abs() / truth.abs()).tolist(),
        "median_effect": float(truth.abs().median()),
        "largest_difference": float((rounded - truth).abs().max()),
        "score_against_float32": of_rounded,
        "score_against_float64": of_truth,
    }


def measure(steps: tuple[int, ...], tokens: int, folder: Path) -> list[dict[str, Any]]:
    """One entry for each step whose rollout had a group with different rewards."""
    found, states = [], {step: folder / f"state_{step}.pt" for step in steps}
    for step in steps:
        result = folder / f"step_{step}_{tokens}.json"
        if not result.exists():
            collect(countdown_overrides(), {s: path for s, path in states.items() if s >= step}, GROUPS, folder)
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
        rows = measure((3,) if args.quick else STEPS, 1 if args.quick else TOKENS, folder)
    if not rows:
        raise SystemExit("benchmark: no rollout had a group with different rewards")
    agreement = mean_interval([row["rank_correlation"] for row in rows])
    ratios = {
        "rank_correlation_float32_float64": replace(agreement, high=min(1.0, agreement.high)),
        "median_relative_difference_float32": median_interval([d for row in rows for d in row["relative_differences"]]),
    }
    emit("verify_precision", ratios, {"mini_batches": rows, "machine": machine()})


if __name__ == "__main__":
    main()
