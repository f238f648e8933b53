"""What step files hold: the columns, the instruments that write them, and how columns of one file fit together.

An *instrument* has a folder in a run, and in it an npz file of flat arrays for each step that it saw. With G groups
(prompts), R responses and N tokens:

    level group      one value per group               [G]
    level response   one value per response            [R]
    level token      one value per response token      [N], response r at token_offsets[r]:token_offsets[r+1]
    level continuation  one value per sampled continuation  [C]
    level segment    one value per segment of a response that one author wrote
    level pairwise   effect of a token on a response   blocks [T_r, n_r], row-major, one per response
    level meta       about the file

A ragged column is flat and names the offsets column that cuts it; offsets start at 0 and end at its length. Nothing is
padded, nothing is pickled, and indices (`group`, `pairwise_member`) point into the same file.

An `InstrumentRecord` is all that the writer, the reader, `gradtrace trace`, the viewer and the docs know of an
instrument. Ours stand in `gradtrace.instruments.NAME`; importing `gradtrace.instruments` makes them known.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from gradtrace.trace.step import Step
    from gradtrace.trace.table import StepTable

FORMAT_VERSION = 1
Level = Literal["meta", "group", "response", "token", "pairwise", "continuation", "segment", "reward_part"]

EVERY_KIND = (
    *("group_id", "prompt_offsets", "prompt_ids", "group", "row"),
    *("reward", "length", "finished", "token_offsets", "token_id"),
)
"""What every step file has: prompts, responses and their tokens."""
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
    channel: str = ""
    """Of a token column: its title among the colours of the viewer's group page. Empty: it is no colour."""
    adds_up: bool = False
    """Over a sentence, a line or a turn it is summed; others are averaged."""
    valid: Callable[[Step], np.ndarray] | None = None
    """bool for each of its numbers: it means something. The step table has NaN elsewhere."""
    derived: Callable[[StepTable], np.ndarray | None] | None = None
    """Computes it from other columns of the step; then no file has it."""

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
    switch: str = ""
    """The setting that turns it on, as one types it; empty: `trainer.NAME.enable=true`."""
    required: tuple[str, ...] = ()
    """Columns that every step file of it has; those of `EVERY_KIND` are understood."""
    optional: tuple[str, ...] = ()
    """Columns of others that a step file of it may have; those that it brings are understood."""
    one_of: tuple[str, ...] = ()
    """At least one of these optional columns must be there."""
    brings: tuple[Column, ...] = ()
    """The columns that no other instrument has described; those of others can be named as well."""
    meta: Mapping[str, str] = field(default_factory=dict)
    """Keys of `meta_json` and what they mean."""
    page: str | None = ""
    """Its page in the viewer, as in the address `#/PAGE`; empty: its name. None: its tokens are shown on the step,
    group and tokens pages, and it has no page of its own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "switch", self.switch or f"trainer.{self.name}.enable=true")
        object.__setattr__(self, "required", tuple(dict.fromkeys((*EVERY_KIND, *self.required))))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that its step files may have."""
        own = (column.name for column in self.brings if column.derived is None)
        return tuple(dict.fromkeys((*self.required, *self.optional, *own, *TURN_COLUMNS, *VERSION_COLUMNS)))

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


# What several instruments share.

SIGN_STATEMENT = "positive = a step along this token's gradient helps the accepted responses against the rejected ones"


SIGN_OF_PARTS = "positive = training on the token raised the objective"
INFLUENCE_SCORES = ("influence", "influence_loss_term", "influence_position")
"""Columns of influence scores. A file has the first, in nats, or one or both of the others, from captured factors."""


class GroupStatus(enum.IntEnum):
    """Why a group was or was not scored."""

    SCORED = 0
    CONSTANT_REWARD = 1
    """All responses got the same reward: there is no contrast."""
    OVER_PROMPT_CAP = 2
    """The rewards differ, but `max_prompts_per_step` was reached."""
    NON_FINITE = 3
    """Gradients or scores of the group were not finite."""
    NOT_CAPTURED = 4
    """The hooks saw none of its tokens."""
    NOT_ASKED = 5
    """Scores of other groups were asked for (`gradtrace attribute --group`)."""


