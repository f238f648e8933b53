"""Which use of a few trusted prompts helps most, when the other rewards are wrong? TracIn selection among the answers.

The demo's task. 32 prompts are *trusted* (their rewards are true) and there are no others like them: they are used
again and again. The rewards of all other training prompts err: at random (0, 20, 40 % flipped) or by rule (a verifier
that computes every `-` the wrong way round). Every arm makes equally many optimizer steps and samples equally many
responses:

    vanilla            48 noisy prompts × 8 responses a step
    random             the same, as many dropped at random as `selection` drops
    selection          32 noisy prompts, selected by 16 trusted prompts, which are not trained on
    trusted_only       the 32 trusted prompts × 12 responses, nothing else
    trusted_too        32 noisy and 16 trusted prompts, all trained on
    trusted_random     the same, as many noisy responses dropped at random as `trusted_selection` drops
    trusted_selection  the same, the noisy ones selected by the trusted ones (`trainer.tracin.train_on_validation`)
    trusted_soft       the same with soft weights in place of dropping
    trusted_averaged   the same with scores averaged over the trusted rollouts of the last four steps

Held-out accuracy on prompts that are neither trained on nor trusted. Settings are the defaults, which were chosen on
seeds 0 and 1 of one warm start; reported seeds and the second warm start have been used for nothing else.

    python -m benchmarks.tracin_effect --quick                      a look: one seed, 3 steps
    python -m benchmarks.tracin_effect                              the study of docs/tracin_effect.md
    python -m benchmarks.tracin_effect --made-only --write-docs     that page from the runs that were made

Every finished run is a line in study.jsonl of --folder and is not made again: the study can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._tracin_effect_page import ARMS, NOISES, complete, summarise, write_page
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments, study_arguments
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.instruments.contract import Reporter, Samples
from gradtrace.instruments.tracin.losses import with_advantage
from gradtrace.instruments.tracin.reporter import TracinReporter
from gradtrace.instruments.tracin.validation import ValidationSet
from gradtrace.intervals import Interval
from gradtrace.metrics import Timer
from gradtrace.policy.rollouts import add_advantages, judge, rollout
from gradtrace.rollout import SamplingParams
from gradtrace.tasks.arithmetic import Chain, apply
from gradtrace.tasks.base import Prompt
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components, build_task
from gradtrace.training.experience import Experience, flip_rewards
from gradtrace.training.host import EmbeddedSteps, no_instruments, open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

SEEDS = (10, 11, 12, 13, 14, 15)
"""Reported; the even ones have warm start 0, the odd ones warm start 1. Five are enough for a figure."""
USED = ("vanilla", "trusted_only", "trusted_too", "trusted_selection")
GRID = {"0": USED, "0.2": USED, "0.4": tuple(ARMS), "systematic": (*USED, "selection", "trusted_random")}
"""The arms of each kind of error: all of them where errors are worst, elsewhere those that a person would choose."""
STEPS = 12
EVALUATION_PROMPTS, EVALUATION_N = 512, 2
TRUSTED, TRUSTED_PER_STEP, NOISY, N = 32, 16, 32, 8
AVERAGED_STEPS = 4


@dataclass(frozen=True)
class Setup:
    """What one arm does."""

    noisy: int = NOISY
    """Noisy prompts in a step."""
    observer: str = "none"
    """none, selection (TracIn), trusted (rollouts of trusted prompts, no scores) or dropping (at random, too)."""
    like: str = ""
    """The arm whose number of dropped responses is copied."""
    knobs: tuple[str, ...] = ()
    """Of trainer.tracin."""
    averaged: bool = False


TOO = ("train_on_validation=true",)
SETUPS = {
    "vanilla": Setup(noisy=NOISY + TRUSTED_PER_STEP),
    "random": Setup(noisy=NOISY + TRUSTED_PER_STEP, observer="dropping", like="selection"),
    "selection": Setup(observer="selection", knobs=("train_on_validation=false",)),
    "trusted_only": Setup(noisy=0),
    "trusted_too": Setup(observer="trusted", knobs=TOO),
    "trusted_random": Setup(observer="dropping", like="trusted_selection", knobs=TOO),
    "trusted_selection": Setup(observer="selection", knobs=TOO),
    "trusted_soft": Setup(observer="selection", knobs=(*TOO, "selection=soft")),
    "trusted_averaged": Setup(observer="selection", knobs=TOO, averaged=True),
}


def configuration(arm: str, seed: int, steps: int, trusted: Path, runs: Path) -> Config:
    setup = SETUPS[arm]
    groups = (setup.noisy or TRUSTED) + (TRUSTED_PER_STEP if TOO[0] in setup.knobs else 0)
    return load_config(
        [
            f"trainer.runs_dir={runs}",
            f"trainer.seed={seed}",
            f"task.arithmetic.warm_start.seed={seed % 2}",
            f"trainer.total_steps={steps}",
            f"data.train_batch_size={setup.noisy or TRUSTED}",
            f"actor.mini_batch_size={groups // 4}",  # four optimizer steps on every rollout, in every arm
            f"rollout.n={N if setup.noisy else (NOISY + TRUSTED_PER_STEP) * N // TRUSTED}",
            "trainer.cpu_threads=1",
            "trainer.entropy_trace.enable=false",
            "trainer.influence_trace.enable=false",
            "trainer.blame.enable=false",
            f"trainer.tracin.enable={setup.observer != 'none'}",
            f"trainer.tracin.val_batch_size={TRUSTED_PER_STEP}",
            f"trainer.tracin.val_files=[{trusted}]",
            "trainer.tracin.diagnose_every=0",
            *[f"trainer.tracin.{knob}" for knob in setup.knobs],
        ]
    )


# ---------------------------------------------------------------- what errs, and what drops


def wrong_minus(response: str, item: dict[str, Any]) -> float:
    """The reward of a verifier that computes a − b as b − a."""
    chain = Chain(tuple(map(int, re.findall(r"\d", item["prompt"]))), re.sub(r"[\d=]", "", item["prompt"]))
    value = chain.digits[0]
    expected = str(value)
    for operator, digit in zip(chain.operators, chain.digits[1:], strict=True):
        value = apply(digit, operator, value) if operator == "-" else apply(value, operator, digit)
        expected += f"{operator}{digit}={value}"
    return float(response == expected)


class NoisyExperience(Experience):
    """Training rollouts whose rewards err; of `trusted` prompts alone, where there are some, and then they do not."""

    def __init__(self, inner: Experience, noise: str, trusted: list[Prompt]) -> None:
        self.__dict__.update(inner.__dict__)
        self.noise, self.trusted = noise, trusted

    def collect(self, generator: torch.Generator, timer: Timer) -> tuple[RolloutBatch, dict[str, float]]:
        if self.trusted:
            return self._rollout(self.trusted, generator, timer)[0], {}
        batch, metrics = super().collect(generator, timer)
        if self.noise != "systematic":
            return flip_rewards(batch, float(self.noise), generator), metrics
        items = [batch.items[group] for group in batch.group.tolist()]
        seen = torch.tensor([wrong_minus(*pair) for pair in zip(batch.texts or [], items, strict=True)])
        return batch.replace(rewards=seen, flipped=seen != batch.need("rewards")), metrics


class Dropping(Reporter):
    """Rollouts of the trusted prompts, trained on, if there is `trusted`; no scores. Leaves out `dropped[step − 1]` of
    the other responses, chosen at random."""

    def __init__(self, trusted: TracinReporter | None, dropped: list[int], seed: int) -> None:
        self.trusted, self.dropped = trusted, dropped
        self.generator = torch.Generator().manual_seed(seed)
        self.extra = 0

    def samples(self, step: int) -> Samples | None:
        return None if self.trusted is None else self.trusted.samples(step)

    def more_rollouts(self, step: int, sampled: RolloutBatch | None) -> RolloutBatch | None:
        more = None if self.trusted is None else self.trusted.more_rollouts(step, sampled)
        self.extra = 0 if more is None else len(more)
        return more

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        rows = with_advantage(batch)
        rows = rows[rows < len(batch) - self.extra]
        count = min(self.dropped[step - 1], max(0, len(rows) - 1)) if self.dropped else 0
        kept = torch.ones(len(batch), dtype=torch.bool)
        kept[rows[torch.randperm(len(rows), generator=self.generator)[:count]]] = False
        return batch.replace(kept=kept), None


class Averaged(TracinReporter):
    """Scores against the trusted rollouts of the last steps together; only the newest are trained on."""

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        newest = self.source.current
        assert newest is not None
        earlier = self.__dict__.setdefault("earlier", [])
        earlier.append(newest.batch.replace(advantages=None, returns=None))
        del earlier[:-AVERAGED_STEPS]
        whole = add_advantages(RolloutBatch.concat(earlier), self.source.estimator)
        self.source.current = ValidationSet(whole, newest.pool_index, step)
        return super().plan(batch, step, sampled)


def steps_of(arm: str, parts: Components, files: RunFiles, seed: int, dropped: list[int]) -> EmbeddedSteps:
    """What chooses in this arm of the study."""
    setup = SETUPS[arm]
    if setup.observer == "none":
        return no_instruments(parts, print)
    steps = open_instruments(parts, files, lambda line: None, writes=False)
    tracin = steps.reporters["tracin"]
    assert isinstance(tracin, TracinReporter)
    if setup.observer != "selection":
        steps.reporters["tracin"] = Dropping(tracin if setup.knobs else None, dropped, seed)
    elif setup.averaged:
        tracin.__class__ = Averaged
    return steps


# ---------------------------------------------------------------- a run


def accuracy(parts: Components, prompts: list[Prompt]) -> float:
    """Share of right answers to held-out prompts, sampled as in training; always the same random numbers."""
    params = SamplingParams(
        n=EVALUATION_N,
        max_new_tokens=parts.config.rollout.max_new_tokens,
        temperature=1.0,
        stop_token_ids=parts.task.stop_token_ids,
    )
    batch = rollout(parts.sampler, prompts, params, torch.Generator().manual_seed(99))
    return float(judge(batch, parts.task.tokenizer, parts.reward).need("rewards").mean())


def dropped_shares(batch: RolloutBatch) -> dict[str, float]:
    """Of the noisy responses that have a gradient: the share dropped of those judged wrongly, and of the others."""
    if batch.flipped is None or batch.kept is None:
        return {}
    learnable = torch.zeros(len(batch), dtype=torch.bool)
    learnable[with_advantage(batch)] = True
    shares = {}
    for label, chosen in (("wrong", batch.flipped & learnable), ("right", ~batch.flipped & learnable)):
        if bool(chosen.any()):
            shares[label] = float((~batch.kept & chosen).sum() / chosen.sum())
    return shares


def run_one(arm: str, noise: str, seed: int, steps: int, dropped: list[int], runs: Path) -> dict[str, Any]:
    """One run; `runs` is where warm starts are kept."""
    begin, processor = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trusted_file = Path(folder) / "trusted.jsonl"
        settings = configuration(arm, seed, steps, trusted_file, runs)
        # The configuration names the file of the trusted prompts, and the prompts come from a task built by it.
        held_out = build_task(settings, None)[1].validation_prompts(EVALUATION_PROMPTS + TRUSTED)
        lines = [json.dumps({"prompt": p.item["prompt"]}) for p in held_out[EVALUATION_PROMPTS:]]
        trusted_file.write_text("\n".join(lines))
        parts = build_components(settings)
        files = RunFiles(Path(folder) / "run")
        trainer = Trainer(parts, files, SilentDisplay(), steps_of(arm, parts, files, seed, dropped))
        trusted = held_out[EVALUATION_PROMPTS:] if not SETUPS[arm].noisy else []
        trainer.experience = NoisyExperience(trainer.experience, noise, trusted)
        record: dict[str, Any] = {"dropped": [], "shares": [], "generated": 0, "updates": 0}
        for step in range(1, steps + 1):
            batch, _ = trainer.experience.collect(parts.generators["rollout"], Timer())
            sampled = len(batch)
            batch, metrics = trainer.train_step(batch, step, Timer())
            extra = len(batch) - sampled
            record["generated"] += sampled + int(metrics.get("tracin/val_generated", extra))
            kept = len(batch) if batch.kept is None else int(batch.kept.sum())
            record["dropped"].append(len(batch) - kept)
            record["shares"].append(dropped_shares(batch))
        record["accuracy"] = accuracy(parts, held_out[:EVALUATION_PROMPTS])
        state = next(iter(parts.optimizer.adamw.state.values()))
        record["updates"] = int(state["step"])
    record["seconds"] = round(time.perf_counter() - begin, 1)
    record["cpu_seconds"] = round(time.process_time() - processor, 1)
    return record


class Results:
    """Finished runs, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        for entry in map(json.loads, lines):
            self.records[entry["arm"], entry["noise"], entry["seed"], entry["steps"]] = entry

    def find(self, arm: str, noise: str, seed: int, steps: int) -> dict[str, Any] | None:
        """The run, if it was made."""
        return self.records.get((arm, noise, seed, steps))

    def get(self, arm: str, noise: str, seed: int, steps: int) -> dict[str, Any]:
        """The run, made now if it is not there. Trusted prompts alone know no noise: one run serves all of it."""
        if SETUPS[arm].noisy == 0 and noise != "0":
            return self.get(arm, "0", seed, steps) | {"noise": noise}
        key = (arm, noise, seed, steps)
        if key not in self.records:
            like = SETUPS[arm].like
            dropped = self.get(like, noise, seed, steps)["dropped"] if like else []
            entry = {"arm": arm, "noise": noise, "seed": seed, "steps": steps}
            entry |= run_one(arm, noise, seed, steps, dropped, self.path.parent.parent)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.records[key] = entry
        return self.records[key]


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def ratios_of(summary: dict[str, Any]) -> dict[str, Interval]:
    """Each arm's accuracy and its interval over vanilla's mean accuracy."""
    ratios = {}
    for noise, arms in summary["arms"].items():
        for arm, found in arms.items():
            if arm != "vanilla" and "vanilla" in arms:
                mean, low, high = (found[end] / arms["vanilla"]["mean"] for end in ("mean", "low", "high"))
                ratios[f"accuracy_over_vanilla_{arm}_{noise}"] = Interval(mean, low, high, found["n"])
    return ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "tracin_effect", "docs/tracin_effect.md")
    parser.add_argument("--arms", type=listed(str), default=list(ARMS), help="names, by comma, as far as GRID has them")
    parser.add_argument("--noises", type=listed(str), default=list(NOISES), help="0, 0.2, 0.4, systematic")
    parser.add_argument("--seeds", type=listed(int), default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--made-only", action="store_true", help="only report on runs that were made already")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, add_arguments)
    if args.quick:
        args.arms, args.noises, args.seeds, args.steps = ["vanilla", "trusted_selection"], ["0.4"], [10], 3
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    results = Results(args.folder / "study.jsonl")
    runs, end = [], time.monotonic() + 60 * args.minutes
    for seed in args.seeds:
        for noise in args.noises:
            for arm in [arm for arm in GRID[noise] if arm in args.arms]:
                if args.made_only or time.monotonic() > end:
                    source = "0" if arm == "trusted_only" else noise
                    run = results.find(arm, source, seed, args.steps)
                    run = None if run is None else run | {"noise": noise}
                else:
                    run = results.get(arm, noise, seed, args.steps)
                    print(
                        f"seed {seed}  {noise:10}  {arm:18} {run['accuracy']:.3f}  ({run['cpu_seconds']:.0f} s)",
                        flush=True,
                    )
                runs += [] if run is None else [run]
    runs = complete(runs)
    summary = summarise(runs)
    if args.write_docs:
        write_page(REPOSITORY / "docs", summary, runs, machine())
    emit("tracin_effect", ratios_of(summary), {"summary": summary, "steps": args.steps, "machine": machine()})


if __name__ == "__main__":
    main()
