"""Results on disk, phase by phase: an interrupted command goes on where it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.segments import Segment
from gradtrace.trace.files import DamagedError, atomic_write, make_folder, remove_leftovers, seal, unseal

Numbers = TypeVar("Numbers")


class ResultStore:
    """A folder that belongs to one piece of work: one set of settings, one checkpoint."""

    def __init__(self, folder: Path, what: str, identity: dict[str, Any]) -> None:
        """`what`: the kind of work, whose `identity` stands in WHAT.json."""
        self.folder = folder
        make_folder(folder)
        remove_leftovers(folder)
        if not (folder / f"{what}.json").exists():
            atomic_write(folder / f"{what}.json", seal(identity, indent=1))
        elif not belongs_to(folder, what, identity):
            raise GradtraceError(
                f"{folder} holds a {what} with other settings or of another checkpoint; give another --output, or "
                "delete it"
            )

    def get(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a phase: from its file, or computed now and kept."""
        path = self._path(name)
        if not self.has(name):
            atomic_write(path, save({key: value.contiguous() for key, value in compute().items()}))
        return load_tensors(path)[0]

    def get_numbers(self, name: str, kind: type[Numbers], compute: Callable[[], Numbers]) -> Numbers:
        """Likewise a dataclass whose fields are tensors and numbers."""

        def columns() -> dict[str, Tensor]:
            values = vars(compute())
            return {key: torch.from_numpy(np.asarray(value)) for key, value in values.items()}

        self.get(name, columns)
        return self.numbers(name, kind)

    def numbers(self, name: str, kind: type[Numbers]) -> Numbers:
        found = load_tensors(self._path(name))[0]
        return kind(**{key: value if value.dim() else value.item() for key, value in found.items()})

    def get_batch(self, name: str, compute: Callable[[], tuple[RolloutBatch, dict[str, Any]]]) -> RolloutBatch:
        """A batch, with a note on how it was sampled."""
        path = self._path(name)
        if not path.exists():
            save_batch(*compute(), path)
        return load_batch(path)[0]

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def belongs_to(folder: Path, what: str, identity: dict[str, Any]) -> bool:
    """`folder` was begun by the same work."""
    try:
        found = unseal((folder / f"{what}.json").read_bytes())
    except (OSError, DamagedError):
        return False
    return found == json.loads(json.dumps(identity))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and notes of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise GradtraceError(f"{path} cannot be read: {error}") from error


def save_batch(batch: RolloutBatch, sampling: dict[str, Any], path: Path) -> None:
    """`sampling`: the parameters it was drawn with (temperature, top_p, top_k)."""
    own = batch.segments
    segments = None if own is None else [[dataclasses.astuple(part) for part in parts] for parts in own]
    notes = {
        "items": batch.items,
        "texts": batch.texts,
        "segments": segments,
        "reward_parts": batch.reward_parts,
        "sampling": sampling,
    }
    metadata = {name: json.dumps(value) for name, value in notes.items()}
    atomic_write(path, save(batch.to_tensors(), metadata))


def load_batch(path: Path) -> tuple[RolloutBatch, dict[str, Any]]:
    """A batch that `save_batch` wrote, and how it was sampled."""
    tensors, notes = load_tensors(path)
    try:
        about = {name: json.loads(note) for name, note in notes.items()}
        sampling = about.pop("sampling")
        if about["segments"] is not None:
            about["segments"] = [[Segment(*part) for part in own] for own in about["segments"]]
        return RolloutBatch.from_tensors(tensors, **about), sampling
    except (KeyError, TypeError, ValueError) as error:
        raise GradtraceError(f"{path} is not a batch that we saved: {error}") from error
