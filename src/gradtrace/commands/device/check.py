"""The self-check of a device: a table to paste into an issue, and in words what is off."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from gradtrace import __version__
from gradtrace.commands.device.equality import TOLERANCE, agreements
from gradtrace.commands.device.shards import shards_agree
from gradtrace.commands.device.speed import Speed, gigabytes, measure
from gradtrace.errors import GradtraceError

SIZES = {"cpu": (4, 16), "cuda": (16, 128)}
"""Groups of four responses, and their longest length, of the step that is timed."""
SHARDS = 0.999
OVERHEAD = {"tail": 1.1, "default": 1.5}
"""Updates that cost more than this with a trace are worth a word: on SmolLM2-135M on a CPU they cost 1.0 and 1.2."""


@dataclass
class Report:
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """(what, found, expected)."""
    remarks: list[str] = field(default_factory=list)
    """What is off, in words."""
    failed: bool = False

    def add(self, what: str, found: str, expected: str = "") -> None:
        self.rows.append((what, found, expected))


def check_device(name: str, model: str | None, tell: Any) -> Report:
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
    device, report = torch.device(name), Report()
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


def _add_equality(report: Report, device: torch.device) -> None:
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


def _add_shards(report: Report, device: torch.device, tell: Any) -> None:
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


def _add_speed(report: Report, speed: Speed, groups: int, tokens: int) -> None:
    report.add(
        "model",
        f"{speed.parameters / 1e6:,.1f} M parameters",
        f"a step of {4 * groups} responses of up to {tokens} tokens",
    )
    report.add("sampler", f"{speed.generated_per_second:,.0f} tokens/s")
    report.add("update without traces", f"{speed.trained_per_second:,.0f} response tokens/s")
    report.add("peak memory of an update", gigabytes(speed.peak["none"]))
    for tier, ratio in speed.overhead.items():
        limit = OVERHEAD.get(tier)
        report.add(
            f"update with trace: {tier}",
            f"{ratio:.2f} × the time, peak {gigabytes(speed.peak[tier])}",
            f"≤ {limit} ×" if limit else "",
        )
        if limit and ratio > limit:
            report.remarks.append(
                f"the trace ({tier}) makes an update {ratio:.2f} times as long, more than the {limit} we expect of "
                "a model whose time goes into matrix products; small models and busy machines show more"
            )
    report.add("memory the trace was said to need", gigabytes(speed.estimate), "upper bound for its share")
    peaks = speed.peak["default"], speed.peak["none"]
    if None not in peaks and peaks[0] - peaks[1] > 2 * speed.estimate + 2**28:  # type: ignore[operator]
        report.remarks.append(
            f"the trace took {gigabytes(peaks[0] - peaks[1])} more than the update alone, "  # type: ignore[operator]
            f"and was said to need {gigabytes(speed.estimate)}: please report it with this table"
        )
