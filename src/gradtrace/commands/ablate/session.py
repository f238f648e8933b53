"""From words on the command line to the cells of a grid, every one of them checked before anything runs; then those
that are not done yet, on one rollout that is made once and stored."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import itertools
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from gradtrace import __version__
from gradtrace.algorithms import accepted, advantage, constant_groups
from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.commands.ablate.cell import TrainingPass, measure, score_cell
from gradtrace.config.keys import closest
from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence import InfluenceTraceConfig
from gradtrace.metrics import Timer
from gradtrace.runs import open_run
from gradtrace.terminal import progress_bar
from gradtrace.trace.files import atomic_write, make_folder
from gradtrace.training.components import Components, build_components
from gradtrace.training.experience import Experience
from gradtrace.training.state import completed

SWEEP = "sweep.influence."
NOT_SWEPT = ("enable", "write_every", "fsync", "on_error", "profile_timing", "measure")
"""Knobs of the trace that change no score, time or memory of a pass."""

ALWAYS = [f"trainer.influence_trace.{setting}" for setting in ("enable=true", "write_every=1", "on_error=raise")]


@dataclass(frozen=True)
class Cell:
    name: str
    """The cell as knob=value,knob=value, which is also the name of its file."""
    config: Config


@dataclass(frozen=True)
class Grid:
    base: Config
    overrides: list[str]
    """Words that hold for all cells."""
    axes: dict[str, list[str]]
    """Knob → its values, in the order given."""
    cells: list[Cell]


def parse_grid(words: list[str]) -> Grid:
    sweeps = [word for word in words if word.startswith("sweep.")]
    overrides = [word for word in words if not word.startswith("sweep.")]
    axes: dict[str, list[str]] = {}
    for word in sweeps:
        key, equals, values = word.partition("=")
        knob = key.removeprefix(SWEEP)
        _check_knob(word, key, knob)
        if not equals or not values:
            raise GradtraceError(f"'{word}': give the values to try, e.g. {key}=a,b,c.")
        axes[knob] = _split(values)
    if not axes:
        raise GradtraceError(
            "Nothing to vary: add e.g. sweep.influence.hessian_mode=inverse,identity. "
            "`gradtrace ablate --help` has examples."
        )
    base = load_config(overrides)
    if base.engine != "embedded":
        raise GradtraceError(
            f"engine={base.engine}: an ablation scores one rollout in this process. Leave engine out; the settings "
            "that it finds hold on verl as well."
        )
    return Grid(
        base,
        overrides,
        axes,
        [_cell(overrides, axes, chosen) for chosen in itertools.product(*axes.values())],
    )


def _check_knob(word: str, key: str, knob: str) -> None:
    knobs = [f.name for f in dataclasses.fields(InfluenceTraceConfig) if f.name not in NOT_SWEPT]
    if not key.startswith(SWEEP) or knob not in knobs:
        near = closest(knob, knobs)
        raise GradtraceError(f"'{word}': no such sweep. Did you mean {SWEEP}{near}? Knobs: {', '.join(knobs)}.")


def _split(values: str) -> list[str]:
    """Split at commas outside of brackets, so that lists can be values: [mlp],[attn,mlp]."""
    found = [value.strip() for value in re.split(r",(?![^\[]*\])", values)]
    if "" in found or len(set(found)) < len(found):
        raise GradtraceError(f"'{values}': values are separated by commas, each once.")
    return found


def _cell(overrides: list[str], axes: dict[str, list[str]], chosen: tuple[str, ...]) -> Cell:
    settings = dict(zip(axes, chosen, strict=True))
    name = cell_name(settings)
    words = [f"trainer.influence_trace.{knob}={value}" for knob, value in settings.items()]
    try:
        config = load_config([*overrides, *ALWAYS, *words])
        config.trainer.influence_trace.check()
    except (GradtraceError, AttributionError) as error:
        raise GradtraceError(f"cell {name}: {error}") from error
    return Cell(name, config)


def cell_name(settings: dict[str, str]) -> str:
    """knob=value,knob=value, with what a file's name cannot hold replaced."""
    joined = ",".join(f"{knob}={value}" for knob, value in settings.items())
    return re.sub(r"[^\w=,.+\-\[\]]", "_", joined)


# ---------------------------------------------------------------- running them

SHARED, ROLLOUT, CELLS = "shared.json", "rollout.npz", "cells"


