"""Does a score predict training? The yardstick of every score that this product shows.

From real states of real runs (weights, Adam's moments, a rollout) one real optimizer step is taken on single tokens,
on single responses and on random halves of a group or of the mini-batch, in float64 (scores of SmolLM2 are taken in
float32, as training has them: in float64 they take as long as the steps). What each does to the contrast of
accepted and rejected responses is measured, what momentum does by itself is subtracted, and Spearman's rank
correlation with each score is taken per group. Shown are means over groups with 95 % bootstrap intervals, and paired
differences to |A|(1−p), which needs no gradient at all. Beside each score stands what it costs: the update with it
over that without.

States and results stay in --folder: what is there is not made again, so a run that was interrupted goes on.
`--write-docs` rewrites the table and the picture of docs/validity.md from all results in the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._validity_page import write_page
from benchmarks._validity_states import collect, countdown_overrides, trial_of
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments, study_arguments
from gradtrace.attribution import InfluenceConfig
from gradtrace.instruments.verify.measure import Scores, Size, planned
from gradtrace.instruments.verify.trial import BASELINE, Trial
from gradtrace.instruments.verify.verification import Verification, exact, gains_of, table_of, usual_scores
from gradtrace.intervals import Interval

BY_NORM = "|A|·‖g‖²"
DEFAULT, TAIL = "optimizer, loss term", "optimizer, tail"


@dataclass(frozen=True)
class Score:
    config: InfluenceConfig
    coming: bool = False
    """Whether v̂ has this batch's gradient in it."""


def older(**knobs: Any) -> InfluenceConfig:
    return InfluenceConfig.older(**{"projection_dim_factor": 0, "pairwise": False, **knobs})


def scores(projection: int) -> dict[str, Score]:
    """Every kind of score, by the name it has in the table."""
    inverse = {"hessian_mode": "inverse"}
    head = {"module_name_filter": (".*",)}
    found = {name: Score(config) for name, config in usual_scores().items()} | {
        DEFAULT: Score(exact(), coming=True),
        "optimizer (state before), loss term": Score(exact()),
        "optimizer, loss term, output head too": Score(exact(**head), coming=True),
        "optimizer (state before), loss term, output head too": Score(exact(**head)),
        "optimizer factored, loss term": Score(exact(preconditioner_form="factored")),
        f"optimizer factored, loss term, projected 1/{projection}": Score(exact(projection_dim_factor=projection)),
    }
    for scale in (10.0, 1.0, 0.1):
        found[f"inverse λ={scale:g}·tr/n, loss term"] = Score(exact(**inverse, reg_scale=scale))
    found |= {
        "inverse λ=.1·tr/D, loss term": Score(exact(**inverse, reg_rule="per_dimension")),
        "inverse λ=.1·tr/D, position (the older default)": Score(older()),
        "inverse, tokens' curvature, position": Score(older(hessian_source="token")),
        "inverse, own response left out, position": Score(older(exclude_self_response=True)),
    }
    return found


def few_scores() -> dict[str, Score]:
    """For a model on which every score takes its time: what the product shows, showed, and what tells them apart."""
    everything = scores(32)
    names = [
        *(DEFAULT, "optimizer (state before), loss term", "optimizer factored, loss term"),
        *("optimizer factored, loss term, projected 1/32", "identity, loss term", TAIL, "identity, tail"),
    ]
    former = Score(older(projection_dim_factor=32))
    return {name: everything[name] for name in names} | {
        "inverse λ=.1·tr/D, position, projected 1/32 (the older default)": former
    }


# ---------------------------------------------------------------- one state


def update_seconds(trial: Trial) -> tuple[float, float]:
    """What forward and backward pass of the kept groups take, and what the optimizer's step does."""
    begun = time.perf_counter()
    gradient = trial.subset_gradient({r: torch.ones(trial.lengths[r], dtype=torch.bool) for r in trial.responses})
    middle = time.perf_counter()
    trial._steps.effect(gradient, lambda: torch.zeros(()))
    return middle - begun, time.perf_counter() - middle


