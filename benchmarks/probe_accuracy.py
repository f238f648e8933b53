"""Does the entropy probe tell the truth? Predicted against measured on checkpoints of the demo, and on SmolLM2-135M.

Checkpoints of two seeds at eight points of training each. For every one, U is the next training batch (16 prompts × 8),
the update is that of the checkpoint's AdamW with its moments, and E is many disjoint batches of 128 held-out prompts.
- Same batch: predicted over measured at η = 0.01·lr on the same E, and the log-log slope of the measured change over η.
  No noise enters, so both must be 1: `same_batch_ratio_*`, `log_log_slope_*` (smallest and largest of all checkpoints).
- Independent batches: predicted on one E, measured with importance weights on another. `coverage_independent_*` is the
  share of pairs that are closer than 1.96 standard errors of their difference, √(se² of one + se² of the other).
- Fresh samples: predicted on one E, measured by sampling anew from the updated policy for another E's prompts.
- Intervals, at an early and a late checkpoint: 64 independent E each, of 128 prompts × 1 response and of 16 × 4.
  `coverage_95_*` is how many of their 95 % intervals hold the value of all 64 together, `spread_over_stated_*` the
  spread of their values over the standard error that they state (root mean square). Six values cannot tell 1 from 1.3.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import emit, load_smollm2, machine, parse_arguments, study_folder, wilson
from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.commands.probe.session import log_log_slope
from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.instruments.entropy_probe.estimates import Estimate, Prediction, fresh_change
from gradtrace.instruments.entropy_probe.passes import TokenBatch, evaluation_batch, precise, update_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Update
from gradtrace.intervals import Interval
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.policy import Policy
from gradtrace.policy.rollouts import add_advantages, judge, rollout
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.training.components import Components, build_components
from gradtrace.training.run import train
from gradtrace.training.state import load_state

SMALL = (0.001, 0.003, 0.01)
REAL = 1.0


@dataclass
class Checkpoint:
    """Everything for a probe, in float64, at the learning rate of the next step."""

    parts: Components
    policy: Policy
    probe: EntropyProbe
    params: SamplingParams
    generator: torch.Generator
    sampled: Any
    """A float32 copy of the model, which samples as in training, and faster."""

    @staticmethod
    def open(run_dir: Path, step: int) -> Checkpoint:
        config = load_config([f"resume={run_dir}"])
        folder = run_dir / "checkpoints" / f"step_{step:06d}"
        parts = build_components(config, folder)
        load_state(folder, parts)
        parts.optimizer.begin_step(step + 1)
        sampled = copy.deepcopy(parts.policy.model)
        parts.policy.model.double()
        probe = EntropyProbe(parts.policy.model, parts.optimizer.adamw, config.actor.optim.grad_clip)
        params = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, stop_token_ids=parts.task.stop_token_ids)
        generator = torch.Generator().manual_seed(step)
        return Checkpoint(parts, precise(parts.policy), probe, params, generator, sampled)

    def update_batch(self, prompts: int, n: int) -> TokenBatch:
        """U, the next prompts of the run."""
        config, params = (
            self.parts.config,
            SamplingParams(n=n, max_new_tokens=self.params.max_new_tokens, stop_token_ids=self.params.stop_token_ids),
        )
        batch = rollout(Sampler(self.sampled), self.parts.task.next_prompts(prompts), params, self.generator)
        batch = judge(batch, self.parts.task.tokenizer, self.parts.reward)
        return loss_batch(self.policy, batch, config)

    def evaluation_batches(self, count: int, prompts: int) -> Iterator[tuple[RolloutBatch, TokenBatch, int]]:
        """`count` times E with prompts of its own, and the seed it was drawn with."""
        held_out = self.parts.task.validation_prompts(count * prompts)
        for index in range(count):
            chosen = held_out[index * prompts : (index + 1) * prompts]
            batch = self.sample([prompt.ids for prompt in chosen], seed=index)
            yield batch, evaluation_batch(self.policy, batch), index

    def sample(self, prompts: list[list[int]], seed: int) -> RolloutBatch:
        """From the model's weights as they are now."""
        self.sampled.load_state_dict(self.policy.model.state_dict())
        generator = torch.Generator().manual_seed(1000 + seed)
        return Sampler(self.sampled).generate(prompts, self.params, generator=generator)


