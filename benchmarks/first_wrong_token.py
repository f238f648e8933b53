"""Does influence find the first wrong token? On the demo's task the truth is known by rule.

GRPO trains as in the demo; at several steps, before the update, every token of the rollout is scored at the weights
that sampled it. In each rejected response the tokens are ranked by each score, and the rank of the first wrong
token is noted. Influence comes with two objectives: `log_prob` asks what making the token likelier does (a wrong
token should be the most negative), `training_loss` what the training step on it does (it makes tokens of rejected
responses less likely, so for a wrong token that should be the most positive). Entropy and surprisal (−log-prob)
rank from the largest. Responses with a single local error are also counted apart: in the others a
later error may deserve the blame as much as the first.

`--write-docs` rewrites docs/first_wrong_token.md and its picture from this run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._first_wrong_token_page import write_page
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments
from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.batch import RolloutBatch
from gradtrace.config_loader import load_config
from gradtrace.instruments.observer import StepObserver
from gradtrace.policy.microbatch import Sequences
from gradtrace.tasks.arithmetic import VOCABULARY, ArithmeticTask, apply
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.loop import Trainer
from gradtrace.training.parts import Parts, build_parts
from gradtrace.training.terminal import SilentDisplay

VARIANTS = [
    (output, mode, leave_out)
    for output in ("log_prob", "training_loss")
    for mode in ("identity", "inverse")
    for leave_out in (False, True)
]
Scores = dict[str, list[Tensor]]
"""Name → one tensor per response, largest = most suspicious."""


def local_errors(item: dict[str, Any], response: list[int]) -> int:
    """Steps of a chain that do not follow from what the response itself wrote before them."""
    text = "".join(VOCABULARY[token] for token in response if token != VOCABULARY.index("<eos>"))
    expected = item["expected"]
    if len(text) != len(expected) or any(
        a != b for i, (a, b) in enumerate(zip(text, expected, strict=True)) if i % 4 or i == 0
    ):
        return -1  # not even the form of a chain
    errors = 0
    for i in range(4, len(text), 4):
        errors += int(text[i]) != apply(int(text[i - 4]), text[i - 3], int(text[i - 2]))
    return errors


def scores_of(parts: Parts, batch: RolloutBatch, seed: int) -> Scores:
    """Every score of every token at the current weights."""
    rows = torch.arange(len(batch))
    micro = Sequences.of(batch).padded(rows)
    lengths = batch.response_lengths.tolist()
    assert batch.advantages is not None and batch.rewards is not None
    with torch.no_grad():
        log_probs, entropies = parts.policy.statistics(micro)
    generator = torch.Generator().manual_seed(seed)
    found: Scores = {
        "random": list(torch.rand(len(log_probs), generator=generator).split(lengths)),
        "entropy": list(entropies.split(lengths)),
        "−log-prob": list((-log_probs).split(lengths)),
    }

    advantages = batch.advantages[:, 0]  # GRPO: one for all tokens of a response
    for output, mode, leave_out in VARIANTS:
        # On policy the training loss is −Σ A ℓ / N, so A is its weight; the sign of a score does not depend on −.
        weight = advantages if output == "training_loss" else torch.ones_like(advantages)

        def terms(responses: list[int], weight: Tensor = weight) -> Tensor:
            chosen = torch.tensor(responses)
            values, _ = parts.policy.statistics(Sequences.of(batch).padded(chosen))
            return values * weight[chosen].repeat_interleave(batch.response_lengths[chosen])

        config = InfluenceConfig.older(
            hessian_mode=mode,  # type: ignore[arg-type]
            exclude_self_response=leave_out,
            projection_dim_factor=0,
            credit="both",
            pairwise=False,
        )
        with InfluenceTracer(parts.policy.model, config) as tracer:
            log_probs = parts.policy.statistics(micro)[0]
            with tracer.capture(
                response=rows,
                tokens=micro.tokens,
                accepted=accepted(batch.rewards, batch.group),
                group=batch.group,
                sign=torch.where(weight < 0, -1.0, 1.0),
            ):
                (log_probs * weight.repeat_interleave(batch.response_lengths)).sum().backward()
            trace = tracer.score(terms=terms)
        parts.policy.model.zero_grad()
        label = f"{output}, {mode}{', own response left out' if leave_out else ''}"
        suspicion = 1.0 if output == "training_loss" else -1.0
        for credit, scores in (
            ("position", trace.position_scores),
            ("loss term", trace.loss_term_scores or []),
        ):
            found[f"influence, {credit}, {label}"] = [suspicion * values for values in scores]
    return found


class Judge(StepObserver):
    """At the chosen steps: ranks of the first wrong token under each score."""

    def __init__(self, parts: Parts, steps: set[int], seed: int) -> None:
        self.parts, self.steps, self.seed = parts, steps, seed
        self.ranks: dict[str, list[tuple[float, int, bool]]] = defaultdict(list)
        """Score → (share of the other tokens ranked below, rank from 1, the only local error) per response."""
        self.responses = self.single = 0

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        if step in self.steps:
            self._judge(batch, step)
        return batch

    def _judge(self, batch: RolloutBatch, step: int) -> None:
        task = self.parts.task
        assert isinstance(task, ArithmeticTask) and batch.rewards is not None
        scores = scores_of(self.parts, batch, self.seed * 1000 + step)
        good = accepted(batch.rewards, batch.group)
        some_influence = next(name for name in scores if name.startswith("influence"))
        for r, group in enumerate(batch.group.tolist()):
            scored = len(scores[some_influence][r]) > 0  # groups with one constant reward have no influence
            if bool(good[r]) or not scored:
                continue
            response = batch.responses[r, : int(batch.response_lengths[r])].tolist()
            wrong = task.first_wrong_token(batch.items[group], response)
            if wrong is None:
                continue
            single = local_errors(batch.items[group], response) == 1
            self.responses += 1
            self.single += single
            for name, values in scores.items():
                own = values[r]
                above = int((own > own[wrong]).sum())
                ties = int((own == own[wrong]).sum()) - 1
                rank = 1 + above + ties / 2
                self.ranks[name].append(((len(own) - rank) / max(1, len(own) - 1), round(rank), single))


def judge_seed(seed: int, steps: list[int], folder: Path) -> Judge:
    config = load_config(
        [
            *(
                "recipe=demo",
                f"trainer.seed={seed}",
                f"trainer.runs_dir={folder}",
                f"trainer.total_steps={max(steps)}",
            ),
            *(f"task.arithmetic.warm_start.seed={seed}", "trainer.validation.every=0"),
            *("trainer.checkpoint.every=0", "trainer.samples_every=0"),
            *("trainer.entropy_trace.enable=false", "trainer.influence_trace.enable=false"),
        ]
    )
    parts = build_parts(config)
    judge = Judge(parts, set(steps), seed)
    Trainer(parts, RunFiles(folder / f"run_{seed}"), judge, SilentDisplay()).fit()
    return judge


def summary(judges: list[Judge], name: str, single_only: bool) -> dict[str, float]:
    """Means over responses; the spread is the standard deviation over seeds."""

    def means(judge: Judge) -> tuple[float, float, float]:
        rows = [row for row in judge.ranks[name] if row[2] or not single_only]
        count = max(1, len(rows))
        return (
            sum(row[0] for row in rows) / count,
            sum(row[1] <= 1 for row in rows) / count,
            sum(row[1] <= 3 for row in rows) / count,
        )

    per_seed = list(zip(*(means(judge) for judge in judges), strict=True))
    result = {}
    for label, values in zip(("percentile", "hit1", "hit3"), per_seed, strict=True):
        result[label] = round(statistics.mean(values), 3)
        result[f"{label}_sd"] = round(statistics.stdev(values), 3) if len(values) > 1 else 0.0
    return result


def extra_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write-docs", action="store_true", help="rewrite docs/first_wrong_token.md")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra_arguments)
    seeds = [0] if args.quick else [0, 1, 2]
    steps = [1, 3] if args.quick else [1, 5, 10, 20]
    with tempfile.TemporaryDirectory() as folder:
        judges = [judge_seed(seed, steps, Path(folder)) for seed in seeds]
    names = list(judges[0].ranks)
    table = {
        name: {"all": summary(judges, name, False), "single_error": summary(judges, name, True)}
        for name in names
    }
    detail: dict[str, Any] = {
        "scores": table,
        "responses": sum(judge.responses for judge in judges),
        "single_error_responses": sum(judge.single for judge in judges),
        "seeds": seeds,
        "steps": steps,
        "machine": machine(),
    }
    for name in names:
        row = table[name]["all"]
        print(
            f"{name:66s} percentile {row['percentile']:.2f}  hit@1 {row['hit1']:.2f}  hit@3 {row['hit3']:.2f}"
        )
    if args.write_docs:
        write_page(REPOSITORY / "docs", detail)
    best = max(
        (name for name in names if name.startswith("influence")), key=lambda name: table[name]["all"]["hit1"]
    )
    baseline = max(("entropy", "−log-prob"), key=lambda name: table[name]["all"]["hit1"])
    ratios = {
        "hit1_best_influence_over_best_baseline": table[best]["all"]["hit1"] / table[baseline]["all"]["hit1"]
    }
    emit("first_wrong_token", ratios, detail | {"best_influence": best, "best_baseline": baseline})


if __name__ == "__main__":
    main()
