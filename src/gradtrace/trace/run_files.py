"""The files of a run that are not traces: config.yaml, metrics.jsonl, summary.json, token_bytes.npz."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrace.trace.atomic import JsonLines, atomic_write, make_folder, remove_leftovers, seal
from gradtrace.trace.token_text import TokenBytes


class RunFiles:
    """Writes the files of a run that are not traces; `open_run` reads them."""

    def __init__(self, run_dir: str | os.PathLike[str], fsync: bool = False) -> None:
        self.path = Path(run_dir)
        self.fsync = fsync
        make_folder(self.path, fsync)
        remove_leftovers(self.path)
        self._metrics = JsonLines(self.path / "metrics.jsonl", fsync)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl. Numbers of NumPy and torch are fine."""
        self._metrics.append({"step": step, **metrics})

    def write_config(self, yaml: str) -> None:
        atomic_write(self.path / "config.yaml", yaml.encode(), self.fsync)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        atomic_write(self.path / "summary.json", seal(dict(summary), indent=2), self.fsync)

    def write_token_bytes(self, token_bytes: TokenBytes) -> None:
        atomic_write(self.path / "token_bytes.npz", token_bytes.dump(), self.fsync)

    def truncate_after(self, step: int) -> None:
        """Drop the metrics of every step after `step`: a resumed run writes them again."""
        self._metrics.keep(lambda record: record.get("step", 0) <= step)
