"""The self-check of a device: scores, speed and memory as a table to paste into an issue, and in words what is off."""

from __future__ import annotations

import dataclasses
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradtrace import __version__
from gradtrace.commands.doctor.equality import TOLERANCE, agreements, shards_agree
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.metrics import Timer
from gradtrace.terminal import peak_bytes
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import build_components
from gradtrace.training.host import open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

SIZES = {"cpu": (4, 16), "cuda": (16, 128)}
"""Groups of four responses, and their longest length, of the step that is timed."""
SHARDS = 0.999
OVERHEAD = {"default": 1.5}
"""Updates that cost more than this with a trace are worth a word: the default score costs about 1.4 on a CPU."""


@dataclass
class DeviceReport:
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """(what, found, expected)."""
    remarks: list[str] = field(default_factory=list)
    """What is off, in words."""
    failed: bool = False

    def add(self, what: str, found: str, expected: str = "") -> None:
        self.rows.append((what, found, expected))


def check_device(name: str, model: str | None, tell: Any) -> DeviceReport:
    """Scores on device `name` against the CPU's, sharded ones against one process, and of `model` speed and memory."""
    if name == "cuda" and not torch.cuda.is_available():
        raise GradtraceError(
            "--device cuda, but torch sees no GPU: "
            + (
                "this torch is a CPU build; install one for your driver (https://pytorch.org/get-started/locally)."
                if torch.version.cuda is None
                else f"it is built for CUDA {torch.version.cuda}; check the driver with nvidia-smi."
            )
        )
    device, report = torch.device(name), DeviceReport()
    report.add("device", _device_name(device), f"gradtrace {__version__}, torch {torch.__version__}")
    tell("scores of a small model, against the CPU in float64")
    _add_equality(report, device)
    _add_shards(report, device, tell)
    if model is not None:
        groups, tokens = SIZES[name]
        _add_speed(report, measure(model, name, groups, tokens, tell), groups, tokens)
    return report


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{torch.cuda.device_count()} × {properties.name}, {gigabytes(properties.total_memory)}"
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def _add_equality(report: DeviceReport, device: torch.device) -> None:
    for found in agreements(device):
        expected = f"≥ {TOLERANCE[found.precision]}"
        said = f"rank correlation {found.correlation:.6f}, error {found.error:.1e}"
        report.add(f"{found.score}, {found.precision}", said, expected)
        if not found.is_good:
            report.failed = True
            report.remarks.append(
                f"scores “{found.score}” in {found.precision} on {device.type} are not those of the CPU "
                f"(rank correlation {found.correlation:.3f}, expected {expected}): do not trust traces made here, and "
                "report it with this table"
            )


def _add_shards(report: DeviceReport, device: torch.device, tell: Any) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        report.add("FSDP2 over two processes", "not tried: there is one GPU")
        return
    tell("scores of a model that FSDP2 shards over two processes")
    correlation = shards_agree(device.type)
    report.add("FSDP2 over two processes", f"rank correlation {correlation:.6f}", f"≥ {SHARDS}")
    if correlation < SHARDS:
        report.failed = True
        report.remarks.append(
            f"scores of sharded weights are not those of one process (rank correlation {correlation:.3f}): runs on "
            "verl would have wrong traces; report it with this table"
        )


def _add_speed(report: DeviceReport, speed: Speed, groups: int, tokens: int) -> None:
    step = f"a step of {4 * groups} responses of up to {tokens} tokens"
    report.add("model", f"{speed.parameters / 1e6:,.1f} M parameters", step)
    report.add("sampler", f"{median(speed.generated_per_second):,.0f} tokens/s")
    plain = speed.seconds["none"]
    report.add("update without traces", f"{speed.written / median(plain):,.0f} response tokens/s")
    report.add("peak memory of an update", gigabytes(speed.peak["none"]))
    for tier in TIERS:
        limit = OVERHEAD.get(tier)
        ratio = median(own / other for own, other in zip(speed.seconds[tier], plain, strict=True))
        found = f"{ratio:.2f} × the time, peak {gigabytes(speed.peak[tier])}"
        report.add(f"update with trace: {tier}", found, f"≤ {limit} ×" if limit else "")
        if limit and ratio > limit:
            report.remarks.append(
                f"the trace ({tier}) makes an update {ratio:.2f} times as long, more than the {limit} we expect of "
                "a model whose time goes into matrix products; small models and busy machines show more"
            )
    report.add("memory the trace was said to need", gigabytes(speed.estimate), "upper bound for its share")
    traced, untraced = speed.peak["default"], speed.peak["none"]
    if traced is not None and untraced is not None and traced - untraced > 2 * speed.estimate + 2**28:
        report.remarks.append(
            f"the trace took {gigabytes(traced - untraced)} more than the update alone, "
            f"and was said to need {gigabytes(speed.estimate)}: please report it with this table"
        )


TIERS = {
    "default": [],
    "default, blame, entropies": ["trainer.entropy_trace.enable=true", "trainer.blame.enable=true"],
}
PROMPT = "A baker makes {} loaves a day and sells each for {} dollars. How much does she earn in a week?"
# Any reward will do that tells responses of a group apart.
REWARD = "def reward(response, item):\n    return float(len(response) % 2)\n"
ROUNDS = 3


@dataclass
class Speed:
    """Training steps on random rewards, in a few rounds."""

    parameters: int
    generated_per_second: list[float] = field(default_factory=list)
    written: int = 0
    """Response tokens of the last rollout."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Tier → of its updates; `none` is without traces."""
    peak: dict[str, int | None] = field(default_factory=dict)
    """Tier → bytes of an update above those before it."""
    estimate: int = 0
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
        components = build_components(load_config([*words, "trainer.influence_trace.enable=false"]))
        trainer = Trainer(components, RunFiles(folder / "plain"), SilentDisplay())
        of_tier = {"none": trainer.steps}
        for tier, knobs in TIERS.items():
            own = dataclasses.replace(components, config=load_config([*words, *knobs]))
            of_tier[tier] = open_instruments(own, RunFiles(folder / tier), lambda text: None)
        speed = Speed(sum(p.numel() for p in components.policy.model.parameters()))
        for round_ in range(ROUNDS + 1):  # the first one warms up, and its peaks are measured
            tell(f"round {round_ + 1} of {ROUNDS + 1}: sampling {4 * groups} responses")
            timer = Timer()
            batch, _ = trainer.experience.collect(components.generators["rollout"], timer)
            speed.written = int(batch.response_lengths.sum())
            if round_:
                speed.generated_per_second.append(speed.written / timer.total)
            for tier, steps in of_tier.items():
                tell(f"round {round_ + 1} of {ROUNDS + 1}: update, trace: {tier}")
                trainer.steps, timer = steps, Timer()
                work = partial(trainer.train_step, batch, round_ + 1, timer)
                if round_ == 0:
                    speed.peak[tier] = peak_bytes(work, components.policy.device)
                else:
                    work()
                    speed.seconds.setdefault(tier, []).append(timer.seconds["update_actor"])
        for steps in of_tier.values():
            steps.close()
        trained = [p for p in components.policy.model.parameters() if p.requires_grad]
        speed.estimate = sum(p.numel() * p.element_size() for p in trained)  # a copy, while weights are moved
    return speed


def gigabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.2f} GiB"
