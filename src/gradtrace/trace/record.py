"""`InstrumentRecord`: the one description of an instrument that everything which handles its traces reads.

The schema, the writer, the reader, `gradtrace trace`, the export, live news, the viewer's navigation and the generated
documentation go by the records in `KINDS`; none of them names an instrument. The records of the instruments that ship
stand in `gradtrace.trace.kinds`, one module each. One of your own is a record and a call:

    CALIBRATION = register_instrument(InstrumentRecord(
        name="calibration", label="Calibration", meaning="how sure the policy was, and whether it was right",
        switch="trainer.calibration.enable=true",
        brings=(Column("confidence", "float32", "response", "mean probability of its tokens"),),
        required=(*EVERY_KIND, "confidence"),
    ))
    TraceWriter(run_dir, "calibration").write(step, columns)

`gradtrace trace` and the viewer know it where that module is imported; a package is imported by itself if it names the
module as an entry point of the group `gradtrace.instruments`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Literal

from gradtrace.errors import GradtraceError

logger = logging.getLogger(__name__)

Level = Literal["meta", "group", "response", "token", "pairwise", "continuation", "segment", "reward_part"]

TURN_COLUMNS = (
    *("loss_mask", "segment_offsets", "segment_start", "segment_turn", "segment_role"),
    *("segment_tool_offsets", "segment_tool"),
)
"""What files of every kind have where responses hold tokens that the policy did not write."""
VERSION_COLUMNS = ("policy_version", "last_policy_version")
"""What files of every kind have where the sampler says which weights it had."""


@dataclass(frozen=True)
class Column:
    """A column of a step file."""

    name: str
    dtype: str
    level: Level
    meaning: str
    unit: str = ""
    ragged_by: str | None = None
    """The offsets column that cuts this flat column; None = one value per group or response. Those of tokens are cut by
    token_offsets."""
    is_offsets: bool = False
    """Holds G+1 or R+1 offsets into the columns that name it."""
    values: type[enum.IntEnum] | None = None
    """What the numbers stand for."""
    is_signed: bool = False
    """Positive and negative values mean opposite things: colours diverge from zero."""
    points_at: Literal["group", "response"] | None = None
    """Its numbers are indices of groups or responses of the same file."""
    heading: str = ""
    """A shorter name, where the column's own is wider than its numbers."""

    def __post_init__(self) -> None:
        if self.level == "token":
            object.__setattr__(self, "ragged_by", "token_offsets")


@dataclass(frozen=True)
class InstrumentRecord:
    """An instrument as seen from outside: where its traces are, what they hold, how they are shown."""

    name: str
    """Its folder in a run, the prefix of its metrics, and its section of the configuration (`trainer.NAME`)."""
    label: str
    """What people call it; the text of its tab in the viewer."""
    meaning: str
    """What its traces hold, in half a sentence."""
    switch: str
    """The setting that turns it on, as one types it."""
    required: tuple[str, ...]
    """Columns that every step file has."""
    optional: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    """At least one of these optional columns must be there."""
    brings: tuple[Column, ...] = ()
    """The columns that no other instrument has described; those of others can be named as well."""
    meta: Mapping[str, str] = field(default_factory=dict)
    """Keys of `meta_json` and what they mean."""
    page: str | None = ""
    """Its page in the viewer, as in the address `#/PAGE`; empty: its name. None: its tokens are shown on the step,
    group and tokens pages, and it has no page of its own."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that its step files may have."""
        return self.required + self.optional + TURN_COLUMNS + VERSION_COLUMNS

    @property
    def knob(self) -> str:
        """The key in its section that turns it on: `enable`, or `every`."""
        return self.switch.split("=")[0].rsplit(".", 1)[-1]

    @property
    def address(self) -> str | None:
        return self.page if self.page is None else self.page or self.name


KINDS: dict[str, InstrumentRecord] = {}
COLUMNS: dict[str, Column] = {}


def register_columns(columns: tuple[Column, ...]) -> None:
    for column in columns:
        if COLUMNS.setdefault(column.name, column) != column:
            raise GradtraceError(
                f"column {column.name!r} is described twice, differently: step files of all instruments share one "
                "table of columns, so use the one that is there or take another name"
            )


def register_instrument(record: InstrumentRecord) -> InstrumentRecord:
    """Make an instrument known to everything that reads and shows traces. The same record again changes nothing."""
    if KINDS.get(record.name, record) != record:
        raise GradtraceError(f"there is an instrument {record.name!r} already; take another name")
    if not record.name.isidentifier():
        raise GradtraceError(f"{record.name!r} cannot be an instrument's name: letters, digits and _ only")
    taken = {other.address: name for name, other in KINDS.items() if other.address and name != record.name}
    if record.address in taken:
        raise GradtraceError(f"the page {record.address!r} belongs to {taken[record.address]!r}")
    register_columns(record.brings)
    missing = [name for name in (*record.columns, *record.one_of) if name not in COLUMNS]
    if missing:
        raise GradtraceError(f"instrument {record.name!r} names columns that nothing describes: {', '.join(missing)}")
    KINDS[record.name] = record
    return record


def record_of(kind: str) -> InstrumentRecord:
    if kind not in KINDS:
        raise GradtraceError(f"no trace kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind]


def load_installed_instruments() -> None:
    """Import the modules that installed packages name under `gradtrace.instruments`; each registers its record."""
    for entry in entry_points(group="gradtrace.instruments"):
        try:
            entry.load()
        except Exception as error:  # another package's mistake must not take our commands away
            logger.warning("instrument %s (%s) cannot be loaded: %s", entry.name, entry.value, error)