def scored(trial: Trial, chosen: dict[str, Score]) -> tuple[dict[str, Scores], dict[str, float]]:
    """What every score says of the trial's tokens, and what it costs."""
    update_seconds(trial)  # warms up
    passes, step = update_seconds(trial)
    predictions: dict[str, Scores] = {}
    cost: dict[str, float] = {}
    for name, score in chosen.items():
        begun = time.perf_counter()
        predictions[name] = trial.scores(score.config, score.coming)
        cost[name] = (time.perf_counter() - begun + step) / (passes + step)
    return predictions, cost


def judge(
    path: Path, chosen: dict[str, Score], size: Size, seed: int, scores_in: torch.dtype = torch.float64
) -> dict[str, Any]:
    """{"agreement": score → kind → one number per group, "cost": score → ratio, …} of one state."""
    trial = trial_of(path, scores_in)
    if not trial.members:  # every group had one constant reward
        return {"agreement": {}, "cost": {}, "groups": 0, "steps_taken": 0}
    groups = list(trial.members)[: size.groups]
    trial.keep(groups)
    predictions, cost = scored(trial, chosen)
    if scores_in != torch.float64:
        del trial
        trial = trial_of(path)
        trial.keep(groups)
    predictions |= trial.baselines()
    effects = [some.take_all(trial) for some in planned(trial, size, seed)]
    singles = [some for some in effects if some.kind == "single_token"]
    predictions[BY_NORM] = {r: v for some in singles for r, v in some.squared_norms(trial).items()}
    agreement = Verification(DEFAULT, predictions, effects, 0.0).agreement
    return {"agreement": agreement, "cost": cost, "groups": len(groups), "steps_taken": trial.steps_taken}


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Source:
    name: str
    overrides: list[str]
    steps: list[int]
    groups: int
    """Of the rollout, from which the mini-batch is made."""
    size: Size

    def states(self, folder: Path) -> dict[int, Path]:
        return {step: folder / f"{self.name}_{step}.pt" for step in self.steps}


def sources(quick: bool, smollm2: bool) -> list[Source]:
    def demo(seed: int, steps: list[int], size: Size) -> Source:
        overrides = ["recipe=demo", f"trainer.seed={seed}", f"task.arithmetic.warm_start.seed={seed}"]
        return Source(f"demo{seed}", overrides, steps, 8, size)

    if quick:
        return [demo(0, [2], Size(groups=2, tokens=24, halves=8, whole_batch=True))]
    full = Size(groups=8, tokens=0, halves=24, whole_batch=True)
    found = [demo(seed, [5, 20, 40], full) for seed in (0, 1, 2)]
    if smollm2:
        found.append(
            Source("smollm2", countdown_overrides(), list(range(3, 9)), 4, Size(groups=1, tokens=16, halves=0))
        )
    return found


def run(source: Source, folder: Path, deadline: float) -> None:
    """What is missing of a source's states and results, until the deadline."""
    states = source.states(folder)
    results = {step: path.with_suffix(".json") for step, path in states.items()}
    if all(path.exists() for path in results.values()) or time.time() > deadline:
        return
    missing = {step: path for step, path in states.items() if not results[step].exists()}
    for step, path in sorted(missing.items(), key=lambda item: not item[1].exists()):  # what is there comes first
        if time.time() > deadline:
            return
        if not path.exists():
            collect(source.overrides, {s: p for s, p in missing.items() if s >= step}, source.groups, folder)
        of_smollm2 = source.name == "smollm2"
        chosen, scores_in = (few_scores(), torch.float32) if of_smollm2 else (scores(4), torch.float64)
        found = judge(path, chosen, source.size, step, scores_in)
        results[step].write_text(json.dumps(found | {"source": source.name, "step": step}))
        path.unlink()
        print(f"{source.name} step {step}: {found['groups']} groups, {found['steps_taken']} steps", flush=True)