class Selection(enum.IntEnum):
    """Why a response was or was not selected for the trace."""

    SELECTED = 0
    CONSTANT_REWARD = 1
    OVER_PROMPT_CAP = 2
    NON_FINITE = 3
    NOT_CAPTURED = 4
    CUT_AT_TOKEN_CAP = 5
    """Traced up to `max_tokens_per_response`; later tokens have `captured` = False."""


class SegmentRole(enum.IntEnum):
    """Who wrote a segment of a response."""

    ASSISTANT = 0
    """The policy."""
    TOOL = 1
    USER = 2
    ENVIRONMENT = 3
    """Not the policy, and no more is known: a tool's result, a template."""


PAIRWISE = ("pairwise_member_offsets", "pairwise_member", "pairwise_offsets", "pairwise")
"""The effect of tokens on single responses: these columns come together."""


def log_ratio(table: StepTable) -> np.ndarray | None:
    """[N]: the trainer's log-prob of every token minus the sampler's."""
    ratio = table.column("ratio")
    return None if ratio is None else np.log(ratio)


# fmt: off
register_columns((
    Column("format_version", "int32", "meta", "version of this layout, one number"),
    Column("meta_json", "uint8", "meta", "a JSON object as UTF-8 bytes; the record of the kind explains its keys"),

    Column("group_id", "int64", "group", "index of the group in the rollout batch"),
    Column("prompt_offsets", "int64", "group", "where each prompt begins in prompt_ids", is_offsets=True),
    Column("prompt_ids", "int32", "group", "token ids of the prompts", ragged_by="prompt_offsets"),
    Column("group_status", "uint8", "group", "scored, or why not", values=GroupStatus),
    Column("expected_offsets", "int64", "group", "where each right answer begins in expected_ids", is_offsets=True),
    Column("expected_ids", "int32", "group", "token ids of the right answer, empty where it is not known",
           ragged_by="expected_offsets"),

    Column("group", "int32", "response", "index of its group in this file", points_at="group"),
    Column("row", "int32", "response", "its row in the rollout batch, -1 = unknown"),
    Column("reward", "float32", "response", "reward of the task"),
    Column("advantage", "float32", "response", "advantage (token-level ones averaged over the response)"),
    Column("accepted", "bool", "response", "its reward is the maximum of a group whose rewards differ"),
    Column("length", "int32", "response", "number of tokens", unit="tokens"),
    Column("finished", "bool", "response", "ended with a stop token, not at the length limit"),
    Column("selection", "uint8", "response", "selected for the trace, or why not", values=Selection),
    Column("optimizer_step", "int64", "response", "optimizer steps taken before it was captured: which θ"),
    Column("first_wrong", "int32", "response", "index of its first wrong token, -1 = none or unknown"),
    Column("policy_version", "int32", "response", "training steps behind the weights that its first token was sampled "
           "with: the step's number minus 1 = on policy", heading="version"),
    Column("last_policy_version", "int32", "response", "the same of its last token", heading="last version"),
    Column("token_offsets", "int64", "response", "where each response begins in the token columns", is_offsets=True),

    Column("token_id", "int32", "token", "vocabulary id"),
    Column("entropy", "float32", "token", "entropy of the full next-token distribution it was drawn from",
           unit="nats", channel="Entropy"),
    Column("log_prob", "float32", "token", "its log-prob under the policy before this step's first update",
           unit="nats", channel="Log-prob"),
    Column("sampler_log_prob", "float32", "token", "its log-prob as the sampler reported it when it drew the token",
           unit="nats", heading="sampler"),
    Column("loss_mask", "bool", "token", "the policy wrote it; where False (a tool's result, a user's words, a "
           "template) it has no loss and no scores, which are NaN; a file without it has no such tokens"),
    Column("segment_offsets", "int64", "response", "where each response begins in the segment columns",
           is_offsets=True),
    Column("segment_start", "int32", "segment", "index of its first token in the response; it ends at the next",
           ragged_by="segment_offsets"),
    Column("segment_turn", "int32", "segment", "the policy's turn that it belongs to, from 0",
           ragged_by="segment_offsets"),
    Column("segment_role", "uint8", "segment", "who wrote it", values=SegmentRole, ragged_by="segment_offsets"),
    Column("segment_tool_offsets", "int64", "segment", "where each name begins in segment_tool", is_offsets=True),
    Column("segment_tool", "uint8", "segment", "names of the tools that wrote segments, as UTF-8 bytes",
           ragged_by="segment_tool_offsets"),
    Column("reward_part_offsets", "int64", "response", "where each response begins in reward_part", is_offsets=True),
    Column("reward_part", "float32", "reward_part", "a part of the reward, before its weight in the sum",
           ragged_by="reward_part_offsets"),
    Column("reward_part_name_offsets", "int64", "reward_part", "where each name begins in reward_part_name",
           is_offsets=True),
    Column("reward_part_name", "uint8", "reward_part", "names of the parts as UTF-8 bytes",
           ragged_by="reward_part_name_offsets"),
    Column("ratio", "float32", "token",
           "its probability under the trainer's policy, before the first update, over the "
           "sampler's; 1 = they agree"),
    Column("pairwise_member_offsets", "int64", "response",
           "where each response's list begins in pairwise_member", is_offsets=True),
    Column("pairwise_member", "int32", "pairwise", "responses that the columns of a block stand for",
           ragged_by="pairwise_member_offsets", points_at="response"),
    Column("pairwise_offsets", "int64", "response", "where each response's block begins in pairwise",
           is_offsets=True),
    Column("pairwise", "float32", "pairwise",
           "effect of token t on response m, row-major [T_r, n_r], in the unit of the file's scores; for measured "
           "groups a row adds up to the token's influence_own", ragged_by="pairwise_offsets"),
    Column("mismatch", "float32", "token", "ln of ratio: the trainer's log-prob minus the sampler's", unit="nats",
           is_signed=True, channel="Ratio", derived=log_ratio),
))
# fmt: on

