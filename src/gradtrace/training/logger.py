"""Experiment trackers behind one small interface. metrics.jsonl is always written, by `RunFiles`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gradtrace.errors import GradtraceError


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """wandb, and trackio, whose interface is the same."""

    def __init__(self, package: str, run_dir: Path, config: dict[str, Any]) -> None:
        self.package = _import(package)
        options: dict[str, Any] = {"dir": str(run_dir)} if package == "wandb" else {}
        self.package.init(project="gradtrace", name=run_dir.name, config=config, **options)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.package.log(metrics, step=step)

    def close(self) -> None:
        self.package.finish()


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


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "wandb": lambda run_dir, config: Wandb("wandb", run_dir, config),
    "trackio": lambda run_dir, config: Wandb("trackio", run_dir, config),
    "tensorboard": lambda run_dir, config: Tensorboard(run_dir),
}


def open_trackers(names: list[str], run_dir: Path, config: dict[str, Any]) -> list[Tracker]:
    trackers = []
    for name in names:
        try:
            trackers.append(TRACKERS[name](run_dir, config))
        except GradtraceError:
            raise
        except (
            Exception
        ) as error:  # no key, no network, a project that is not ours: each tracker has its own classes
            raise GradtraceError(
                f"trainer.logger names {name}, which could not start: {error} (`{name} login`, or leave it out)."
            ) from error
    return trackers


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise GradtraceError(
            f"trainer.logger names {package}, which is not installed: pip install 'gradtrace[{package}]'."
        ) from None
