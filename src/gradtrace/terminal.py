"""What commands share: their settings from the command line, and lines, tables and bars in the terminal.

rich is imported when something is shown, so that `gradtrace --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Settings = TypeVar("Settings")
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


def titled_table(title: str, *headings: str, left: int = 1) -> Table:
    """A table whose first `left` columns are words and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", overflow="fold")
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, what=what: bar.update(task, description=what, completed=done, total=total)
