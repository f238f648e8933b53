"""What the influence trace costs a training step.

One GRPO step on SmolLM2-135M, with the trace and without, on the same rollouts, in turns. `default` scores every
token; `measured` measures one of the step's 8 groups as well (4 with --quick); `per_prompt` also scores every group
on its own prompt. `overhead_update` compares the update phase (forward, backward, optimizer), `overhead_step` the
whole step, rollout included, both as with over without, in CPU seconds on one thread, which other programs hardly
change; wall seconds stand beside them in the details. `overhead_update_auto` is what `measure=auto` comes to over
many steps, of which it measures a part, and `overhead_update_every4` the mean of four steps of which one is traced
(write_every=4): both are computed from the measured ones. The trace's files are written as in training, off the
training thread, and their CPU time counts. The tiny model of the demo is measured too: there Python's share is much
larger.

`memory_NAME` is the largest resident set of a process that makes two such steps, of 4 prompts, with the trace over that
of one without.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Timing, bench_folder, emit, parse_arguments, peak_memory, smollm2_path
from gradtrace import open_run
from gradtrace.config.loader import load_config
from gradtrace.instruments.influence.plan import FORWARD, MEASURED_SHARE, SELDOM
from gradtrace.metrics import Timer
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import build_components
from gradtrace.training.host import EmbeddedSteps, open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

# Any reward will do that tells responses of a group apart.
REWARD = "def reward(response, item):\n    return float(len(response) % 2)\n"
QUESTIONS = [
    "A baker makes {} loaves a day and sells each for {} dollars. How much does she earn in a week?",
    "Tom has {} marbles and gives {} to each of three friends. How many are left?",
    "A train covers {} miles in {} hours. How far does it go in ten hours?",
    "There are {} shelves with {} books each. Twelve are borrowed. How many remain?",
]


def smollm2_overrides(folder: Path, quick: bool) -> list[str]:
    prompts = [QUESTIONS[i % 4].format(20 + i, 2 + i % 5) for i in range(64)]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts)
    )
    (folder / "reward.py").write_text(REWARD)
    return [
        "recipe=gsm8k",
        f"model.path={smollm2_path()}",
        "model.device=cpu",
        f"data.train=[{folder / 'prompts.jsonl'}]",
        "data.prompt_key=prompt",
        f"reward.path={folder / 'reward.py'}:reward",
        "rollout.n=4",
        f"rollout.max_new_tokens={16 if quick else 48}",
        f"data.train_batch_size={4 if quick else 8}",
        "actor.mini_batch_size=0",
        "actor.token_budget=4096",
    ]


DEMO = ["recipe=demo", "actor.mini_batch_size=0"]
ALONE = [
    "trainer.entropy_trace.enable=false",
    "trainer.blame.enable=false",
]
"""No other instrument runs beside the trace."""
TIERS = {
    "default": ["trainer.influence_trace.measure=0"],
    "measured": ["trainer.influence_trace.measure=1"],
    "per_prompt": ["trainer.influence_trace.measure=0", "trainer.influence_trace.accepted_rejected_scope=per_prompt"],
}
"""What the trace is asked for, beside the same step without it."""


class Clocks(Timer):
    """A timer that counts the process's CPU seconds beside those on the wall."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = time.process_time()
        self.cpu_seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.process_time()
        with super().__call__(name):
            yield
        self.cpu_seconds[name] += time.process_time() - begin

    @property
    def cpu_total(self) -> float:
        return time.process_time() - self.begin


@dataclass
class Step:
    """Seconds of one training step on rollouts that exist already, in (CPU, wall)."""

    whole: tuple[float, float]
    update: tuple[float, float]


def measure(overrides: list[str], rounds: int) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Steps with each tier and without the trace on the same rollouts, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = [f"trainer.runs_dir={bench_folder()}", "trainer.influence_trace.enable=true", *ALONE]
        parts = build_components(load_config([*overrides, *common]))
        trainer = Trainer(parts, RunFiles(folder / "plain"), SilentDisplay())
        observed = {"without": trainer.steps}
        for tier, knobs in TIERS.items():
            own = dataclasses.replace(parts, config=load_config([*overrides, *common, *knobs]))
            observed[tier] = open_instruments(own, RunFiles(folder / tier), lambda text: None)
        generating: list[tuple[float, float]] = []
        steps: dict[str, list[Step]] = {key: [] for key in observed}
        order = list(observed)
        warm_up(trainer, observed)
        for step in range(1, rounds + 1):
            clocks = Clocks()
            batch, _ = trainer.experience.collect(parts.generators["rollout"], clocks)
            generating.append((clocks.cpu_total, clocks.total))
            for key in order:
                trainer.steps = observed[key]
                gc.collect()
                clocks = Clocks()
                trainer.train_step(batch, 1 + step, clocks)
                update = (clocks.cpu_seconds["update_actor"], clocks.seconds["update_actor"])
                steps[key].append(Step((clocks.cpu_total, clocks.total), update))
            order.reverse()
        for one in observed.values():
            one.close()
        size, tokens = stored(folder / "default")
    sizes = {"groups": len(batch.prompts), "responses": len(batch)}
    detail = sizes | {"tokens": tokens, "bytes_per_token": round(size / max(tokens, 1), 2), "rounds": rounds}
    return compare(generating, steps, detail), detail


