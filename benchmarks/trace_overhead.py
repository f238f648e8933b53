"""What the influence trace costs a training step, tier by tier.

One GRPO step on SmolLM2-135M, with the trace and without, on the same rollouts, in turns. `tail` scores every mixed
group in the last block's weights on the training pass; `default` takes the own terms of 4 groups of 16 in all layers
as well. `overhead_update` compares the update phase (forward, backward, optimizer), `overhead_step` the whole step,
rollout included, both as with over without. The trace's files are written as in training, off the training thread. The
tiny model of the demo is measured too, exact and projected: there the layers are so small that the trace's share is
much larger.

`memory_NAME` is the largest resident set of a process that makes one such step with the trace over that of one without:
the tail with projections, and without them in the factored form.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import emit, parse_arguments, peak_memory, smollm2_path
from gradtrace import open_run
from gradtrace.config_loader import load_config
from gradtrace.instruments.observer import StepObserver
from gradtrace.metrics import Timer
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.instruments import build_observer
from gradtrace.training.loop import Trainer
from gradtrace.training.parts import build_parts
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
        f"data.train_batch_size={4 if quick else 16}",
        f"trainer.influence_trace.loss_term_prompts={1 if quick else 4}",
        "actor.mini_batch_size=0",
        "actor.token_budget=4096",
        "trainer.influence_trace.projection_dim_factor=32",
    ]


def demo_overrides(factor: int) -> list[str]:
    return [
        "recipe=demo",
        "actor.mini_batch_size=0",
        f"trainer.influence_trace.projection_dim_factor={factor}",
    ]


TIERS = {"default": [], "tail": ["trainer.influence_trace.credit=tail"]}
"""What the trace is asked for, beside the same step without it."""


def measure(overrides: list[str], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Steps with each tier and without the trace on the same rollouts, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = [
            *(f"trainer.runs_dir={folder}", "trainer.influence_trace.enable=true"),
            *("trainer.influence_trace.pairwise_max_mb=0", "trainer.entropy_trace.enable=false"),
        ]
        parts = build_parts(load_config([*overrides, *common]))
        trainer = Trainer(parts, RunFiles(folder / "plain"), StepObserver(), SilentDisplay())
        observers = {"without": StepObserver()}
        for tier, knobs in TIERS.items():
            own = dataclasses.replace(parts, config=load_config([*overrides, *common, *knobs]))
            observers[tier] = build_observer(own, RunFiles(folder / tier), lambda text: None)
        generating: list[float] = []
        seconds: dict[str, list[tuple[float, float]]] = {key: [] for key in observers}
        order = list(observers)
        for step in range(rounds + 1):  # the first round warms up
            timer = Timer()
            batch, _ = trainer.experience.collect(parts.generators["rollout"], timer)
            generating.append(timer.total)
            for key in order:
                trainer.observer = observers[key]
                timer, started = Timer(), time.perf_counter()
                trainer.train_step(batch, step + 1, timer)
                seconds[key].append((time.perf_counter() - started, timer.seconds["update_actor"]))
            order.reverse()
        for observer in observers.values():
            observer.close()
        size, tokens = stored(folder / "default")
    ratios, detail = (
        {},
        {"tokens": tokens, "bytes_per_token": round(size / max(tokens, 1), 2), "rounds": rounds},
    )
    for tier in TIERS:
        pairs = list(zip(generating, seconds[tier], seconds["without"], strict=True))[1:]
        ratios[f"overhead_step_{tier}"] = median((g + a[0]) / (g + b[0]) for g, a, b in pairs)
        ratios[f"overhead_update_{tier}"] = median(a[1] / b[1] for _, a, b in pairs)
        detail[f"update_rounds_{tier}"] = [round(a[1] / b[1], 3) for _, a, b in pairs]
    detail["update_s_without"] = round(median(b for _, b in seconds["without"][1:]), 4)
    return ratios, detail


FACTORED = [
    "trainer.influence_trace.projection_dim_factor=0",
    "trainer.influence_trace.preconditioner_form=factored",
]
MEMORY = {"tail": TIERS["tail"], "factored": [*TIERS["tail"], *FACTORED]}


def prepare_step(folder: str, quick: bool, knobs: list[str]) -> tuple[Trainer, Any]:
    """A trainer and a rollout, both of SmolLM2."""
    overrides = [*smollm2_overrides(Path(folder), quick), f"trainer.runs_dir={folder}", *knobs]
    parts = build_parts(load_config(overrides))
    files = RunFiles(Path(folder) / "run")
    trainer = Trainer(parts, files, build_observer(parts, files, lambda text: None), SilentDisplay())
    return trainer, trainer.experience.collect(parts.generators["rollout"], Timer())[0]


def make_step(prepared: tuple[Trainer, Any]) -> None:
    trainer, batch = prepared
    trainer.train_step(batch, 1, Timer())
    trainer.observer.close()


def peak_bytes(quick: bool, knobs: list[str]) -> int:
    """The largest resident set while a fresh process makes a step."""
    common = ["trainer.influence_trace.pairwise_max_mb=0", "trainer.entropy_trace.enable=false"]
    with tempfile.TemporaryDirectory() as folder:
        return peak_memory(prepare_step, make_step, folder, quick, [*common, *knobs]).peak_bytes


def memory(quick: bool) -> dict[str, float]:
    plain = peak_bytes(quick, ["trainer.influence_trace.enable=false"])
    return {
        f"memory_{name}_smollm2": peak_bytes(quick, ["trainer.influence_trace.enable=true", *knobs]) / plain
        for name, knobs in MEMORY.items()
    }


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
    ratios: dict[str, float] = {}
    detail: dict[str, Any] = {}
    for label, factor in (("tiny_exact", 0), ("tiny_factor4", 4)):
        found, detail[label] = measure(demo_overrides(factor), 2 if args.quick else 8)
        ratios |= {f"{key}_{label}": value for key, value in found.items()}
    torch.set_num_threads(args.threads or 2)
    with tempfile.TemporaryDirectory() as folder:
        found, detail["smollm2"] = measure(
            smollm2_overrides(Path(folder), args.quick), 1 if args.quick else 3
        )
    ratios |= {f"{key}_smollm2": value for key, value in found.items()}
    ratios |= memory(args.quick)
    ratios["bytes_per_token"] = detail["smollm2"]["bytes_per_token"]
    emit("trace_overhead", ratios, detail)


if __name__ == "__main__":
    main()
