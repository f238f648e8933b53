"""Do scores find the tokens that cost a response its reward?

A token's value is ΔV, the change of the expected reward when it was written: many continuations from the prefix with it
and without it, judged under a reward for the final answer alone, so that a detour that still leads to the answer is
no mistake. GRPO trains as in the demo with that reward; at several steps, before the update, every token of some
rejected responses is measured and scored at the weights that sampled it. Two questions for each score: is the token
that it suspects most the one with the deepest fall (hit@1), and how well does it order the tokens by ΔV (Spearman)?
Beside it stand scores that need no gradient: surprisal, entropy, and the first difference from an accepted
sibling. Means over groups with 95 % bootstrap intervals, and paired differences to surprisal.

Results stay in --folder: what is there is not measured again. `--write-docs` rewrites the table of docs/validity.md.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._pages import between_marks
from benchmarks._token_scores import ANSWER_ONLY, DEFAULT, token_scores
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments, study_arguments
from gradtrace import counterfactual
from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.contract import Reporter
from gradtrace.instruments.verify.measure import interval, spearman
from gradtrace.intervals import Interval, paired_difference
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

BASELINE = "surprisal"
CONFIGS = {
    "influence": DEFAULT,
    "influence, the older default": InfluenceConfig.older(projection_dim_factor=0, pairwise=False),
}
LEAST_FALL = 0.1
"""A response counts for hit@1 if one of its tokens lost so much of the expected reward."""


def suspicions(parts: Components, batch: RolloutBatch, seed: int) -> dict[str, Tensor]:
    """Score → [R, T]: large where a token of a rejected response looks like the culprit. Training makes such a token
    less likely, so a step on it that helps is suspicious."""
    found: dict[str, Tensor] = {}
    for name, config in CONFIGS.items():
        scores = token_scores(parts, batch, config)
        found[name] = scores.step
        if name == "influence":
            found["influence, made likelier"] = -scores.likelier
            found[BASELINE], found["entropy"] = -scores.log_probs, scores.entropies
    found["first difference from an accepted sibling"] = first_differences(batch)
    found["random"] = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(seed))
    return found


def first_differences(batch: RolloutBatch) -> Tensor:
    """[R, T]: 1 where a response parts from the accepted sibling with which it has the longest beginning in common, and
    less with every token after that."""
    assert batch.rewards is not None
    good, found = accepted(batch.rewards, batch.group), torch.zeros(batch.response_mask.shape)
    for r in range(len(batch)):
        siblings = (good & (batch.group == batch.group[r])).nonzero().squeeze(-1).tolist()
        same = [int((batch.responses[r] == batch.responses[s]).long().cumprod(0).sum()) for s in siblings]
        if same and max(same) < found.shape[1]:
            after = found.shape[1] - max(same)
            found[r, max(same) :] = torch.linspace(1, 1 / after, after)
    return found


class Measure(Reporter):
    """At the chosen steps: ΔV of the tokens of rejected responses, and how each score relates to it."""

    def __init__(self, parts: Components, results: dict[int, Path], groups: int, k: int, seed: int) -> None:
        self.parts, self.results, self.groups, self.k, self.seed = parts, results, groups, k, seed

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        if step in self.results and not self.results[step].exists():
            rows = [found for found in self.rows(batch, step) if found]
            self.results[step].write_text(json.dumps(rows))
        return batch, None

    def rows(self, batch: RolloutBatch, step: int) -> Any:
        """For each group: score → [hit@1, Spearman], means over its rejected responses."""
        assert batch.rewards is not None
        good, scores = (
            accepted(batch.rewards, batch.group),
            suspicions(self.parts, batch, 1000 * self.seed + step),
        )
        chosen = [g for g in range(len(batch.prompts)) if good[batch.group == g].unique().numel() == 2][: self.groups]
        for g in chosen:
            rejected = ((batch.group == g) & ~good).nonzero().squeeze(-1).tolist()
            yield self.group(batch, g, rejected, scores)

    def group(
        self, batch: RolloutBatch, g: int, rejected: list[int], scores: dict[str, Tensor]
    ) -> dict[str, list[float]]:
        rollout, item = self.parts.config.rollout, batch.items[g]
        responses = [batch.responses[r, : int(batch.response_lengths[r])].tolist() for r in rejected]
        values = counterfactual(
            self.parts.policy.model,
            self.parts.task.tokenizer,
            batch.prompts[g],
            responses,
            lambda text: self.parts.reward([text], [item])[0],
            k=self.k,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
        )
        found: dict[str, list[list[float]]] = {name: [[], []] for name in scores}
        for r, value in zip(rejected, values, strict=True):
            falls = torch.from_numpy(-np.nan_to_num(value.delta_v))
            worst = int(falls.argmax())
            sure = float(falls[worst]) > max(LEAST_FALL, 3 * float(value.stderr[worst]))
            for name, suspicion in scores.items():
                own = suspicion[r, : len(falls)]
                if sure:
                    found[name][0].append(float(int(own.argmax()) == worst))
                found[name][1].append(spearman(own, falls))
        return {name: [mean(hits), mean(orders)] for name, (hits, orders) in found.items()}


def mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def measure(seed: int, steps: list[int], groups: int, k: int, folder: Path) -> None:
    """What is missing of a seed's results."""
    results = {step: folder / f"seed{seed}_step{step}.json" for step in steps}
    if all(path.exists() for path in results.values()):
        return
    (folder / "reward.py").write_text(ANSWER_ONLY)
    overrides = [
        *("recipe=demo", f"trainer.seed={seed}", f"task.arithmetic.warm_start.seed={seed}"),
        *(f"trainer.runs_dir={folder.parent}", f"trainer.total_steps={max(steps)}", "trainer.validation.every=0"),
        *("trainer.checkpoint.every=0", "trainer.samples_every=0", "trainer.entropy_trace.enable=false"),
        *("trainer.influence_trace.enable=false", "trainer.blame.enable=false", "trainer.cpu_threads=1"),
        f"reward.path={folder / 'reward.py'}:reward",
    ]
    parts = build_components(load_config(overrides))
    with tempfile.TemporaryDirectory(dir=folder) as run:
        trainer = Trainer(parts, RunFiles(Path(run)), SilentDisplay())
        trainer.steps.add("measure", Measure(parts, results, groups, k, seed))
        trainer.fit()


