"""Does TracIn selection help? The demo's task with 0, 20 and 40 % of the training rewards flipped.

Compared with vanilla GRPO, with dropping as many responses at random, and with training on the validation rollouts too
(the same rollouts that selection uses, with their true rewards). Held-out accuracy against training steps, trained
responses and all generated responses, validation rollouts counted. The prompts that accuracy is measured on are neither
trained on nor used by selection.

    python -m benchmarks.tracin_effect --quick            a look: one seed, 12 steps
    python -m benchmarks.tracin_effect --write-docs       the study of docs/tracin_effect.md, and its pictures
    python -m benchmarks.tracin_effect --methods positive,soft --flips 0.2,0.4 --seeds 0,1       other settings

Every finished run is a line in runs/.cache/tracin_effect/results.jsonl and is not made again: the study can be
interrupted. Delete the file to start anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._tracin_effect_page import LABELS, TRIED, TRIED_SEEDS, summarise, write_page
from benchmarks.common import REPOSITORY, emit, machine, parse_arguments
from gradtrace.batch import RolloutBatch
from gradtrace.config import Config, TracinConfig
from gradtrace.config_loader import load_config
from gradtrace.instruments.columns import no_truth
from gradtrace.instruments.observer import StepObserver
from gradtrace.instruments.tracin.losses import with_advantage
from gradtrace.instruments.tracin.validation import ValidationSource
from gradtrace.metrics import Timer
from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout import SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.experience import Experience
from gradtrace.training.instruments import tracin_instrument
from gradtrace.training.loop import Trainer
from gradtrace.training.parts import Parts, build_parts
from gradtrace.training.terminal import SilentDisplay

CACHE = REPOSITORY / "runs" / ".cache" / "tracin_effect"
FLIPS, SEEDS, STEPS = (0.4, 0.2, 0.0), (0, 1, 2, 3, 4), 16
EVALUATION_PROMPTS, EVALUATION_N, EVALUATE_EVERY = 512, 2, 4


@dataclass(frozen=True)
class Method:
    kind: str
    """vanilla, selection, random (as many dropped as `selection` did) or val_too."""
    knobs: tuple[str, ...] = ()
    """Of trainer.tracin, beyond its defaults."""


METHODS: dict[str, Method] = {
    "vanilla": Method("vanilla"),
    "selection": Method("selection"),
    "random": Method("random"),
    "val_too": Method("val_too"),
    # Other settings of selection, tried to find its defaults
    "no_preconditioner": Method("selection", ("preconditioner=none",)),
    "drop_all_negative": Method("selection", ("drop_share=1",)),
    "positive": Method("selection", ("selection=positive",)),
    "soft": Method("selection", ("selection=soft", "soft_temperature=0.5")),
    "refresh_4": Method("selection", ("val_refresh_every=4",)),
    "prompts_32": Method("selection", ("drop_share=1", "val_batch_size=32")),
}


def configuration(method: Method, flip: float, seed: int, steps: int) -> Config:
    return load_config(
        [
            f"trainer.runs_dir={CACHE}",
            f"trainer.seed={seed}",
            f"trainer.total_steps={steps}",
            f"reward.flip_probability={flip}",
            "trainer.cpu_threads=1",
            "trainer.entropy_trace.enable=false",
            "trainer.influence_trace.enable=false",
            "trainer.tracin.diagnose_every=0",
            # Never reached; it keeps these prompts out of the validation set of selection.
            f"trainer.validation.prompts={EVALUATION_PROMPTS}",
            *[f"trainer.tracin.{knob}" for knob in method.knobs],
        ]
    )


@functools.cache
def settings_of(method: Method) -> dict[str, Any]:
    """All of trainer.tracin, resolved."""
    return dataclasses.asdict(configuration(method, 0.0, 0, 1).trainer.tracin)


class RandomDrop(StepObserver):
    """Leaves out as many responses as selection did in the same step, chosen at random."""

    def __init__(self, dropped: list[int], seed: int) -> None:
        self.dropped = dropped
        self.generator = torch.Generator().manual_seed(seed)

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        rows = with_advantage(batch)
        count = min(self.dropped[step - 1], max(0, len(rows) - 1))
        kept = torch.ones(len(batch), dtype=torch.bool)
        kept[rows[torch.randperm(len(rows), generator=self.generator)[:count]]] = False
        return batch.replace(kept=kept)


class WithValidation(Experience):
    """Rollouts of the training prompts, and the validation rollouts of the step with their true rewards."""

    def __init__(self, inner: Experience, source: ValidationSource) -> None:
        self.__dict__.update(inner.__dict__)
        self.source = source
        self.step = 0

    def collect(self, generator: torch.Generator, timer: Timer) -> tuple[RolloutBatch, dict[str, float]]:
        batch, metrics = super().collect(generator, timer)
        self.step += 1
        validation, _ = self.source.at(self.step)
        extra = validation.batch.replace(advantages=None)
        if batch.flipped is not None:
            extra = extra.replace(flipped=torch.zeros(len(extra), dtype=torch.bool))
        return RolloutBatch.concat([batch, extra], self.sampler.pad_token_id), metrics


def accuracy(parts: Parts, prompts: list[Prompt]) -> float:
    """Share of right answers to held-out prompts, sampled as in training; always the same random numbers."""
    params = SamplingParams(
        n=EVALUATION_N,
        max_new_tokens=parts.config.rollout.max_new_tokens,
        temperature=1.0,
        stop_token_ids=parts.task.stop_token_ids,
    )
    batch = rollout(parts.sampler, prompts, params, torch.Generator().manual_seed(99))
    rewards = judge(batch, parts.task.tokenizer, parts.reward).need("rewards")
    return float(rewards.mean())


def run_one(
    name: str, flip: float, seed: int, steps: int, dropped: list[int] | None = None
) -> dict[str, Any]:
    method = METHODS[name]
    config = configuration(method, flip, seed, steps)
    parts = build_parts(config)
    observer: StepObserver = StepObserver()
    if method.kind == "selection":
        observer = tracin_instrument(parts, None, {}, no_truth, lambda line: None)
    elif method.kind == "random":
        assert dropped is not None
        observer = RandomDrop(dropped, seed)
    record: dict[str, Any] = {"dropped": [], "dropped_of_flipped": [], "dropped_of_unflipped": []}
    trained = generated = 0
    prompts = parts.task.validation_prompts(EVALUATION_PROMPTS)
    points = [{"step": 0, "trained": 0, "generated": 0, "accuracy": accuracy(parts, prompts)}]
    begin, evaluating = time.perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(parts, RunFiles(Path(folder)), observer, SilentDisplay())
        if method.kind == "val_too":
            source = tracin_instrument(parts, None, {}, no_truth, lambda line: None).source
            trainer.experience = WithValidation(trainer.experience, source)
        for step in range(1, steps + 1):
            batch, _ = trainer.experience.collect(parts.generators["rollout"], Timer())
            batch, metrics = trainer.train_step(batch, step, Timer())
            kept = len(batch) if batch.kept is None else int(batch.kept.sum())
            trained += kept
            generated += len(batch) + int(metrics.get("tracin/val_generated", 0))
            record["dropped"].append(len(batch) - kept)
            if batch.flipped is not None and batch.kept is not None:
                for label, chosen in (("flipped", batch.flipped), ("unflipped", ~batch.flipped)):
                    learnable = torch.zeros(len(batch), dtype=torch.bool)
                    learnable[with_advantage(batch)] = True
                    counted = chosen & learnable
                    if bool(counted.any()):
                        share = float((~batch.kept & counted).sum() / counted.sum())
                        record[f"dropped_of_{label}"].append(share)
            if step % EVALUATE_EVERY == 0 or step == steps:
                start = time.perf_counter()
                now = {"step": step, "trained": trained, "generated": generated}
                points.append(now | {"accuracy": accuracy(parts, prompts)})
                evaluating += time.perf_counter() - start
    record["points"] = points
    record["seconds"] = round(time.perf_counter() - begin - evaluating, 2)
    return record


class Results:
    """Finished runs, one JSON line each. What counts is how they were made, not what the method was called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.records[entry["key"]] = entry

    def key(self, name: str, flip: float, seed: int, steps: int) -> str:
        method = METHODS[name]
        selection = None if method.kind == "vanilla" else settings_of(method)
        return json.dumps([method.kind, selection, flip, seed, steps], sort_keys=True)

    def find(self, name: str, flip: float, seed: int, steps: int) -> dict[str, Any] | None:
        """The run, if it was made."""
        found = self.records.get(self.key(name, flip, seed, steps))
        return None if found is None else found | {"method": name}

    def get(self, name: str, flip: float, seed: int, steps: int) -> dict[str, Any]:
        """The run, made now if it is not there."""
        key = self.key(name, flip, seed, steps)
        if key not in self.records:
            dropped = None
            if METHODS[name].kind == "random":
                dropped = self.get("selection", flip, seed, steps)["dropped"]
            record = run_one(name, flip, seed, steps, dropped)
            entry = {"key": key, "flip": flip, "seed": seed, "steps": steps, **record}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.records[key] = entry
        return self.records[key] | {"method": name}