def ablate(grid: Grid, out: Path, checkpoint: Path | None = None, repeat: int = 3) -> None:
    """Score the shared rollout with every cell. What is in `out` already is not done again."""
    checkpoint = None if checkpoint is None else open_run(checkpoint).checkpoint(resumable=True).folder
    make_folder(out / CELLS)
    with progress_bar(Console(), "weights and rollout") as progress:
        components = build_components(grid.base, checkpoint)
        batch = _shared_rollout(grid, out, components, checkpoint, repeat)
        for done, cell in enumerate(grid.cells):
            progress(done, len(grid.cells), cell.name)
            file = out / CELLS / f"{cell.name}.npz"
            failed = file.with_suffix(".failed")
            if not file.exists():
                try:
                    atomic_write(file, score_cell(components, batch, cell.config, repeat))
                    failed.unlink(missing_ok=True)
                except (AttributionError, GradtraceError, torch.OutOfMemoryError) as error:
                    atomic_write(failed, str(error).encode())


def _shared_rollout(
    grid: Grid, out: Path, components: Components, checkpoint: Path | None, repeat: int
) -> RolloutBatch:
    """The rollout that folder `out` holds, or a new one."""
    digest = weights_digest(components)
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
        data = dump_rollout(*make_rollout(components))
        batch, wrong = parse_rollout(data)  # as a later run of the command will have it
        baseline = measure(TrainingPass(components, batch, grid.base), repeat, traced=False)
        shared = {
            "recipe": grid.base.recipe,
            "overrides": grid.overrides,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "weights_sha256": digest,
            "rollout": describe_rollout(batch, wrong, data),
            "baseline": baseline,
            "axes": {},
            "machine": machine(components.policy.device),
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


def make_rollout(components: Components) -> tuple[RolloutBatch, Tensor]:
    """A batch as a training step would learn from it, and long[R]: the first wrong token, −1 = none or unknown."""
    config = components.config
    estimator = advantage(config.algorithm.advantage, **config.algorithm.advantage_options)
    if "values" in estimator.needs:
        raise GradtraceError(
            f"algorithm.advantage={config.algorithm.advantage} needs a critic: ablate with grpo, rloo or dr_grpo."
        )
    experience = dataclasses.replace(Experience.of(components, config.data.train_batch_size), flip_probability=0.0)
    batch, _ = experience.collect(components.generators["rollout"], Timer())
    whole = completed(components, components.policy, batch, config.actor.token_budget)
    batch = batch.replace(advantages=whole.advantages, ref_log_probs=whole.ref_log_probs)  # passes fill in the others
    if bool(constant_groups(batch.need("rewards"), batch.group).all()):
        raise GradtraceError(
            f"No prompt of the rollout has responses with different rewards (all {len(batch.prompts)} groups are "
            "constant): nothing to score. Use another checkpoint, or more prompts (data.train_batch_size)."
        )
    return batch, first_wrong(components, batch)


def first_wrong(components: Components, batch: RolloutBatch) -> Tensor:
    found = []
    for response, group in zip(batch.response_ids, batch.group.tolist(), strict=True):
        index = components.task.truth(batch.items[group], response)[1] if batch.items else None
        found.append(-1 if index is None else index)
    return torch.tensor(found)


def dump_rollout(batch: RolloutBatch, wrong: Tensor) -> bytes:
    columns: dict[str, Any] = {name: column.numpy() for name, column in batch.to_tensors().items()}
    buffer = io.BytesIO()
    np.savez(buffer, first_wrong=wrong.numpy(), **columns)
    return buffer.getvalue()


def parse_rollout(data: bytes) -> tuple[RolloutBatch, Tensor]:
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        tensors = {name: torch.from_numpy(columns[name]) for name in columns}
    return RolloutBatch.from_tensors(tensors), tensors["first_wrong"]


def describe_rollout(batch: RolloutBatch, wrong: Tensor, data: bytes) -> dict[str, Any]:
    constant = constant_groups(batch.need("rewards"), batch.group)
    good = accepted(batch.need("rewards"), batch.group)
    return {
        "prompts": len(batch.prompts),
        "responses": len(batch),
        "tokens": int(batch.response_lengths.sum()),
        "groups_mixed": len(batch.group[~constant].unique()),
        "accepted": int(good.sum()),
        "rejected": int((~good & ~constant).sum()),
        "first_wrong_known": int(((wrong >= 0) & ~good & ~constant).sum()),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def weights_digest(components: Components) -> str:
    """A digest of every parameter's name and bits: two runs with this in common have the same θ."""
    digest = hashlib.sha256()
    for name, value in sorted(components.policy.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