EXPECTED = ("expected_offsets", "expected_ids")
REWARD_PARTS = ("reward_part_offsets", "reward_part", "reward_part_name_offsets", "reward_part_name")
"""What files of rollouts have where a reward is the sum of several."""

RUN_META = {
    "step": "training step",
    "temperature": "sampling temperature; entropy and log_prob are taken at it",
    "task": "name of the task",
}
"""Keys of `meta_json` in every kind."""

# How the columns of one file fit together.

COUNTED_BY = {
    "group": "group_id",
    "response": "group",
    "continuation": "continuation_response",
    "segment": "segment_start",
    "reward_part": "reward_part",
}
"""For each level: the column that every file with something of that level has, one value each."""

# Columns that another column of the same file decides, filled in when the caller leaves them out.
_MADE_FROM = {"token_offsets": "length", "length": "token_offsets"}


class SchemaError(ValueError):
    """A column that does not fit. `column` is its name."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(f"column {column!r}: {message}")
        self.column = column


def ragged(rows: list[np.ndarray] | list[list[int]], dtype: str = "int32") -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths as (flat [sum of lengths], offsets int64[len(rows) + 1])."""
    offsets = offsets_of(np.array([len(row) for row in rows], dtype=np.int64))
    flat = np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if len(rows) else np.empty(0, dtype)
    return flat.astype(dtype, copy=False), offsets


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets int64[n + 1] of parts with these lengths: 0, then the running sum."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def conform(kind: str, columns: Mapping[str, object]) -> dict[str, np.ndarray]:
    """`columns` as fresh arrays of the schema's dtypes, complete and consistent, or a `SchemaError`."""
    allowed = KINDS[kind].columns
    arrays: dict[str, np.ndarray] = {}
    for name, value in columns.items():
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SchemaError(name, f"{kind} has no such column{hint}")
        arrays[name] = _cast(COLUMNS[name], value)
    for target, source in _MADE_FROM.items():
        if target not in arrays and source in arrays:
            values = offsets_of(arrays[source]) if target == "token_offsets" else np.diff(arrays[source])
            arrays[target] = values.astype(COLUMNS[target].dtype)
    lengths = {name: len(array) for name, array in arrays.items()}
    check_layout(kind, lengths)
    check_values(lengths, arrays)
    return {name: arrays[name] for name in allowed if name in arrays}


