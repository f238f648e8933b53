"""Where the traces of a run are: in its folder, or in another one that `trainer.trace_dir` names.

A run whose traces are elsewhere has a file that names their folder, and that folder has one that names the run. Readers
follow the first only where the second answers it: a run that one was given cannot make them look anywhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

from gradtrace.errors import GradtraceError
from gradtrace.trace.atomic import atomic_write, make_folder
from gradtrace.trace.confined import RefusedError, read_confined
from gradtrace.trace.schema import KINDS

POINTER = "trace_dir.txt"
"""In the run: the folder of its traces."""
OWNER = "traces_of.txt"
"""In that folder: the run."""
LONGEST = 4096


def place_traces(run_dir: Path, trace_dir: str) -> Path:
    """The folder for the traces of a run that begins or goes on: the run's own, or TRACE_DIR/NAME, which is made."""
    run_dir = run_dir.resolve()
    known = named_by(run_dir)
    wanted = Path(trace_dir).expanduser().absolute() / run_dir.name if trace_dir else None
    has_traces = any((run_dir / kind).exists() for kind in KINDS)
    if (known != wanted and known is not None) or (wanted is not None and known is None and has_traces):
        raise GradtraceError(
            f"trainer.trace_dir={trace_dir}: the traces of this run are in {known or run_dir}, and a run has one place "
            "for them. Leave trainer.trace_dir as it was."
        )
    if wanted is None:
        return run_dir
    owner = read_line(wanted, OWNER)
    if owner not in (None, str(run_dir)):
        raise GradtraceError(
            f"trainer.trace_dir={trace_dir}: {wanted} holds the traces of {owner}. Choose another trace_dir or "
            "another trainer.name."
        )
    make_folder(wanted)
    atomic_write(wanted / OWNER, f"{run_dir}\n".encode())
    atomic_write(run_dir / POINTER, f"{wanted}\n".encode())
    return wanted


def named_by(run_dir: Path) -> Path | None:
    """The folder that the run names for its traces, whether or not that folder agrees."""
    named = read_line(run_dir, POINTER)
    return None if named is None else Path(named)


def traces_of(run_dir: Path) -> Path:
    """The folder with the traces of a run: the one that it names if that one names the run, else its own."""
    named = named_by(run_dir)
    agrees = named is not None and read_line(named, OWNER) == str(run_dir.resolve())
    return named if named is not None and agrees else run_dir


def run_of_traces(path: Path) -> Path:
    """The run that a folder of traces belongs to: RUN/influence_trace, RUN/influence_trace/steps, TRACE_DIR/NAME."""
    path = path.parent if path.name == "steps" else path
    # A run itself may be called tracin.
    is_run = any((path / name).exists() for name in ("metrics.jsonl", "config.yaml"))
    path = path.parent if path.name in KINDS and not is_run else path
    owner = read_line(path, OWNER)
    run = Path(owner) if owner is not None else path
    return run if run != path and named_by(run) == path.resolve() else path


def read_line(folder: Path, name: str) -> str | None:
    """The one line of a small file; None where there is none that can be read."""
    if not os.path.lexists(folder / name):  # of most runs, and asked for at every file that is read
        return None
    try:
        return os.fsdecode(read_confined(folder.resolve(), name, limit=LONGEST)).strip() or None
    except (RefusedError, OSError, ValueError):
        return None
