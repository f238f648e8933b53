"""The manifest of one kind of trace: a sealed line per step, appended after the step's file is whole.

The manifest is the authority: a step file without a line is not part of the run, and a later line for a step
replaces an earlier one. So that a rewritten step is old or new and never a mixture, the new file gets a new
name (`step_000007.r1.npz`), the line switches over, and then the old file goes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradtrace.trace.atomic import DamagedError, unseal

_FILE = re.compile(r"steps/step_(\d{6,})(?:\.r(\d+))?\.npz")


@dataclass(frozen=True)
class Entry:
    step: int
    file: str
    """Path inside the kind's folder."""
    bytes: int
    sha256: str
    groups: int
    responses: int
    tokens: int
    time: float
    """Seconds since 1970, when the file was written."""


def next_file(step: int, old: Entry | None) -> str:
    """The name of a step's file that replaces the `old` one."""
    match = _FILE.fullmatch(old.file) if old else None
    return f"steps/step_{step:06d}.r{int(match[2] or 0) + 1}.npz" if match else f"steps/step_{step:06d}.npz"


def parse_line(line: bytes) -> Entry:
    """The entry in a line, or a `DamagedError` that says what is wrong with it."""
    record = unseal(line)
    try:
        entry = Entry(**record)
    except TypeError as error:
        raise DamagedError(f"not a manifest entry ({error})") from None
    numbers = (entry.step, entry.bytes, entry.groups, entry.responses, entry.tokens)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise DamagedError("a count is not a whole number")
    if not isinstance(entry.time, int | float) or not isinstance(entry.sha256, str):
        raise DamagedError("time or sha256 has the wrong type")
    match = _FILE.fullmatch(entry.file) if isinstance(entry.file, str) else None
    if match is None or int(match[1]) != entry.step:
        raise DamagedError(f"{entry.file!r} is not the name of a step file of this folder")
    return entry


class Manifest:
    """`entries` by step, in the order of their lines, and the `problems` of other lines. `update` parses only
    what is new."""

    def __init__(self, data: bytes = b"") -> None:
        self._parsed = b""
        self.entries: dict[int, Entry] = {}
        self.problems: list[str] = []
        self.update(data)

    def update(self, data: bytes) -> None:
        """`data`: the whole file as it is now. A last line without newline does not count: it is being written,
        or its writer was killed."""
        whole = data[: data.rfind(b"\n") + 1]
        if not self._parsed or not whole.startswith(self._parsed):
            self._parsed, self.entries, self.problems = b"", {}, []
        number = self._parsed.count(b"\n")
        for line in whole[len(self._parsed) :].split(b"\n")[:-1]:
            number += 1
            try:
                entry = parse_line(line)
            except DamagedError as error:
                self.problems.append(f"line {number}: {error}")
            else:
                self.entries[entry.step] = entry
        self._parsed = whole
