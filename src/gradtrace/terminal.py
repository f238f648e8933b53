"""What commands share: settings from the command line; lines, tables and bars in the terminal; how the program is
called; peak memory.

rich and torch are imported when they are needed, so that `gradtrace --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import math
import os
import re
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

Settings = TypeVar("Settings")
Progress = Callable[[int, int], None]
"""Called with (done, all)."""
StageProgress = Callable[[str, int, int], None]
"""Called with (what is being done, done, all)."""
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def settings_from(args: argparse.Namespace, kind: type[Settings], **more: Any) -> Settings:
    """A command's settings as the dataclass `kind`: the arguments with the names of its fields that were given."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return kind(**{**given, **more})


def seconds(text: str) -> float:
    """A --budget: `90s`, `5m`, `1.5h` or a number of seconds; infinite for `none`, and where nothing is given."""
    if text in ("", "none"):
        return math.inf
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise GradtraceError(f"--budget {text}: a time is needed, such as 90s, 10m, 1h, or none")
    return float(match[1]) * UNITS[match[2]]


def say(console: Console, text: str, mark: str = "", style: str = "") -> None:
    """A text as it is: nothing in it is markup, and long lines are left to the terminal. `mark`: a coloured word
    before it, such as [red]problem[/red]."""
    if mark:
        console.print(mark, end="  ")
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def titled_table(title: str, *headings: str, rows: Iterable[Sequence[str]] = (), left: int = 1) -> Table:
    """A table whose first `left` columns are words and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def no_foreign_bars() -> None:
    """transformers' own progress bars, "Loading weights" in the middle of ours, are not shown."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def progress_bar(console: Console | None, what: str = "") -> Iterator[Callable[..., None]]:
    """How far a long work is: its value is called with (done, all), and with what is done where that changes. Without
    a console nothing is shown."""
    if console is None:
        yield lambda done, total, what=what: None
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, what=what: bar.update(task, description=what, completed=done, total=total)


NAME = "gradtrace"


def command() -> str:
    """`gradtrace` where the shell finds this installation under that name, else the path that finds it."""
    own = os.path.join(os.path.dirname(sys.executable), NAME)
    found = shutil.which(NAME)
    if not os.path.isfile(own) or (found and os.path.realpath(found) == os.path.realpath(own)):
        return NAME
    here = os.path.relpath(own)
    return own if here.startswith("..") else here


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import torch and transformers without the garbage collector, which would look again and again at a million
    objects that stay: a fifth of the time. Later collections leave them out as well."""
    if "transformers" in sys.modules:  # too late, and by now there may be objects that do not stay
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


MEMORY_SAMPLE_SECONDS = 0.002
"""Between two looks at the resident set."""
STATM = Path("/proc/self/statm")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """The largest memory above that before `work`: allocated by torch on a GPU, resident set (sampled) on a CPU.
    None where the system does not tell."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not STATM.exists():
        work()
        return None
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # memory that earlier work freed would hide what this one needs
    before = peak = resident_bytes()
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(MEMORY_SAMPLE_SECONDS):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        finished.set()
        watcher.join()
    return max(peak, resident_bytes()) - before


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