def loss_batch(policy: Policy, batch: RolloutBatch, config: Config, token_budget: int = 16384) -> TokenBatch:
    dtype = next(policy.model.parameters()).dtype
    batch = batch.replace(sampler_log_probs=batch.sampler_log_probs.to(dtype))
    batch = fill_statistics(policy, batch, MicroBatches(batch, 16384), torch.arange(len(batch)))
    algorithm = config.algorithm
    batch = add_advantages(batch, advantage(algorithm.advantage, **algorithm.advantage_options))
    update = PolicyLoss(policy, algorithm, config.rollout.max_new_tokens)
    return update_batch(update, batch, token_budget)


def trained_run(folder: Path, seed: int, steps: list[int]) -> Path:
    """A run of the demo with checkpoints at `steps`; made once per folder."""
    run_dir = folder / f"seed_{seed}"
    if not (run_dir / "checkpoints" / f"step_{steps[-1]:06d}").is_dir():
        print(f"training the demo, seed {seed}, {steps[-1]} steps", file=sys.stderr, flush=True)
        train(
            load_config(
                [
                    f"trainer.runs_dir={folder}",
                    f"trainer.name=seed_{seed}",
                    f"trainer.seed={seed}",
                    f"trainer.total_steps={steps[-1]}",
                    f"trainer.checkpoint.every={math.gcd(*steps)}",
                    "trainer.checkpoint.keep_last=0",
                    "trainer.validation.every=0",
                    "trainer.entropy_trace.enable=false",
                    "trainer.influence_trace.enable=false",
                    "trainer.blame.enable=false",
                ]
            )
        )
    return run_dir


def same_batch(
    probe: EntropyProbe, prediction: Prediction, E: TokenBatch, update: Update, etas: tuple[float, ...]
) -> dict[str, Any]:
    """Predicted and measured on one E over η; `last`: the estimate of the change at the last η."""
    sweep, changes = [], [probe.measure(prediction, E, update, eta)[0].change for eta in etas]
    for eta, change in zip(etas, changes, strict=True):
        sweep.append({"eta": eta, "predicted": eta * prediction.change.value, "measured": change.value})
    return {
        "sweep": sweep,
        "last": changes[-1],
        "ratio": sweep[-1]["predicted"] / sweep[-1]["measured"],
        "slope": log_log_slope(sweep),
    }


def probe_checkpoint(run_dir: Path, step: int, batches: int, prompts: int) -> dict[str, Any]:
    """One checkpoint: same-batch figures, and estimates on every E."""
    checkpoint = Checkpoint.open(run_dir, step)
    probe = checkpoint.probe
    update = probe.update(checkpoint.update_batch(16, 8))
    predicted, small, real, fresh = [], [], [], []
    first: dict[str, Any] = {}
    entropy = 0.0
    for rollout_batch, E, seed in checkpoint.evaluation_batches(batches, prompts):
        prediction = probe.predict(E, update)
        entropy = prediction.base.mean_entropy
        predicted.append(prediction.change)
        if not first:
            first = same_batch(probe, prediction, E, update, SMALL)
            small.append(first["last"])
        else:
            small.append(probe.measure(prediction, E, update, SMALL[-1])[0].change)
        real.append(probe.measure(prediction, E, update, REAL)[0].change)
        with probe.moved(update, REAL):
            anew = evaluation_batch(checkpoint.policy, checkpoint.sample(rollout_batch.prompts, seed))
            fresh.append(fresh_change(prediction.base, probe.tokens(anew)))
    mean = sum(p.value for p in predicted) / batches
    spread = math.sqrt(sum((p.value - mean) ** 2 for p in predicted) / max(1, batches - 1))
    return {
        "step": step,
        "mean_entropy": entropy,
        "delta_h_predicted": mean,
        "delta_h_measured": sum(m.value for m in real) / batches,
        "delta_h_fresh": sum(m.value for m in fresh) / batches,
        "stderr_stated": math.sqrt(sum(p.stderr**2 for p in predicted) / batches),
        "stderr_seen": spread,
        "same_batch_ratio": first["ratio"],
        "log_log_slope": first["slope"],
        "predicted": [(p.value, p.stderr) for p in predicted],
        "small": [(m.value, m.stderr) for m in small],
        "real": [(m.value, m.stderr) for m in real],
        "fresh": [(m.value, m.stderr) for m in fresh],
    }