def warm_up(trainer: Trainer, observed: dict[str, EmbeddedSteps]) -> None:
    """Step 1 of all, on a quarter of the prompts: everything has run once after it, and the optimizer has a state."""
    experience, usual = trainer.experience, trainer.experience.prompts_per_step
    experience.prompts_per_step = max(1, usual // 4)
    batch, _ = experience.collect(trainer.components.generators["rollout"], Timer())
    experience.prompts_per_step = usual
    for steps in observed.values():
        trainer.steps = steps
        trainer.train_step(batch, 1, Timer())


def compare(
    generating: list[tuple[float, float]], steps: dict[str, list[Step]], detail: dict[str, Any]
) -> dict[str, Timing]:
    """Each tier over no trace, in CPU seconds; `detail` gets the seconds, and the ratios by the clock on the wall."""
    ratios: dict[str, Timing] = {}
    for clock, unit in enumerate(("cpu", "wall")):
        plain = steps["without"]
        detail[f"update_{unit}_s_without"] = round(median(step.update[clock] for step in plain), 4)
        detail[f"generate_{unit}_s"] = round(median(g[clock] for g in generating), 4)
        for tier in TIERS:
            of_update = Timing([step.update[clock] for step in steps[tier]], [step.update[clock] for step in plain])
            whole = [
                [g[clock] + step.whole[clock] for g, step in zip(generating, own, strict=True)]
                for own in (steps[tier], plain)
            ]
            found = {f"overhead_step_{tier}": Timing(*whole), f"overhead_update_{tier}": of_update}
            if unit == "cpu":
                ratios |= found
            else:
                detail |= {f"{key}_wall": round(timing.ratio, 3) for key, timing in found.items()}
    return ratios


MEMORY = {name: TIERS[name] for name in ("default", "per_prompt")}


def prepare_step(folder: str, quick: bool, knobs: list[str]) -> tuple[Trainer, Any]:
    """A trainer and a rollout of 4 prompts, both of SmolLM2."""
    overrides = [
        *smollm2_overrides(Path(folder), quick),
        "data.train_batch_size=4",
        f"trainer.runs_dir={folder}",
        *knobs,
    ]
    parts = build_components(load_config(overrides))
    files = RunFiles(Path(folder) / "run")
    trainer = Trainer(parts, files, SilentDisplay(), open_instruments(parts, files, lambda text: None))
    return trainer, trainer.experience.collect(parts.generators["rollout"], Timer())[0]


def make_steps(prepared: tuple[Trainer, Any]) -> None:
    """Two: before the first one the optimizer has no state yet, which scores are taken in the geometry of."""
    trainer, batch = prepared
    for step in (1, 2):
        trainer.train_step(batch, step, Timer())
    trainer.steps.close()


def peak_bytes(quick: bool, knobs: list[str]) -> int:
    """The largest resident set while a fresh process makes two steps."""
    with tempfile.TemporaryDirectory() as folder:
        return peak_memory(prepare_step, make_steps, folder, quick, [*ALONE, *knobs]).peak_bytes


def memory(quick: bool) -> tuple[dict[str, float], dict[str, int]]:
    """Ratios, and the bytes behind them."""
    found = {"without": peak_bytes(quick, ["trainer.influence_trace.enable=false"])}
    for name, knobs in MEMORY.items():
        found[name] = peak_bytes(quick, ["trainer.influence_trace.enable=true", *knobs])
    return {f"memory_{name}_smollm2": found[name] / found["without"] for name in MEMORY}, found


def measured_steps(detail: dict[str, Any]) -> float:
    """The share of the steps in which `measure=auto` measures a group: for 3 % of an update, or one step in ten."""
    groups, responses = int(detail["groups"]), int(detail["responses"])
    cost = (1.0 + FORWARD * (3.0 + responses / groups)) / groups
    return max(1 / SELDOM, min(1.0, MEASURED_SHARE / cost))


def stored(run_dir: Path) -> tuple[int, int]:
    """Bytes of the influence trace of a run, and its tokens."""
    run = open_run(run_dir)
    size = tokens = 0
    for step in run.steps("influence_trace"):
        size += (run_dir / "influence_trace" / "steps" / f"step_{step:06d}.npz").stat().st_size
        tokens += int(run.step("influence_trace", step)["length"].sum())
    return size, tokens


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    torch.set_num_threads(args.threads or 1)
    ratios: dict[str, float | Timing] = {}
    detail: dict[str, Any] = {"threads": torch.get_num_threads()}
    rounds = (2, 1) if args.quick else (9, 3)
    with tempfile.TemporaryDirectory() as folder:
        cases = {"tiny": DEMO, "smollm2": smollm2_overrides(Path(folder), args.quick)}
        for (label, overrides), count in zip(cases.items(), rounds, strict=True):
            found, detail[label] = measure(overrides, count)
            ratios |= {f"{key}_{label}": value for key, value in found.items()}
            default, measured = (found[f"overhead_update_{tier}"].ratio for tier in ("default", "measured"))
            ratios[f"overhead_update_auto_{label}"] = default + measured_steps(detail[label]) * (measured - default)
            ratios[f"overhead_update_every4_{label}"] = 1 + (default - 1) / 4
    of_memory, detail["peak_bytes"] = memory(args.quick)
    ratios |= of_memory
    ratios["bytes_per_token"] = detail["smollm2"]["bytes_per_token"]
    emit("trace_overhead", ratios, detail)


if __name__ == "__main__":
    main()