def _cast(column: Column, value: object) -> np.ndarray:
    """A copy in the column's dtype: the caller may reuse its buffers while we write."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch: bfloat16, on a GPU, with gradient
        raise SchemaError(column.name, f"cannot become a NumPy array ({error})") from None
    wanted = np.dtype(column.dtype)
    if array.ndim != 1:
        raise SchemaError(column.name, f"is {array.ndim}-dimensional, columns are flat")
    if array.size == 0:
        return np.empty(0, wanted)
    fits = np.can_cast(array.dtype, wanted, "same_kind") or (array.dtype.kind in "iu" and wanted.kind in "iu")
    if not fits:
        raise SchemaError(column.name, f"is {array.dtype}, expected {wanted}")
    if array.dtype.kind in "iu" and wanted.kind in "iu" and not np.can_cast(array.dtype, wanted, "safe"):
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise SchemaError(column.name, f"has values outside {wanted}")
    return np.array(array, dtype=wanted)


def check_layout(kind: str, lengths: Mapping[str, int]) -> None:
    """Every required column is there and the columns of one level have one length."""
    spec = KINDS[kind]
    for name in spec.required:
        if name not in lengths:
            raise SchemaError(name, f"is missing, {kind} needs it")
    if spec.one_of and not any(name in lengths for name in spec.one_of):
        raise SchemaError(spec.one_of[0], f"is missing, {kind} needs at least one of {', '.join(spec.one_of)}")
    rows = {level: lengths[name] for level, name in COUNTED_BY.items() if name in lengths}
    for name, length in lengths.items():
        column = COLUMNS[name]
        if column.ragged_by:
            if column.ragged_by not in lengths:
                raise SchemaError(name, f"is ragged and its {column.ragged_by} is missing")
        elif column.level in rows:
            expected = rows[column.level] + int(column.is_offsets)
            if length != expected:
                raise SchemaError(
                    name, f"has {length} entries, expected {expected} ({rows[column.level]} {column.level}s)"
                )


def check_values(lengths: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
    """Offsets cut their columns exactly, indices point at something, blocks have the size their lists say.
    Reads offsets, indices and enums only, so that a lazy `arrays` need not decode the rest."""
    for name in lengths:
        column = COLUMNS[name]
        if column.is_offsets and (arrays[name][0] != 0 or (np.diff(arrays[name]) < 0).any()):
            raise SchemaError(name, "offsets must start at 0 and never fall")
        if column.values and len(arrays[name]) and arrays[name].max() > max(column.values):
            raise SchemaError(name, f"has a value that {column.values.__name__} does not name")
    for name, length in lengths.items():
        by = COLUMNS[name].ragged_by
        if by and length != arrays[by][-1]:
            raise SchemaError(name, f"has {length} entries, {by} ends at {arrays[by][-1]}")
    if not np.array_equal(np.diff(arrays["token_offsets"]), arrays["length"]):
        raise SchemaError("length", "does not agree with token_offsets")
    for name in lengths:
        if level := COLUMNS[name].points_at:
            index, size = arrays[name], lengths[COUNTED_BY[level]]
            if len(index) and (index.min() < 0 or index.max() >= size):
                raise SchemaError(name, f"points outside the {size} entries of this file")
    if any(name in lengths for name in PAIRWISE):
        for name in PAIRWISE:
            if name not in lengths:
                raise SchemaError(name, "is missing; the pairwise columns come together")
        # a response without a list has no block; one with a list has a [T_r, n_r] block
        blocks = arrays["length"].astype(np.int64) * np.diff(arrays["pairwise_member_offsets"])
        if not np.array_equal(np.diff(arrays["pairwise_offsets"]), blocks):
            raise SchemaError("pairwise_offsets", "a block is not length × number of members")
