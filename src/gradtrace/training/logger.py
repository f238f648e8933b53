"""Experiment trackers behind one small interface. metrics.jsonl is always written, by `RunFiles`."""

from __future__ import annotations

import importlib
import secrets
from pathlib import Path
from typing import Any, Protocol

from gradtrace.config.root import TrainerConfig, WandbConfig
from gradtrace.errors import GradtraceError, install
from gradtrace.trace.files import atomic_write

ID_FILE = "wandb_id.txt"


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """wandb, and trackio, whose interface is the same."""

    def __init__(self, package: str, run_dir: Path, settings: WandbConfig, config: dict[str, Any]) -> None:
        self.package = _import(package)
        options: dict[str, Any] = {"group": settings.group or None}
        if package == "wandb":
            options |= {"dir": str(run_dir), "id": tracker_id(run_dir, settings.id), "resume": "allow"}
        else:  # trackio knows a run by its name: only a run that goes on may be one that it has
            options["resume"] = "allow" if (run_dir / "metrics.jsonl").is_file() else "never"
        name = settings.name or run_dir.name
        self.package.init(project=settings.project, name=name, config=config, **options)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.package.log(metrics, step=step)

    def close(self) -> None:
        self.package.finish()


def tracker_id(run_dir: Path, wanted: str = "") -> str:
    """The id of a run at wandb: `wanted`, else the one that it has had from its start on."""
    file = run_dir / ID_FILE
    known = file.read_text().strip() if file.is_file() else ""
    found = wanted or known or secrets.token_hex(4)
    if found != known:
        atomic_write(file, f"{found}\n".encode())
    return found


class Tensorboard:
    def __init__(self, run_dir: Path) -> None:
        _import("tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def open_trackers(trainer: TrainerConfig, run_dir: Path, config: dict[str, Any]) -> list[Tracker]:
    """The trackers of trainer.logger; `config` is shown there."""
    trackers: list[Tracker] = []
    for name in trainer.logger:
        try:
            if name == "tensorboard":
                trackers.append(Tensorboard(run_dir))
            else:
                trackers.append(Wandb(name, run_dir, trainer.wandb, config))
        except GradtraceError:
            raise
        # No key, no network, a project that is not ours: each tracker has its own classes.
        except Exception as error:
            raise GradtraceError(
                f"trainer.logger names {name}, which could not start: {error} (`{name} login`, or leave it out)."
            ) from error
    return trackers


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise GradtraceError(f"trainer.logger names {package}, which is not installed: {install(package)}") from None
