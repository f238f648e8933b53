"""From words on the command line to the cells of a grid, every one of them checked before anything runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass

from gradtrace.attribution import AttributionError
from gradtrace.config import Config, InfluenceTraceConfig
from gradtrace.config.keys import closest
from gradtrace.config_loader import load_config
from gradtrace.errors import GradtraceError

SWEEP = "sweep.influence."
NOT_SWEPT = ("enable", "write_every", "fsync", "on_error", "profile_timing")
"""Knobs of the trace that change no score, time or memory of a pass."""

ALWAYS = [
    f"trainer.influence_trace.{setting}"
    for setting in ("enable=true", "write_every=1", "on_error=raise", "loss_term_prompts=0")
]


@dataclass(frozen=True)
class Cell:
    name: str
    """The cell as knob=value,knob=value, which is also the name of its file."""
    settings: dict[str, str]
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
    return Cell(name, settings, config)


def cell_name(settings: dict[str, str]) -> str:
    """knob=value,knob=value, with what a file's name cannot hold replaced."""
    joined = ",".join(f"{knob}={value}" for knob, value in settings.items())
    return re.sub(r"[^\w=,.+\-\[\]]", "_", joined)
