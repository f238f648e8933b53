"""What the influence trace costs a training step: all linear layers, inverse Hessian of responses, factor 32.

One GRPO step on SmolLM2-135M (8 responses per prompt), with the trace and without, on the same rollouts, in turns.
`overhead_update` compares the update phase (forward, backward, optimizer), `overhead_step` the whole step, rollout
included, both as with over without. The trace's files are written as in training, off the training thread. The
tiny model of the demo is measured too, exact and projected: there the layers are so small that the trace's share is
much larger.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import emit, parse_arguments, smollm2_path
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
        "rollout.n=8",
        f"rollout.max_new_tokens={48 if quick else 96}",
        f"data.train_batch_size={1 if quick else 2}",
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


def measure(overrides: list[str], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Steps with and without the trace on the same rollouts, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = [
            *(f"trainer.runs_dir={folder}", "trainer.influence_trace.enable=true"),
            *("trainer.influence_trace.pairwise_max_mb=0", "trainer.entropy_trace.enable=false"),
        ]
        parts = build_parts(load_config([*overrides, *common]))
        files = RunFiles(folder / "run")
        trainer = Trainer(parts, files, StepObserver(), SilentDisplay())
        traced, untraced = build_observer(parts, files, print), StepObserver()
        seconds: dict[str, list[float]] = {
            key: [] for key in ("gen", "with", "without", "up_with", "up_without")
        }
        pair = [("with", traced), ("without", untraced)]
        for step in range(rounds + 1):  # the first round warms up
            timer = Timer()
            batch, _ = trainer.experience.collect(parts.generators["rollout"], timer)
            seconds["gen"].append(timer.total)
            for key, observer in pair:
                trainer.observer = observer
                timer, started = Timer(), time.perf_counter()
                trainer.train_step(batch, step + 1, timer)
                seconds[key].append(time.perf_counter() - started)
                seconds[f"up_{key}"].append(timer.seconds["update_actor"])
            pair.reverse()
        traced.close()
        medians = {key: median(values[1:]) for key, values in seconds.items()}
        run = open_run(files.path)
        size = tokens = 0
        for step in run.steps("influence_trace"):
            size += (files.path / "influence_trace" / "steps" / f"step_{step:06d}.npz").stat().st_size
            tokens += int(run.step("influence_trace", step)["length"].sum())
    ratios = {
        "overhead_step": (medians["gen"] + medians["with"]) / (medians["gen"] + medians["without"]),
        "overhead_update": medians["up_with"] / medians["up_without"],
    }
    detail = {key: round(value, 4) for key, value in medians.items()}
    return ratios, detail | {
        "tokens": tokens,
        "bytes_per_token": round(size / max(tokens, 1), 2),
        "rounds": rounds,
    }


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    ratios: dict[str, float] = {}
    detail: dict[str, Any] = {}
    for label, factor in (("tiny_exact", 0), ("tiny_factor4", 4)):
        found, detail[label] = measure(demo_overrides(factor), 3 if args.quick else 8)
        ratios |= {f"{key}_{label}": value for key, value in found.items()}
    torch.set_num_threads(args.threads or 2)
    with tempfile.TemporaryDirectory() as folder:
        found, detail["smollm2"] = measure(
            smollm2_overrides(Path(folder), args.quick), 2 if args.quick else 5
        )
    ratios |= {f"{key}_smollm2": value for key, value in found.items()}
    ratios["bytes_per_token"] = detail["smollm2"]["bytes_per_token"]
    emit("trace_overhead", ratios, detail)


if __name__ == "__main__":
    main()
