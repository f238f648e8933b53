"""Which runs are seeds of one another: the same configuration, apart from the seed and what cannot change a curve."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradtrace.compare.runs import LoadedRun
from gradtrace.errors import GradtraceError

IGNORED = re.compile(
    r"trainer\.(seed|name|runs_dir|logger|cpu_threads|samples_every)$|trainer\.checkpoint\.|resume$|recipe$"
)
MOST_DIFFERENCES = 4


@dataclass
class RunGroup:
    label: str
    runs: list[LoadedRun]
    differs: str = ""
    """The configuration keys that tell it from the other groups, in words."""

    @property
    def seeds(self) -> list[Any]:
        """trainer.seed of each run, None where the configuration has none."""
        return [_flat(run.config).get("trainer.seed") for run in self.runs]


def group_runs(runs: list[LoadedRun], named: list[str] | None = None) -> list[RunGroup]:
    """Groups in the order of their first run. `named`: LABEL=GLOB, matched with names and paths of runs; runs that no
    glob matches are grouped by their configuration."""
    groups: list[RunGroup] = []
    rest = list(runs)
    for entry in named or []:
        label, separator, pattern = entry.partition("=")
        if not separator or not label or not pattern:
            raise GradtraceError(f"--group {entry}: give LABEL=GLOB, such as --group 'TracIn=tracin-*'")
        members = [run for run in rest if _matches(run, pattern)]
        if not members:
            there = ", ".join(run.name for run in runs)
            raise GradtraceError(f"--group {entry}: no run (that is left) matches {pattern}; there are {there}")
        rest = [run for run in rest if run not in members]
        groups.append(RunGroup(label, members))
    groups += _by_configuration(rest)
    _describe_differences(groups)
    return groups


def _matches(run: LoadedRun, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(text, pattern) for text in (run.name, str(run.path), os.path.normpath(str(run.path)))
    )


def _by_configuration(runs: list[LoadedRun]) -> list[RunGroup]:
    found: dict[str, list[LoadedRun]] = {}
    for run in runs:
        # Without a configuration nothing says what a run is a seed of.
        key = repr(sorted(_relevant(run.config).items())) if run.config else f"no configuration {run.path}"
        found.setdefault(key, []).append(run)
    groups = [RunGroup(_common_name(members), members) for members in found.values()]
    labels = [group.label for group in groups]
    for index, group in enumerate(groups):
        if labels.count(group.label) > 1:
            group.label = f"{group.label} ({index + 1})"
    return groups


def _common_name(runs: list[LoadedRun]) -> str:
    """What the names have in common, without what looks like the beginning of a seed's number."""
    if len(runs) == 1:
        return runs[0].name
    first, last = min(run.name for run in runs), max(run.name for run in runs)
    shared = next((at for at in range(len(first)) if first[at] != last[at : at + 1]), len(first))
    return re.sub(r"[-_.]+(seed|s)?[-_.=]*\d*$", "", first[:shared]) or runs[0].name


def _describe_differences(groups: list[RunGroup]) -> None:
    configs = [_relevant(group.runs[0].config) for group in groups]
    keys = sorted({key for config in configs for key in config})
    different = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    for group, config in zip(groups, configs, strict=True):
        words = [f"{key}={_text(config.get(key))}" for key in different[:MOST_DIFFERENCES]]
        more = len(different) - MOST_DIFFERENCES
        group.differs = ", ".join(words) + (f" and {more} more" if more > 0 else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _flat(config).items() if not IGNORED.match(key)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