def interval_coverage(run_dir: Path, step: int, repetitions: int) -> dict[str, Interval]:
    """Whether 95 % intervals of the predicted and of the measured change hold the truth 95 times in 100."""
    checkpoint = Checkpoint.open(run_dir, step)
    probe = checkpoint.probe
    update = probe.update(checkpoint.update_batch(16, 8))
    found: dict[str, Interval] = {}
    for prompts, n in ((128, 1), (16, 4)):
        checkpoint.params = dataclasses.replace(checkpoint.params, n=n)
        estimates: dict[str, list[Estimate]] = {"predicted": [], "measured": []}
        for _, E, _ in checkpoint.evaluation_batches(repetitions, prompts):
            prediction = probe.predict(E, update)
            estimates["predicted"].append(prediction.change)
            estimates["measured"].append(probe.measure(prediction, E, update, REAL)[0].change)
        for name, values in estimates.items():
            truth = statistics.mean(one.value for one in values)
            label = f"{name}_{prompts}x{n}_step_{step}"
            held = sum(abs(e.value - truth) <= e.half for e in values)
            found[f"coverage_95_{label}"] = Interval(held / len(values), *wilson(held, len(values)), len(values))
            stated = math.sqrt(statistics.mean(one.stderr**2 for one in values))
            spread = statistics.stdev(one.value for one in values) / stated
            known = 1.96 / math.sqrt(2 * (len(values) - 1))  # relative, of a standard deviation
            ends = (spread * (1 - known), spread * (1 + known))
            found[f"spread_over_stated_{label}"] = Interval(spread, *ends, len(values))
    return found


def told(found: dict[str, Interval]) -> str:
    return "\n".join(f"{label}: {interval}" for label, interval in found.items())


def kept_row(run_dir: Path, seed: int, step: int, batches: int, prompts: int) -> dict[str, Any]:
    """`probe_checkpoint`, once for each trained run: with --runs an interrupted benchmark goes on where it was."""
    path = run_dir / f"probe_accuracy_{step}_{batches}x{prompts}.json"
    if not path.exists():
        row = {"seed": seed, **probe_checkpoint(run_dir, step, batches, prompts)}
        path.write_text(json.dumps(row))
    return json.loads(path.read_text())


