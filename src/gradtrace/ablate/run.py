"""Run the cells of a grid that are not done yet."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gradtrace import __version__
from gradtrace.ablate.cell import measure, score_cell
from gradtrace.ablate.grid import Grid
from gradtrace.ablate.rollout import (
    describe_rollout,
    dump_rollout,
    make_rollout,
    parse_rollout,
    weights_digest,
)
from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.launch.checkpoints import opened
from gradtrace.terminal import progress_bar
from gradtrace.trace.atomic import atomic_write, make_folder
from gradtrace.training.checkpoint import checkpoint_of
from gradtrace.training.parts import Parts, build_parts

SHARED, ROLLOUT, CELLS = "shared.json", "rollout.npz", "cells"


def ablate(grid: Grid, out: Path, checkpoint: Path | None = None, repeat: int = 3) -> None:
    """Score the shared rollout with every cell. What is in `out` already is not done again."""
    checkpoint = None if checkpoint is None else checkpoint_of(opened(checkpoint))
    make_folder(out / CELLS)
    with progress_bar(Console(), "weights and rollout") as progress:
        parts = build_parts(grid.base, checkpoint)
        batch = _shared_rollout(grid, out, parts, checkpoint, repeat)
        for done, cell in enumerate(grid.cells):
            progress(done, len(grid.cells), cell.name)
            file = out / CELLS / f"{cell.name}.npz"
            failed = file.with_suffix(".failed")
            if not file.exists():
                try:
                    atomic_write(file, score_cell(parts, batch, cell.config, repeat))
                    failed.unlink(missing_ok=True)
                except (AttributionError, GradtraceError, torch.OutOfMemoryError) as error:
                    atomic_write(failed, str(error).encode())


def _shared_rollout(grid: Grid, out: Path, parts: Parts, checkpoint: Path | None, repeat: int) -> RolloutBatch:
    """The rollout that folder `out` holds, or a new one."""
    digest = weights_digest(parts)
    path = out / SHARED
    if path.exists():
        shared = json.loads(path.read_text())
        if shared["overrides"] != grid.overrides or shared["weights_sha256"] != digest:
            raise GradtraceError(
                f"{out} holds the ablation of another rollout ({' '.join(shared['overrides']) or 'demo'}, "
                f"checkpoint {shared['checkpoint']}). Choose another --out, or remove that folder."
            )
        data = (out / ROLLOUT).read_bytes()
        if hashlib.sha256(data).hexdigest() != shared["rollout"]["sha256"]:
            raise GradtraceError(f"{out / ROLLOUT} is damaged: remove the folder and start again.")
        batch, _ = parse_rollout(data)
    else:
        data = dump_rollout(*make_rollout(parts))
        batch, wrong = parse_rollout(data)  # as a later run of the command will have it
        baseline, _ = measure(parts, batch, grid.base, repeat, traced=False)
        shared = {
            "recipe": grid.base.recipe,
            "overrides": grid.overrides,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "weights_sha256": digest,
            "rollout": describe_rollout(batch, wrong, data),
            "baseline": baseline,
            "axes": {},
            "machine": machine(parts.policy.device),
            "versions": versions(),
        }
        atomic_write(out / ROLLOUT, data)
    shared["axes"] = merged_axes(shared["axes"], grid.axes)
    atomic_write(path, json.dumps(shared, indent=2).encode())
    return batch


def merged_axes(known: dict[str, list[str]], new: dict[str, list[str]]) -> dict[str, list[str]]:
    """A folder may grow: the same knobs with more values. Other knobs are another table."""
    if known and list(known) != list(new):
        raise GradtraceError(
            f"this folder varies {', '.join(known)}; sweep the same knobs in the same order, or choose another --out."
        )
    return {knob: list(dict.fromkeys([*known.get(knob, []), *values])) for knob, values in new.items()}


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    packages: dict[str, Any] = {"python": platform.python_version(), "gradtrace": __version__}
    for package in ("torch", "transformers"):
        packages[package] = importlib.metadata.version(package)
    return packages
