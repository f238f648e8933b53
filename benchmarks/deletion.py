"""What happens if training leaves out the tokens that a score calls useless? And what if it keeps only those?

GRPO trains as in the demo for a few steps. Before every update each token is scored (its own term's effect on its
group's contrast, in the optimizer's geometry); the advantages of the tokens that a rule leaves out are set to 0, and
the rest is scaled up to the same mass Σ|A|. Held-out accuracy afterwards, for several seeds. The controls keep the
same share of the tokens in every step as the run of the same seed that they are compared with: a random choice, those
of high entropy, those with a large |A|(1−p), and those with a small one. They need no scores, only log-probs.

Two tasks: the demo's chains with the reward for the whole chain, and with a reward for the final answer alone, where
several chains are right. Results stay in --folder: what is there is not run again.
`--write-docs` rewrites the table and the picture of docs/validity.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._deletion_page import write_deletion
from benchmarks._token_scores import ANSWER_ONLY, token_scores, token_statistics
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments, relative, study_arguments
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.contract import Reporter
from gradtrace.instruments.verify.measure import interval
from gradtrace.intervals import Interval, paired_difference
from gradtrace.metrics import Timer
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

EVERYTHING, HELPFUL, OTHERS = "all tokens", "score > 0", "score ≤ 0"
RULES = {
    EVERYTHING: "everything is trained on",
    HELPFUL: "tokens whose step helps the accepted responses",
    OTHERS: "the others alone",
    "random": "as many as `score > 0`, at random",
    "entropy, top": "as many, of the highest entropy",
    "|A|(1−p), top": "as many, of the largest |A|(1−p)",
    "|A|(1−p), bottom": "as many as `score ≤ 0`, of the smallest",
}
LIKE = {"random": HELPFUL, "entropy, top": HELPFUL, "|A|(1−p), top": HELPFUL, "|A|(1−p), bottom": OTHERS}
"""Control → the rule whose share of tokens it keeps."""


class Deletion(Reporter):
    """Sets the advantages of left-out tokens to 0 before the update."""

    def __init__(self, parts: Components, rule: str, seed: int, like: list[float]) -> None:
        """`like`: for a control, the share of the tokens to keep in each step."""
        self.parts, self.rule, self.like = parts, rule, like
        self.generator = torch.Generator().manual_seed(seed)
        self.shares: list[float] = []
        """Of the tokens that have an advantage, the part that is trained on, step by step."""

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        return self.changed(batch, step), None

    def changed(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        if self.rule == EVERYTHING:
            return batch
        advantages = batch.need("advantages")
        counts = batch.response_mask & (advantages != 0)
        kept = self._chosen(batch, counts, self.like[step - 1]) if self.like else self._scored(batch, counts)
        self.shares.append(float(kept.sum() / counts.sum().clamp(min=1)))
        size = advantages.abs()
        mass = float(size[counts].sum() / size[kept].sum().clamp(min=1e-9))
        return batch.replace(advantages=torch.where(kept, advantages * mass, 0.0))

    def _scored(self, batch: RolloutBatch, counts: Tensor) -> Tensor:
        helps = counts & (token_scores(self.parts, batch).step > 0)
        return helps if self.rule == HELPFUL else counts & ~helps

    def _chosen(self, batch: RolloutBatch, counts: Tensor, share: float) -> Tensor:
        """This share of the tokens that count, those that the rule ranks highest."""
        if self.rule == "random":
            ranked = torch.rand(counts.shape, generator=self.generator)
        else:
            log_probs, entropies = token_statistics(self.parts, batch)
            weight = batch.need("advantages").abs() * (1 - log_probs.exp())
            ranked = {"entropy, top": entropies, "|A|(1−p), top": weight, "|A|(1−p), bottom": -weight}[self.rule]
        values = ranked.masked_fill(~counts, -torch.inf).flatten()
        kept = torch.zeros_like(values, dtype=torch.bool)
        kept[values.topk(round(share * int(counts.sum()))).indices] = True
        return kept.view_as(counts)


def train(task: str, rule: str, seed: int, steps: int, folder: Path, like: list[float]) -> dict[str, Any]:
    """One run: held-out accuracy before and after, and the share of the tokens that it trained on."""
    overrides = [
        *("recipe=demo", f"trainer.seed={seed}", f"task.arithmetic.warm_start.seed={seed}"),
        *(f"trainer.runs_dir={folder.parent}", f"trainer.total_steps={steps}", "trainer.validation.every=0"),
        *("trainer.checkpoint.every=0", "trainer.samples_every=0", "trainer.entropy_trace.enable=false"),
        *("trainer.influence_trace.enable=false", "trainer.blame.enable=false", "trainer.cpu_threads=1"),
    ]
    if task == "answer only":
        (folder / "reward.py").write_text(ANSWER_ONLY)
        overrides.append(f"reward.path={folder / 'reward.py'}:reward")
    parts = build_components(load_config(overrides))
    deletion = Deletion(parts, rule, seed, like)
    run = Path(tempfile.mkdtemp(dir=folder))
    trainer = Trainer(parts, RunFiles(run), SilentDisplay())
    trainer.steps.add("deletion", deletion)
    before = accuracy(trainer)
    trainer.fit()
    shutil.rmtree(run, ignore_errors=True)
    share = sum(deletion.shares) / len(deletion.shares) if deletion.shares else 1.0
    return {
        "task": task,
        "rule": rule,
        "seed": seed,
        "before": before,
        "after": accuracy(trainer),
        "share": share,
        "shares": deletion.shares,
    }


def kept_result(folder: Path, task: str, rule: str, seed: int) -> Path:
    return folder / f"{task.replace(' ', '_')}_{list(RULES).index(rule)}_{seed}.json"


def accuracy(trainer: Trainer) -> float:
    """On held-out prompts, always the same."""
    return next(v for k, v in trainer._validate(Timer()).items() if "/reward/mean@" in k)


def summary(results: list[dict[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Rule → accuracy, its paired difference to training on everything, and the share of tokens."""
    own = {(r["rule"], r["seed"]): r for r in results if r["task"] == task}
    found: dict[str, dict[str, Any]] = {}
    for rule in RULES:
        seeds = sorted(s for name, s in own if name == rule and (EVERYTHING, s) in own)
        if not seeds:
            continue
        values = [own[rule, s]["after"] for s in seeds]
        found[rule] = {
            "accuracy": interval(values),
            "difference": paired_difference(values, [own[EVERYTHING, s]["after"] for s in seeds]),
            "share": sum(own[rule, s]["share"] for s in seeds) / len(seeds),
            "before": sum(own[rule, s]["before"] for s in seeds) / len(seeds),
        }
    return found


def plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return [round(value.mean, 4), round(value.low, 4), round(value.high, 4), value.count]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def extra_arguments(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "deletion", "docs/validity.md")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra_arguments)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp()) / "quick" if args.quick else args.folder
    folder.mkdir(parents=True, exist_ok=True)
    tasks = ["whole chain"] if args.quick else ["whole chain", "answer only"]
    rules = list(RULES)[:4] if args.quick else list(RULES)
    deadline = time.time() + 60 * args.minutes
    for seed in range(1 if args.quick else args.seeds):
        for task in tasks:
            for rule in rules:
                path = kept_result(folder, task, rule, seed)
                if path.exists() or time.time() > deadline:
                    continue
                like = json.loads(kept_result(folder, task, LIKE[rule], seed).read_text()) if rule in LIKE else {}
                made = train(task, rule, seed, 2 if args.quick else args.steps, folder, like.get("shares", []))
                path.write_text(json.dumps(made))
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if args.quick:
        shutil.rmtree(folder.parent)
    found = {task: summary(results, task) for task in tasks}
    for task, rows in found.items():
        for rule, row in rows.items():
            print(
                f"{task:12s} {rule:18s} {row['share']:4.0%} of the tokens  accuracy {row['accuracy']}  "
                f"difference {row['difference']}"
            )
    chain = found["whole chain"]
    if args.write_docs:
        write_deletion(REPOSITORY / "docs", found)
    names = {"kept_positive": HELPFUL, "kept_negative": OTHERS, "kept_random": "random"}
    ratios = {
        f"accuracy_{label}_over_all": relative(chain[rule]["difference"], chain[EVERYTHING]["accuracy"].mean)
        for label, rule in names.items()
        if rule in chain
    }
    emit("deletion", ratios, {"tasks": plain(found), "machine": machine()})


if __name__ == "__main__":
    main()