def described() -> str:
    """The defaults of selection, in short."""
    c = TracinConfig()
    return (
        f"`selection={c.selection}` (`drop_share={c.drop_share:g}`), `preconditioner={c.preconditioner}`, "
        f"{c.val_batch_size} validation prompts, `val_strategy={c.val_strategy}`, "
        f"`val_refresh_every={c.val_refresh_every}`"
    )


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", type=listed(str), default=list(LABELS), help="names, by comma")
    parser.add_argument("--flips", type=listed(float), default=list(FLIPS))
    parser.add_argument("--seeds", type=listed(int), default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--made-only", action="store_true", help="only report on runs that were made already")
    parser.add_argument(
        "--write-docs", action="store_true", help="rewrite docs/tracin_effect.md and its pictures"
    )


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, add_arguments)
    if args.quick:
        args.methods, args.flips, args.seeds, args.steps = ["vanilla", "selection"], [0.4], [0], 12
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    results = Results(CACHE / "results.jsonl")
    runs = []
    for seed in args.seeds:
        for flip in args.flips:
            for name in args.methods:
                find = results.find if args.made_only else results.get
                run = find(name, flip, seed, args.steps)
                if run is None:
                    continue
                runs.append(run)
                last = run["points"][-1]
                print(
                    f"{flip:4.0%} flipped  seed {seed}  {name:22} step {last['step']}: {last['accuracy']:.3f}  "
                    f"({run['seconds']:.0f} s)",
                    flush=True,
                )
    summary = summarise(runs)
    if args.write_docs:
        tried = [
            made
            for name in ("vanilla", "selection", *TRIED)
            for flip in args.flips
            for seed in TRIED_SEEDS
            if (made := results.find(name, flip, seed, args.steps)) is not None
        ]
        write_page(REPOSITORY / "docs", summary, runs, summarise(tried), machine(), described())
    ratios = {}
    for flip, by_method in summary.items():
        if "vanilla" not in by_method:
            continue
        for name, found in by_method.items():
            if name != "vanilla":
                for axis in ("steps", "generated"):
                    base = by_method["vanilla"][axis]["mean"]
                    label = f"accuracy_over_vanilla_{name}_at_equal_{axis}_{float(flip):.0%}_flips".replace(
                        "%", ""
                    )
                    ratios[label] = found[axis]["mean"] / max(base, 1e-9)
    emit("tracin_effect", ratios, {"summary": summary, "steps": args.steps, "machine": machine()})


if __name__ == "__main__":
    main()