def summary(rows: list[dict[str, list[float]]]) -> dict[str, dict[str, Interval]]:
    """Score → "hit1", "spearman" and their paired differences to the baseline."""
    found = {}
    for name in rows[0]:
        own: dict[str, Interval] = {}
        for place, kind in enumerate(("hit1", "spearman")):
            values, base = ([row[n][place] for row in rows] for n in (name, BASELINE))
            own |= {kind: interval(values), f"{kind}_gain": paired_difference(values, base)}
        found[name] = own
    return found


def write_docs(found: dict[str, dict[str, Interval]]) -> None:
    lines = [
        "| score | hit@1 | minus surprisal | Spearman with −ΔV | minus surprisal |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {row['hit1']} | {row['hit1_gain']} | {row['spearman']} | {row['spearman_gain']} |"
            for name, row in sorted(found.items(), key=lambda item: -item[1]["hit1"].mean)
        ),
    ]
    between_marks(REPOSITORY / "docs" / "validity.md", "token value", "\n".join(lines))


def extra_arguments(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "token_value", "docs/validity.md")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra_arguments)
    torch.set_num_threads(1)
    seeds, steps, groups, k = ([0], [2], 1, 16) if args.quick else ([0, 1, 2, 3, 4], [1, 5, 10, 20, 40], 4, 64)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "quick" if args.quick else args.folder
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.time() + 60 * args.minutes
        for seed in seeds:
            if time.time() < deadline:
                measure(seed, steps, groups, k, folder)
        files = sorted(folder.glob("seed*_step*.json"))
        rows = [row for path in files for row in json.loads(path.read_text())]
    if not rows:
        raise SystemExit("no group held accepted and rejected responses: nothing was measured")
    found = summary(rows)
    for name, row in found.items():
        print(f"{name:45s} hit@1 {row['hit1']}  Spearman {row['spearman']}  minus surprisal {row['spearman_gain']}")
    if args.write_docs:
        write_docs(found)
    ratios = {
        f"{kind}_{label}": found[name][kind]
        for kind in ("hit1", "spearman")
        for label, name in (("default", "influence"), ("baseline", BASELINE))
    }
    plain = {n: {k: [v.mean, v.low, v.high, v.count] for k, v in row.items()} for n, row in found.items()}
    emit(
        "token_value",
        ratios,
        {"scores": plain, "groups": len(rows), "states": len(files), "machine": machine()},
    )


if __name__ == "__main__":
    main()
