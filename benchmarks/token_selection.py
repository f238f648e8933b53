"""Does it help to leave out the tokens of rejected responses that a score calls harmful (`keep_helpful`)?

GRPO trains as in the demo. Before every update the tokens of *rejected* responses (negative advantage) whose own step
would hurt their group's contrast are left out, and the other tokens of rejected responses are scaled up to the same
mass Σ|A|; accepted responses stay as they are. Controls leave out equally many tokens of rejected responses: a random
choice, those of the lowest entropy, and, inverted, those that the score likes best. Held-out accuracy on seeds that
were used for nothing else, two warm starts, and the processor time of a run. Results stay in --folder: what is there
is not run again. `--write-docs` rewrites its table in docs/validity.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._pages import between_marks
from benchmarks._token_scores import token_scores, token_statistics
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments, relative, study_arguments
from benchmarks.deletion import accuracy
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.contract import Reporter
from gradtrace.intervals import Interval, mean_interval, paired_difference
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

RULES = {
    "all": "all tokens",
    "keep_helpful": "rejected responses without their harmful tokens",
    "random": "as many left out at random",
    "entropy": "as many left out, of the lowest entropy",
    "inverted": "as many left out, of the best score",
}
SEEDS, STEPS = (20, 21, 22, 23, 24), 12
SCORED = ("keep_helpful", "inverted")


class LeaveOut(Reporter):
    """Sets the advantages of some tokens of rejected responses to 0 before the update."""

    def __init__(self, parts: Components, rule: str, counts: list[int], seed: int) -> None:
        """`counts`: tokens to leave out in each step, for the controls."""
        self.parts, self.rule, self.counts = parts, rule, counts
        self.generator = torch.Generator().manual_seed(seed)
        self.left_out: list[int] = []
        self.candidates: list[int] = []

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        return self.changed(batch, step), None

    def changed(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        if self.rule == "all":
            return batch
        advantages = batch.need("advantages")
        rejected = batch.response_mask & (advantages < 0)
        if self.rule in SCORED:
            values = token_scores(self.parts, batch).step
        elif self.rule == "entropy":
            values = token_statistics(self.parts, batch)[1]
        else:
            values = torch.rand(rejected.shape, generator=self.generator)
        count = int((rejected & (values < 0)).sum()) if self.rule == "keep_helpful" else self.counts[step - 1]
        order = (-values if self.rule == "inverted" else values).masked_fill(~rejected, torch.inf).flatten()
        chosen = torch.zeros_like(order, dtype=torch.bool)
        chosen[order.argsort()[: min(count, int(rejected.sum()))]] = True
        kept = rejected & ~chosen.view_as(rejected)
        self.left_out.append(count)
        self.candidates.append(int(rejected.sum()))
        mass = advantages[rejected].sum() / advantages[kept].sum().clamp(max=-1e-9)
        return batch.replace(advantages=torch.where(kept, advantages * mass, torch.where(rejected, 0.0, advantages)))


def train(rule: str, seed: int, steps: int, folder: Path, counts: list[int]) -> dict[str, Any]:
    overrides = [
        *("recipe=demo", f"trainer.seed={seed}", f"task.arithmetic.warm_start.seed={seed % 2}"),
        *(f"trainer.runs_dir={folder.parent}", f"trainer.total_steps={steps}", "trainer.validation.every=0"),
        *("trainer.checkpoint.every=0", "trainer.samples_every=0", "trainer.entropy_trace.enable=false"),
        *("trainer.influence_trace.enable=false", "trainer.blame.enable=false"),
        *("trainer.validation.prompts=512", "trainer.validation.n=2", "trainer.validation.pass_k=[1]"),
        "trainer.cpu_threads=1",
    ]
    parts = build_components(load_config(overrides))
    left = LeaveOut(parts, rule, counts, seed)
    with tempfile.TemporaryDirectory(dir=folder) as run:
        trainer = Trainer(parts, RunFiles(Path(run)), SilentDisplay())
        trainer.steps.add("leave_out", left)
        begin = time.process_time()
        trainer.fit()
        seconds = time.process_time() - begin
    share = sum(left.left_out) / max(1, sum(left.candidates))
    about = {"rule": rule, "seed": seed, "accuracy": accuracy(trainer), "cpu_seconds": seconds}
    return about | {"share": share, "left_out": left.left_out}


def summary(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rule → accuracy, its paired difference to training on everything, share of tokens left out, and cost."""
    own = {(r["rule"], r["seed"]): r for r in results}
    found: dict[str, dict[str, Any]] = {}
    for rule in RULES:
        seeds = sorted(s for name, s in own if name == rule and ("all", s) in own)
        if seeds:
            values, base = ([own[name, s]["accuracy"] for s in seeds] for name in (rule, "all"))
            costs = [own[rule, s]["cpu_seconds"] / own["all", s]["cpu_seconds"] for s in seeds]
            found[rule] = {
                "accuracy": mean_interval(values),
                "difference": paired_difference(values, base),
                "share": sum(own[rule, s]["share"] for s in seeds) / len(seeds),
                "cost": sum(costs) / len(costs),
            }
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    head = "| trained on | of the rejected responses' tokens left out | held-out accuracy | minus all tokens | cost |"
    lines = [head, "|---|---|---|---|---|"]
    for rule, row in found.items():
        lines.append(
            f"| {RULES[rule]} | {row['share']:.0%} | {row['accuracy']} | {row['difference']} | {row['cost']:.2f}× |"
        )
    seeds = next(iter(found.values()))["accuracy"].count
    return "\n".join(
        [*lines, "", f"{seeds} seeds, means with 95 % intervals; cost: processor time of the run over `all`."]
    )


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: [v.mean, v.low, v.high] if isinstance(v, Interval) else v for k, v in row.items()}


def extra_arguments(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "token_selection", "docs/validity.md")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra_arguments)
    torch.set_num_threads(1)
    folder, steps = args.folder, STEPS
    if args.quick:
        folder, steps = args.folder / "quick", 2
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * args.minutes
    for seed in SEEDS[: 1 if args.quick else len(SEEDS)]:
        for rule in RULES:
            path, like = folder / f"{rule}_{seed}.json", folder / f"keep_helpful_{seed}.json"
            if not path.exists() and time.time() < deadline:
                counts = json.loads(like.read_text())["left_out"] if like.exists() else []
                result = train(rule, seed, steps, folder, counts)
                path.write_text(json.dumps(result))
                print(
                    f"seed {seed}  {rule:14} {result['accuracy']:.3f}  {result['cpu_seconds']:.0f} s",
                    flush=True,
                )
    found = summary([json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))])
    print(table(found))
    if args.write_docs:
        between_marks(REPOSITORY / "docs" / "validity.md", "token_selection", table(found))
    ratios = {
        f"accuracy_{rule}_over_all": relative(row["difference"], found["all"]["accuracy"].mean)
        for rule, row in found.items()
        if rule != "all"
    }
    emit("token_selection", ratios, {"rules": {k: plain(v) for k, v in found.items()}, "machine": machine()})


if __name__ == "__main__":
    main()
