"""What a model reaches on a device: the sampler, the update, and what each tier of the trace adds to it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gradtrace.attribution import InfluenceTracer
from gradtrace.config_loader import load_config
from gradtrace.instruments.observer import StepObserver
from gradtrace.metrics import Timer
from gradtrace.peak_memory import peak_bytes
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.instruments import build_observer
from gradtrace.training.loop import Trainer
from gradtrace.training.parts import build_parts
from gradtrace.training.terminal import SilentDisplay

TIERS = {
    "tail": ["trainer.influence_trace.credit=tail"],
    "default": [],
    "default, blame, entropies": ["trainer.entropy_trace.enable=true", "trainer.blame.enable=true"],
}
PROMPT = "A baker makes {} loaves a day and sells each for {} dollars. How much does she earn in a week?"
# Any reward will do that tells responses of a group apart.
REWARD = "def reward(response, item):\n    return float(len(response) % 2)\n"
ROUNDS = 3


@dataclass(frozen=True)
class Speed:
    """One training step on random rewards, each number the median of a few rounds."""

    parameters: int
    generated_per_second: float
    trained_per_second: float
    """Response tokens of an update without traces."""
    overhead: dict[str, float]
    """Tier → update with it over update without."""
    peak: dict[str, int | None]
    """Tier → bytes of an update above those before it; `none` is without traces."""
    estimate: int
    """Bytes that the default trace was said to need."""


def overrides(folder: Path, model: str, device: str, groups: int, tokens: int) -> list[str]:
    rows = [{"prompt": PROMPT.format(20 + i, 2 + i % 5), "answer": "0"} for i in range(4 * groups)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return [
        *("recipe=gsm8k", f"model.path={model}", f"model.device={device}", f"trainer.runs_dir={folder}"),
        *(f"data.train=[{folder / 'prompts.jsonl'}]", "data.prompt_key=prompt"),
        *(f"reward.path={folder / 'reward.py'}:reward", "rollout.n=4", f"rollout.max_new_tokens={tokens}"),
        *(f"data.train_batch_size={groups}", "actor.mini_batch_size=0"),
        *("trainer.influence_trace.enable=true", "trainer.influence_trace.pairwise_max_mb=0"),
        *("trainer.entropy_trace.enable=false", "trainer.blame.enable=false"),
    ]


def measure(model: str, device: str, groups: int, tokens: int, tell: Callable[[str], None]) -> Speed:
    """Steps without a trace and with each tier on the same rollouts, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = overrides(folder, model, device, groups, tokens)
        tell(f"loading {model}")
        parts = build_parts(load_config(words))
        trainer = Trainer(parts, RunFiles(folder / "plain"), StepObserver(), SilentDisplay())
        observers: dict[str, StepObserver] = {"none": trainer.observer}
        for tier, knobs in TIERS.items():
            own = dataclasses.replace(parts, config=load_config([*words, *knobs]))
            observers[tier] = build_observer(own, RunFiles(folder / tier), lambda text: None)
        seconds: dict[str, list[float]] = {tier: [] for tier in observers}
        peak: dict[str, int | None] = {}
        generated: list[float] = []
        written = 0
        for round_ in range(ROUNDS + 1):  # the first one warms up, and its peaks are measured
            tell(f"round {round_ + 1} of {ROUNDS + 1}: sampling {4 * groups} responses")
            started = time.perf_counter()
            batch, _ = trainer.experience.collect(parts.generators["rollout"], Timer())
            generated.append(int(batch.response_lengths.sum()) / (time.perf_counter() - started))
            written = int(batch.response_lengths.sum())
            for tier, observer in observers.items():
                tell(f"round {round_ + 1} of {ROUNDS + 1}: update, trace: {tier}")
                trainer.observer, timer = observer, Timer()

                def work(timer: Timer = timer, number: int = round_ + 1, batch: object = batch) -> None:
                    trainer.train_step(batch, number, timer)  # type: ignore[arg-type]

                if round_ == 0:
                    peak[tier] = peak_bytes(work, parts.policy.device)
                else:
                    work()
                    seconds[tier].append(timer.seconds["update_actor"])
        for observer in observers.values():
            observer.close()
        with InfluenceTracer(parts.policy.model, load_config(words).trainer.influence_trace) as tracer:
            estimate = tracer.memory_estimate(4 * groups, written).total
    return Speed(
        sum(p.numel() for p in parts.policy.model.parameters()),
        median(generated[1:]),
        written / median(seconds["none"]),
        {tier: median(a / b for a, b in zip(seconds[tier], seconds["none"], strict=True)) for tier in TIERS},
        peak,
        estimate,
    )


def gigabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.2f} GiB"