def gather(results: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Score → kind → numbers of all groups, in one order for all scores."""
    found: dict[str, dict[str, list[float]]] = {}
    for result in results:
        for name, kinds in result["agreement"].items():
            for kind, values in kinds.items():
                found.setdefault(name, {}).setdefault(kind, []).extend(values)
    return found


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    agreement = gather(results)
    costs: dict[str, list[float]] = {}
    for result in results:
        for name, value in result["cost"].items():
            costs.setdefault(name, []).append(value)
    return {
        "table": table_of(agreement),
        "gains": gains_of(agreement),
        "cost": {n: statistics.median(v) for n, v in costs.items()},
    }


def ratios_of(demo: dict[str, Any], smollm2: dict[str, Any] | None) -> dict[str, float | Interval]:
    def mean(found: dict[str, Any], name: str, kind: str) -> Interval:
        value: Interval = found["table"][name][kind]
        return value

    ratios: dict[str, float | Interval] = {
        "single_token_default": mean(demo, DEFAULT, "single_token"),
        "single_token_default_low": float(demo["table"][DEFAULT]["single_token"].low),
        "single_token_tail": mean(demo, TAIL, "single_token"),
        "single_token_baseline": mean(demo, BASELINE, "single_token"),
        "half_tokens_default": mean(demo, DEFAULT, "half_tokens"),
        "half_tokens_baseline": mean(demo, BASELINE, "half_tokens"),
    }
    if smollm2 is not None:
        ratios["single_token_default_smollm2"] = mean(smollm2, DEFAULT, "single_token")
        ratios["single_token_baseline_smollm2"] = mean(smollm2, BASELINE, "single_token")
        ratios["single_token_gain_low_smollm2"] = float(smollm2["gains"][DEFAULT]["single_token"].low)
    return ratios


def show(title: str, found: dict[str, Any], groups: int) -> None:
    print(f"\n{title}: {groups} groups; mean [95 %]; cost = update with the score over update without")
    for name, kinds in found["table"].items():
        cells = "  ".join(f"{kind} {value}" for kind, value in kinds.items())
        print(f"{name:52s} {found['cost'].get(name, 1.0):5.2f}×  {cells}")


def plain(found: Any) -> Any:
    """Intervals as lists, for JSON."""
    if isinstance(found, Interval):
        return [round(found.mean, 4), round(found.low, 4), round(found.high, 4), found.count]
    return {key: plain(value) for key, value in found.items()} if isinstance(found, dict) else found


def extra_arguments(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "validity", "docs/validity.md")
    parser.add_argument("--only", choices=("demo", "smollm2"), help="one of the two models")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra_arguments)
    torch.set_num_threads(args.threads or 1)
    folder = Path(tempfile.mkdtemp()) / "quick" if args.quick else args.folder
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * args.minutes
    everything = sources(args.quick, smollm2=args.only != "demo")
    for source in everything:
        if args.only is None or source.name.startswith(args.only):
            run(source, folder, deadline)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    parts = {kind: [r for r in results if r["source"].startswith(kind)] for kind in ("demo", "smollm2")}
    found = {kind: summary(some) for kind, some in parts.items() if some}
    for kind, some in found.items():
        show(kind, some, sum(r["groups"] for r in parts[kind]))
    if args.quick:
        shutil.rmtree(folder.parent)
    if "demo" not in found:
        print("no result of the demo yet")
        return
    if args.write_docs:
        write_page(REPOSITORY / "docs", found, {kind: sum(r["groups"] for r in some) for kind, some in parts.items()})
    detail = {kind: plain(some) for kind, some in found.items()}
    emit("validity", ratios_of(found["demo"], found.get("smollm2")), detail | {"machine": machine()})


if __name__ == "__main__":
    main()
