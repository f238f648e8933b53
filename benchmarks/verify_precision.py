"""Is float32 enough for `gradtrace verify` above 50 million parameters, where it does not go to float64 by itself?

The same single-token steps are taken twice from one checkpoint of SmolLM2-135M, by `gradtrace verify --precision
float32` and `--precision float64`. Reported: the rank correlation of the two measurements within each group
(`rank_correlation_float32_float64`, mean over groups), their median relative difference, and what the run's scores have
against each. The run is made at first use: two steps of the countdown recipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._validity_states import countdown_overrides
from benchmarks.common import emit, parse_arguments, study_folder
from gradtrace.instruments.verify.agreement import spearman

PRECISIONS = ("float32", "float64")


def gradtrace(*arguments: str, allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run([sys.executable, "-m", "gradtrace.cli", *arguments])
    if done.returncode not in allowed:
        sys.exit(f"benchmark: gradtrace {arguments[0]} ended with {done.returncode}; its error is above")


def make_run(folder: Path) -> Path:
    """Two traced steps of SmolLM2-135M on countdown with a checkpoint after each, unless they are there."""
    run = folder / "smollm2_countdown"
    if not (run / "summary.json").is_file():
        sizes = (
            "data.train_batch_size=6",
            "rollout.n=8",
            "trainer.total_steps=2",
            "trainer.checkpoint.every=1",
        )
        traced = ("trainer.traces=true", "trainer.blame.enable=false", f"trainer.runs_dir={folder}")
        gradtrace("train", *countdown_overrides(), *sizes, *traced)
    return run


def measure(run: Path, folder: Path, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """The report of a verification in this precision: single tokens of a few groups."""
    size = ("--groups", str(args.groups), "--tokens", str(6 if args.quick else args.tokens), "--halves", "0")
    where = ("--precision", precision, "--output", str(folder / precision), "--budget", args.budget)
    gradtrace("verify", str(run), *size, *where, allowed=(0, 1, 3))
    report: dict[str, Any] = json.loads((folder / precision / "report.json").read_text())
    return report


def compared(single: dict[str, Any], double: dict[str, Any]) -> dict[str, Any]:
    """How far the two reports' measurements are apart, one entry per group."""
    rows = []
    for theirs, ours in zip(double["steps"], single["steps"], strict=False):
        assert (theirs["kind"], theirs["group"]) == (ours["kind"], ours["group"])
        exact, rounded = (torch.tensor(some["measured"], dtype=torch.float64) for some in (theirs, ours))
        steps = min(len(exact), len(rounded))  # a budget may have ended one of them earlier
        exact, rounded = exact[:steps], rounded[:steps]
        rows.append(
            {
                "group": ours["group"],
                "steps": steps,
                "rank_correlation": spearman(rounded, exact),
                "median_relative_difference": float(((rounded - exact).abs() / exact.abs()).median()),
                "median_effect": float(exact.abs().median()),
                "largest_difference": float((rounded - exact).abs().max()),
                "score_against_float32": spearman(torch.tensor(ours["predicted"][:steps]), rounded),
                "score_against_float64": spearman(torch.tensor(theirs["predicted"][:steps]), exact),
            }
        )
    return {"groups": rows, "verdicts": {"float32": single["verdict"], "float64": double["verdict"]}}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=study_folder("verify_precision"), help="where results stay")
    parser.add_argument("--run", type=Path, help="a run with checkpoints (default: made in the folder)")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=12, help="single tokens of each group")
    parser.add_argument("--budget", default="none", help="of each verification, such as 10m; it goes on next time")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, add_options)
    run = args.run or make_run(args.folder)
    found = compared(*(measure(run, args.folder, precision, args) for precision in PRECISIONS))
    rows = found["groups"]
    ratios = {
        "rank_correlation_float32_float64": np.mean([row["rank_correlation"] for row in rows]),
        "median_relative_difference_float32": np.median([row["median_relative_difference"] for row in rows]),
    }
    emit("verify_precision", {name: float(value) for name, value in ratios.items()}, found)


if __name__ == "__main__":
    main()
