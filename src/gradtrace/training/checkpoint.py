"""Checkpoints on disk: complete or absent.

    checkpoints/
      latest                  the name of the newest complete checkpoint; moves last
      step_000010/
        policy/               a plain transformers (or peft) folder
        optimizer.safetensors, rng.safetensors, state.json …
        complete.json         every file, its size and its SHA-256; written last

A checkpoint is filled in a temporary folder and renamed into place; only then `latest` moves, and only then
older ones go. A process killed at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from gradtrace.errors import GradtraceError
from gradtrace.terminal import command
from gradtrace.trace.files import (
    DamagedError,
    atomic_directory,
    atomic_write,
    remove_leftovers,
    seal,
    unseal,
)

LATEST = "latest"
MARKER = "complete.json"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
FOREIGN = "optimizer.pt"
"""Optimizer state in a checkpoint of transformers' Trainer, and so of TRL."""


MadeBy = Literal["embedded", "verl", "final", "plain"]


@dataclass(frozen=True)
class Checkpoint:
    """Weights that a run has, or a model without a run around it."""

    folder: Path
    """For a model on the hub: its name."""
    name: str
    step: int | None
    """Training steps behind these weights; None: not known."""
    made_by: MadeBy
    """`embedded`: RUN/checkpoints/step_N, with optimizer state. `verl`: its shards, converted when they are opened.
    `final`: RUN/policy. `plain`: a transformers folder or a hub name."""

    @staticmethod
    def embedded(folder: Path) -> Checkpoint:
        number = folder.name.removeprefix("step_")
        return Checkpoint(folder, folder.name, int(number) if number.isdigit() else None, "embedded")

    @property
    def weights(self) -> Path:
        """The folder of the weights, which transformers or peft can load."""
        return self.folder / "policy" if self.made_by == "embedded" else self.folder

    @property
    def whole(self) -> Path:
        """The complete checkpoint that these weights are of, or the folder itself."""
        return self.folder.parent if (self.folder.parent / MARKER).is_file() else self.folder

    @property
    def seal(self) -> str:
        """A digest that changes with the weights; of a model on the hub, that of its name."""
        folder = self.whole
        if (folder / MARKER).is_file():
            return digest(folder / MARKER)
        about = str(folder)
        if folder.is_dir():
            about = repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir())])
        return hashlib.sha256(about.encode()).hexdigest()

    @property
    def optimizer_file(self) -> Path | None:
        """The state of the optimizer that goes on from here, if it is stored."""
        files = (self.whole / OPTIMIZER, self.folder / FOREIGN)
        return next((file for file in files if file.is_file()), None)


class Checkpoints:
    def __init__(self, run_dir: Path, keep_last: int = 0) -> None:
        """`keep_last`: how many stay; 0 keeps all."""
        self.folder = run_dir / "checkpoints"
        self.keep_last = keep_last

    def save(self, step: int, fill: Callable[[Path], None]) -> Path:
        """`fill(folder)` writes the files. Returns the checkpoint's folder; an existing one of this step stays."""
        target = self.folder / f"step_{step:06d}"
        if target.is_dir():
            return target
        try:
            with atomic_directory(target, fsync=True) as unfinished:
                fill(unfinished)
                write_marker(unfinished)
            atomic_write(self.folder / LATEST, f"{target.name}\n".encode(), fsync=True)
        except (OSError, SafetensorError) as error:
            raise self._cannot_save(target, error) from error
        for old in self._all()[: -self.keep_last] if self.keep_last else ():
            shutil.rmtree(old, ignore_errors=True)
        return target

    def latest(self) -> Path | None:
        """The newest complete checkpoint, checked; None if there is none yet."""
        pointer = self.folder / LATEST
        if not pointer.is_file():
            return None
        folder = self.folder / Path(pointer.read_text(errors="replace").strip()).name
        try:
            check_complete(folder)
        except GradtraceError as error:
            raise GradtraceError(f"{error} {self._instead_of(folder)}") from None
        return folder

    def go_back_to(self, name: str) -> None:
        """Make an earlier checkpoint the latest; those after it go when the run goes on."""
        check_complete(self.folder / name)
        atomic_write(self.folder / LATEST, f"{name}\n".encode(), fsync=True)

    def _instead_of(self, damaged: Path) -> str:
        """What to do about a damaged checkpoint."""
        for folder in reversed(self._all()):
            with contextlib.suppress(GradtraceError):
                if folder != damaged:
                    check_complete(folder)
                    return f"The last good checkpoint is {folder}: continue with: {command()} train resume={folder}"
        return "There is no other checkpoint of this run."

    def discard_unfinished(self) -> None:
        """Remove what a killed process left: temporary folders, and checkpoints that `latest` never reached."""
        if not self.folder.is_dir():
            return
        remove_leftovers(self.folder)
        pointer = self.folder / LATEST
        newest = pointer.read_text().strip() if pointer.is_file() else ""
        for folder in self._all():
            if folder.name > newest:
                shutil.rmtree(folder)

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step_*"))

    def _cannot_save(self, target: Path, error: Exception) -> GradtraceError:
        previous = None
        with contextlib.suppress(GradtraceError):
            previous = self.latest()
        kept = "There is no earlier checkpoint."
        if previous:
            kept = f"The previous checkpoint, {previous}, is untouched."
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        reason = "the disk is full" if full else str(error)
        return GradtraceError(
            f"Checkpoint {target} could not be saved: {reason}. {kept} "
            f"Make room, then continue with: {command()} train resume={self.folder.parent}"
        )


def what_exists(path: Path) -> str:
    """For an error about `path`: the checkpoints of its run, or else the runs beside it."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if found := sorted(folder.name for folder in (run / "checkpoints").glob("*") if folder.is_dir()):
        return f"{run / 'checkpoints'} has {', '.join(found)}"
    if run.is_dir():
        return f"{run} has no checkpoints"
    runs = sorted(folder.name for folder in run.parent.glob("*") if (folder / "config.yaml").is_file())
    return f"{run.parent} has {', '.join(runs[:20]) or 'no runs'}"


def write_marker(folder: Path) -> None:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MARKER).write_bytes(seal({"files": files}, indent=1))


def check_complete(folder: Path) -> None:
    """Every file that the marker lists is there, with the bytes that were written. It reads all of them."""
    try:
        listed: dict[str, Any] = unseal((folder / MARKER).read_bytes())["files"]
    except (OSError, DamagedError, KeyError) as error:
        raise GradtraceError(
            f"{folder} is not a complete checkpoint: {MARKER}: {error}. {what_exists(folder)}."
        ) from error
    for name, written in listed.items():
        path = folder / name
        size = written if isinstance(written, int) else written["bytes"]  # markers once had nothing but sizes
        if not path.is_file() or path.stat().st_size != size:
            raise GradtraceError(
                f"{folder} is damaged: {name} should have {size} bytes"
                f" and has {path.stat().st_size if path.is_file() else 'vanished'}."
            )
        if not isinstance(written, int) and digest(path) != written["sha256"]:
            raise GradtraceError(f"{folder} is damaged: {name} does not have the bytes that were written.")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
