"""Does influence predict training? The yardstick of every score that this product shows.

From real states of real runs (weights, Adam's moments, mini-batches) real optimizer steps are taken in true float64,
with the gradient of a whole mini-batch in which one token weighs half as much again, and half as much. The difference
between the two is what training on the token does: to the objective of the mini-batch, and to its own group's part of
it. Both are compared with what scores say (Spearman, Pearson), over the tokens of a mini-batch and over those of a
group; the scores are computed in float32, as training has them. Beside them stands |A|(1−p), which needs no
gradient. The books: the sum of a group's influence against the measured change of its objective by the real step, less
what momentum and weight decay do alone.

The demo: 40 mini-batches of 8 groups before steps 21, 41 and 61, seeds that no setting was tuned on. SmolLM2-135M on
countdown: five mini-batches of 4 groups after some steps, tokens of two groups each, and the books of more.

States and results stay in --folder: what is there is not made again, so a run that was interrupted goes on.
`--write-docs` rewrites the tables and the picture of docs/validity.md from all results in the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._validity_page import write_page
from benchmarks._validity_states import collect, countdown_overrides, trial_of
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments, study_arguments
from gradtrace.instruments.verify.measure import Effects, Pairs, Size, pearson, planned, pooled, slope, spearman
from gradtrace.instruments.verify.trial import BASELINE, Scores, Trial
from gradtrace.instruments.verify.verification import INFLUENCE, INFLUENCE_OWN, factor_scores, flat_pairs

Found = dict[str, Any]
"""What was measured of one mini-batch."""


@dataclass(frozen=True)
class Source:
    name: str
    """demo or smollm2, and the seed."""
    overrides: Callable[[], list[str]]
    mini_batches: dict[int, int]
    """State → how many mini-batches of its rollout are measured. The state after so many steps."""
    groups: int
    """Of a mini-batch."""
    tokens: int
    """Of a group that are measured; 0: the books alone."""
    measured: int = 0
    """Groups of a mini-batch whose tokens are measured; 0: all."""
    factors: bool = True
    """Scores from captured factors as well."""

    def state(self, folder: Path, step: int) -> Path:
        return folder / f"{self.name}_{step}.pt"

    def result(self, folder: Path, step: int, number: int) -> Path:
        return folder / f"{self.name}_{step}_{number}.json"


def demo_overrides(seed: int) -> list[str]:
    return ["recipe=demo", f"trainer.seed={seed}", f"task.arithmetic.warm_start.seed={seed}"]


def sources(quick: bool) -> list[Source]:
    if quick:
        return [Source("demo0", partial(demo_overrides, 0), {8: 1}, 4, 6)]
    parts = {20: 4, 40: 3, 60: 3}
    demo = [Source(f"demo{seed}", partial(demo_overrides, seed), parts, 8, 16) for seed in (21, 22, 23, 24)]
    return [
        *demo,
        Source("smollm2", countdown_overrides, dict.fromkeys((4, 5, 6, 7, 8), 1), 4, 6, 2, factors=False),
        Source("smollm2books", countdown_overrides, dict.fromkeys((9, 10), 1), 4, 0, factors=False),
    ]


# ---------------------------------------------------------------- one mini-batch


def scores_of(trial: Trial, factors: bool) -> dict[str, Scores]:
    """What every score says of the trial's tokens."""
    found: dict[str, Scores] = {
        INFLUENCE: trial.influence(),
        INFLUENCE_OWN: trial.influence_own(list(trial.members)),
    }
    if factors:
        found |= {name: trial.factors(config) for name, config in factor_scores().items()}
    return found


def judge(path: Path, number: int, groups: int, tokens: int, factors: bool = True, measured: int = 0) -> Found | None:
    """Everything about one mini-batch; None where no group of it has different rewards."""
    trial = trial_of(path, torch.float32, number, groups)
    if not trial.members:
        return None
    predictions = scores_of(trial, factors)
    del trial
    trial = trial_of(path, torch.float64, number, groups)
    predictions |= trial.baselines()
    size = Size(groups=(measured or len(trial.members)) if tokens else 0, tokens=tokens, halves=0)
    effects = [one.take_all(trial) for one in planned(trial, size, seed=number)]
    done = {group: {r: trial.done[r] for r in rows} for group, rows in trial.members.items()}
    of_done = {name: [flat_pairs(scores, rows) for rows in done.values()] for name, scores in predictions.items()}
    return {
        "tokens": sum(len(one.measured) for one in effects),
        "batch": {name: both([one.pairs(scores) for one in effects]) for name, scores in predictions.items()},
        "own": {name: of_groups(effects, scores) for name, scores in predictions.items()},
        "done": {
            name: both([flat_pairs(scores, rows) for rows in done.values()]) for name, scores in predictions.items()
        },
        "books": [[float(said.sum()), float(did.sum())] for said, did in of_done[INFLUENCE]],
    }


def both(pairs: list[Pairs]) -> list[float]:
    """Spearman and Pearson over all steps together."""
    return [pooled(pairs, spearman), pooled(pairs, pearson)]


def of_groups(effects: list[Effects], scores: Scores) -> list[list[float]]:
    """The same of each group for itself, of what tokens do to their own prompt."""
    return [both([one.pairs(scores, own=True)]) for one in effects]