def coverage(rows: list[dict[str, Any]], key: str, eta: float) -> Interval:
    """Over all pairs of different batches of E, predicted on one and measured on the other. A batch is in many pairs:
    for the interval there are as many trials as pairs that have no batch in common."""
    inside = [
        abs(eta * row["predicted"][a][0] - row[key][b][0])
        <= 1.96 * math.hypot(eta * row["predicted"][a][1], row[key][b][1])
        for row in rows
        for a, b in itertools.permutations(range(len(row["predicted"])), 2)
    ]
    trials, share = sum(len(row["predicted"]) // 2 for row in rows), sum(inside) / len(inside)
    return Interval(share, *wilson(share * trials, trials), trials)


def smollm2(quick: bool) -> dict[str, Any]:
    """One update of SmolLM2-135M in float32: AdamW with a state of two steps, reward: short answers."""
    model, tokenizer = load_smollm2()
    config = load_config(["rollout.max_new_tokens=16"])
    policy = Policy(model, torch.device("cpu"), 1.0, full_precision=True)
    sampler = Sampler(model, tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    stop = (tokenizer.eos_token_id,)

    def sample(first: int, count: int, n: int) -> RolloutBatch:
        texts = [f"What is {3 * i + 2} plus {i + 5}? Answer briefly." for i in range(first, first + count)]
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in texts
        ]
        params = SamplingParams(n=n, max_new_tokens=16, stop_token_ids=stop)
        return sampler.generate(prompts, params, generator=torch.Generator().manual_seed(first))

    def loss_of(first: int) -> TokenBatch:
        batch = sample(first, 2, 4)
        return loss_batch(policy, batch.replace(rewards=-batch.response_lengths.float()), config)

    for first in (100, 200):
        for one in loss_of(first).passes():
            one.run().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    probe = EntropyProbe(model, optimizer, 1.0)
    U = loss_of(300)
    update = probe.update(U)
    E = evaluation_batch(policy, sample(0, 8 if quick else 24, 1), token_budget=1024)
    prediction = probe.predict(E, update)
    found = same_batch(probe, prediction, E, update, (0.03, 0.1, 0.3))
    shares = probe.shares(prediction, E, update, U)
    measured, _ = probe.measure(prediction, E, update, 1.0)
    return {
        "delta_h_predicted": prediction.change.value,
        "delta_h_predicted_stderr": prediction.change.stderr,
        "delta_h_measured": measured.change.value,
        "difference_stderr": measured.difference.stderr,
        "ess": measured.ess,
        "sequences": len(prediction.base.lengths),
        "mean_entropy": prediction.base.mean_entropy,
        "parts_over_whole": (float(shares.tokens.sum()) + shares.momentum + shares.decay) / prediction.change.value,
        "momentum_share": shares.momentum,
        "decay_share": shares.decay,
        "ratio_small": found["sweep"][0]["predicted"] / found["sweep"][0]["measured"],
        "log_log_slope": found["slope"],
        "sweep": found["sweep"],
    }


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs",
        type=Path,
        default=study_folder("probe_accuracy"),
        help="where trained runs and their results are kept",
    )
    parser.add_argument(
        "--intervals",
        type=Path,
        metavar="RUN",
        help="only coverage of intervals, at the first and the last checkpoint of this run of the demo",
    )


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, extra)
    if args.intervals:
        saved = sorted(int(path.name[5:]) for path in (args.intervals / "checkpoints").glob("step_*"))
        found: dict[str, Interval] = {}
        for step in (saved[0], saved[-1]):
            found |= interval_coverage(args.intervals, step, 6 if args.quick else 64)
            print(told(found), flush=True)
        emit("probe_accuracy", found, {"run": str(args.intervals), "machine": machine()})
        return
    steps = [5, 10] if args.quick else [5, 10, 20, 30, 40, 50, 60, 80]
    seeds = [0] if args.quick else [0, 1]
    batches, prompts = (4, 64) if args.quick else (6, 128)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.quick else args.runs
        for seed in seeds:
            run_dir = trained_run(folder, seed, steps)
            for step in steps:
                row = kept_row(run_dir, seed, step, batches, prompts)
                rows.append(row)
                print(
                    f"seed {seed} step {step}: H {row['mean_entropy']:.4f}, predicted {row['delta_h_predicted']:+.3e}, "
                    f"measured {row['delta_h_measured']:+.3e}, fresh {row['delta_h_fresh']:+.3e}, same-batch ratio "
                    f"{row['same_batch_ratio']:.4f}, slope {row['log_log_slope']:.4f}",
                    flush=True,
                )
        coverages: dict[str, Interval] = {}
        for step in (steps[0], steps[-1]):
            coverages |= interval_coverage(trained_run(folder, seeds[0], steps), step, 6 if args.quick else 64)
            print(told(coverages), flush=True)
    ratios = [row["same_batch_ratio"] for row in rows]
    slopes = [row["log_log_slope"] for row in rows]
    large = smollm2(args.quick)
    print(f"SmolLM2-135M: {large}", flush=True)
    result: dict[str, float | Interval] = {
        "same_batch_ratio_min": min(ratios),
        "same_batch_ratio_max": max(ratios),
        "log_log_slope_min": min(slopes),
        "log_log_slope_max": max(slopes),
        "coverage_independent_small_step": coverage(rows, "small", SMALL[-1]),
        "coverage_independent_real_step": coverage(rows, "real", REAL),
        "coverage_fresh_real_step": coverage(rows, "fresh", REAL),
        **coverages,
        "same_batch_ratio_smollm2": large["ratio_small"],
        "log_log_slope_smollm2": large["log_log_slope"],
    }
    pairs = len(rows) * batches * (batches - 1)
    emit(
        "probe_accuracy",
        result,
        {"pairs": pairs, "machine": machine(), "checkpoints": rows, "smollm2": large},
    )


if __name__ == "__main__":
    main()