def run(source: Source, folder: Path, deadline: float) -> None:
    """What is missing of a source's states and results, until the deadline."""
    missing = {
        step: [n for n in range(count) if not source.result(folder, step, n).exists()]
        for step, count in source.mini_batches.items()
    }
    missing = {step: numbers for step, numbers in missing.items() if numbers}
    # The state after `step` steps is the one before the next.
    states = {step + 1: source.state(folder, step) for step in missing}
    absent = {step: path for step, path in states.items() if not path.exists()}
    if absent and time.time() < deadline:
        collect(source.overrides(), absent, source.groups * max(source.mini_batches.values()), folder)
    for step, numbers in missing.items():
        for number in numbers:
            if time.time() > deadline:
                return
            begun = time.time()
            found = judge(
                source.state(folder, step), number, source.groups, source.tokens, source.factors, source.measured
            )
            about = {"source": source.name, "step": step, "mini_batch": number}
            source.result(folder, step, number).write_text(json.dumps(about | (found or {"books": []})))
            said = f"{found['tokens']} tokens" if found else "no group with different rewards"
            if found and found["tokens"]:
                said += f", Spearman {found['batch'][INFLUENCE][0]:.3f}, baseline {found['batch'][BASELINE][0]:.3f}"
            print(f"{source.name} step {step} mini-batch {number}: {said}, {time.time() - begun:.0f} s", flush=True)
        source.state(folder, step).unlink()


# ---------------------------------------------------------------- all of them


def spread(values: list[float]) -> dict[str, float]:
    """Median, and 10th and 90th percentile."""
    known = np.asarray([value for value in values if value == value])
    if not len(known):
        return {"median": float("nan"), "low": float("nan"), "high": float("nan"), "count": 0}
    low, median, high = np.percentile(known, [10, 50, 90])
    return {"median": float(median), "low": float(low), "high": float(high), "count": len(known)}


def summary(results: list[Found]) -> Found:
    """Question → score → Spearman and Pearson as `spread`; and the books."""
    measured = [one for one in results if one.get("tokens")]
    table: Found = {}
    for question in ("batch", "own", "done"):
        for name in measured[0][question] if measured else ():
            values = [
                pair for one in measured for pair in (one["own"][name] if question == "own" else [one[question][name]])
            ]
            names = ("spearman", "pearson")
            table.setdefault(question, {})[name] = {
                kind: spread([pair[place] for pair in values]) for place, kind in enumerate(names)
            }
    books = torch.tensor([pair for one in results for pair in one["books"]], dtype=torch.float64).reshape(-1, 2)
    return {
        "table": table,
        "mini_batches": len(measured),
        "tokens": sum(one["tokens"] for one in measured),
        "books": {"groups": len(books), "slope": slope(*columns(books)), "pearson": pearson(*columns(books))},
    }


def columns(pairs: Tensor) -> tuple[Tensor, Tensor]:
    return pairs[:, 0], pairs[:, 1]


def ratios_of(model: str, found: Found) -> dict[str, float]:
    table = found["table"]
    ratios = {
        f"{model}_books_slope": found["books"]["slope"],
        f"{model}_books_pearson": found["books"]["pearson"],
    }
    for question, own in (("batch", INFLUENCE), ("own", INFLUENCE_OWN)):
        for label, name in ((question, own), (f"{question}_baseline", BASELINE)):
            cell = table[question][name]
            ratios |= {f"{model}_{label}_{kind}": cell[kind]["median"] for kind in ("spearman", "pearson")}
        ratios[f"{model}_{question}_spearman_p10"] = table[question][own]["spearman"]["low"]
    ratios[f"{model}_done_spearman"] = table["done"][INFLUENCE]["spearman"]["median"]
    return ratios


def show(model: str, found: Found) -> None:
    books = found["books"]
    print(f"\n{model}: {found['mini_batches']} mini-batches, {found['tokens']} tokens; median [10 %, 90 %]")
    for question, names in found["table"].items():
        for name, cell in names.items():
            cells = "  ".join(
                f"{kind} {own['median']:.3f} [{own['low']:.2f}, {own['high']:.2f}]" for kind, own in cell.items()
            )
            print(f"{question:6s} {name:26s} {cells}")
    print(f"books: slope {books['slope']:.3f}, Pearson {books['pearson']:.4f} over {books['groups']} groups")


def plain(found: Any) -> Any:
    """Rounded, for JSON."""
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return round(found, 4) if isinstance(found, float) and found == found else None if found != found else found


def extra_arguments(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "validity", "docs/validity.md")
    parser.add_argument("--only", choices=("demo", "smollm2"), help="one of the two models")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra_arguments)
    torch.set_num_threads(args.threads or 1)
    folder = Path(tempfile.mkdtemp()) / "quick" if args.quick else args.folder
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * args.minutes
    for source in sources(args.quick):
        if args.only is None or source.name.startswith(args.only):
            run(source, folder, deadline)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    parts = {kind: [r for r in results if r["source"].startswith(kind)] for kind in ("demo", "smollm2")}
    found = {kind: summary(some) for kind, some in parts.items() if any(one.get("tokens") for one in some)}
    for kind, some in found.items():
        show(kind, some)
    if args.quick:
        shutil.rmtree(folder.parent)
    if not found:
        print("no result yet")
        return
    if args.write_docs:
        write_page(REPOSITORY / "docs", found)
    ratios = {label: value for kind, some in found.items() for label, value in ratios_of(kind, some).items()}
    emit("validity", ratios, {kind: plain(some) for kind, some in found.items()} | {"machine": machine()})


if __name__ == "__main__":
    main()
