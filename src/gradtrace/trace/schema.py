"""What a trace file holds: one table of columns, used by the writer, the reader, the viewer and the docs.

A *kind* of trace is a folder in the run (`entropy_trace`, `influence_trace`, `tracin`, `entropy_probe`); each
step of it is one npz file of flat one-dimensional arrays. With G groups (prompts), R responses and N tokens:

    level group      one value per group               [G]
    level response   one value per response            [R]
    level token      one value per response token      [N], response r at token_offsets[r]:token_offsets[r+1]
    level pairwise   effect of a token on a response   blocks [T_r, n_r], row-major, one per response
    level meta       about the file

A ragged column is flat and names the offsets column that cuts it; offsets start at 0 and end at its length.
Nothing is padded and nothing is pickled. Indices (`group`, `pairwise_member`) point into the same file.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

FORMAT_VERSION = 1

ENTROPY_TRACE = "entropy_trace"
INFLUENCE_TRACE = "influence_trace"
TRACIN = "tracin"
ENTROPY_PROBE = "entropy_probe"

SIGN_STATEMENT = (
    "positive = a step along this token's gradient helps the accepted responses against the rejected ones"
)


class GroupStatus(enum.IntEnum):
    """Why a group was or was not scored."""

    SCORED = 0
    CONSTANT_REWARD = 1
    """All responses got the same reward: no contrast."""
    OVER_PROMPT_CAP = 2
    """Mixed, but `max_prompts_per_step` was reached."""
    NON_FINITE = 3
    """Its gradients or scores were not finite."""
    NOT_CAPTURED = 4
    """The hooks saw none of its tokens."""


class Selection(enum.IntEnum):
    """Why a response was or was not selected for the trace and for the update."""

    SELECTED = 0
    CONSTANT_REWARD = 1
    OVER_PROMPT_CAP = 2
    NON_FINITE = 3
    NOT_CAPTURED = 4
    CUT_AT_TOKEN_CAP = 5
    """Traced up to `max_tokens_per_response`; later tokens have `captured` = False."""
    DROPPED_BY_TRACIN = 6
    """TracIn selection left it out of the update."""
    DROPPED_BY_SAMPLING = 7
    """Dynamic sampling dropped its group."""


class TracinReason(enum.IntEnum):
    """Why TracIn selection kept or dropped a response."""

    KEPT_POSITIVE = 0
    KEPT_TOP_FRACTION = 1
    KEPT_FALLBACK = 2
    """Too few scores were positive, so the best half was kept."""
    KEPT_NOT_LOWEST = 3
    DROPPED_NEGATIVE = 4
    DROPPED_BELOW_FRACTION = 5
    DROPPED_LOWEST = 6
    DROPPED_NON_FINITE = 7
    KEPT_SCORE_ONLY = 8
    """`selection: none`: scored, and nothing was dropped."""
    VALIDATION = 9
    """No candidate: a response of the validation set, stored so that it can be looked at. Its score is NaN,
    its `kept` False, and its group holds validation responses only."""
    KEPT_NO_SIGNAL = 10
    """The validation gradient says nothing in this step (it is zero), so that everything was kept."""
    KEPT_ZERO = 11
    """Its own gradient is zero, or orthogonal: neither helpful nor harmful, and the rule drops harmful ones only."""
    DROPPED_ZERO = 12
    """Its own gradient is zero, or orthogonal, and the rule keeps helpful ones only."""
    KEPT_WEIGHTED = 13
    """The rule gives every response a weight instead of dropping some."""


class ProbeBatch(enum.IntEnum):
    """Which batch of the entropy probe a response belongs to."""

    EVALUATION = 0
    UPDATE = 1


Level = Literal["meta", "group", "response", "token", "pairwise"]


@dataclass(frozen=True)
class Column:
    name: str
    dtype: str
    level: Level
    meaning: str
    unit: str = ""
    ragged_by: str | None = None
    """The offsets column that cuts this flat column; None = one value per group or response."""
    is_offsets: bool = False
    """Holds G+1 or R+1 offsets into the columns that name it."""
    values: type[enum.IntEnum] | None = None
    """What the numbers stand for."""


# fmt: off
COLUMNS: dict[str, Column] = {column.name: column for column in (
    Column("format_version", "int32", "meta", "version of this layout, one number"),
    Column("meta_json", "uint8", "meta", "a JSON object as UTF-8 bytes; its keys are in META_KEYS"),

    Column("group_id", "int64", "group", "index of the group in the rollout batch"),
    Column("prompt_offsets", "int64", "group", "where each prompt begins in prompt_ids", is_offsets=True),
    Column("prompt_ids", "int32", "group", "token ids of the prompts", ragged_by="prompt_offsets"),
    Column("group_status", "uint8", "group", "scored, or why not", values=GroupStatus),
    Column("expected_offsets", "int64", "group", "where each right answer begins in expected_ids",
           is_offsets=True),
    Column("expected_ids", "int32", "group", "token ids of the right answer, empty where it is not known",
           ragged_by="expected_offsets"),

    Column("group", "int32", "response", "index of its group in this file"),
    Column("row", "int32", "response", "its row in the rollout batch, -1 = unknown"),
    Column("reward", "float32", "response", "reward of the task"),
    Column("advantage", "float32", "response", "advantage (token-level ones averaged over the response)"),
    Column("accepted", "bool", "response", "its reward is the maximum of a group whose rewards differ"),
    Column("length", "int32", "response", "number of tokens", unit="tokens"),
    Column("finished", "bool", "response", "ended with a stop token, not at the length limit"),
    Column("selection", "uint8", "response", "selected for trace and update, or why not", values=Selection),
    Column("optimizer_step", "int64", "response", "optimizer steps taken before it was captured: which θ"),
    Column("prompt_influence", "float32", "response",
           "sum of the position-credit scores at its prompt positions", unit="influence"),
    Column("first_wrong", "int32", "response", "index of its first wrong token, -1 = none or unknown"),
    Column("score", "float32", "response", "TracIn score against the validation objective",
           unit="inner product"),
    Column("kept", "bool", "response", "used by the update"),
    Column("reason", "uint8", "response", "why it was kept or dropped", values=TracinReason),
    Column("score_low", "float32", "response",
           "lower end of the score's bootstrap interval over validation prompts; NaN = not measured",
           unit="inner product"),
    Column("score_high", "float32", "response", "upper end of that interval; NaN = not measured",
           unit="inner product"),
    Column("weight", "float32", "response", "what the update multiplies its advantage with; 0 = dropped"),
    Column("flipped", "bool", "response", "its reward was flipped on purpose (reward.flip_probability)"),
    Column("batch", "uint8", "response", "the probe's evaluation or update batch", values=ProbeBatch),
    Column("share", "float32", "response",
           "its share of the predicted entropy change (update batch; else 0); positive = raises entropy",
           unit="nats"),
    Column("token_offsets", "int64", "response", "where each response begins in the token columns",
           is_offsets=True),

    Column("token_id", "int32", "token", "vocabulary id", ragged_by="token_offsets"),
    Column("entropy", "float32", "token", "entropy of the full next-token distribution it was drawn from",
           unit="nats", ragged_by="token_offsets"),
    Column("log_prob", "float32", "token", "its log-prob under the policy before this step's first update",
           unit="nats", ragged_by="token_offsets"),
    Column("influence_position", "float32", "token",
           "score by position credit: all that flows through its position; " + SIGN_STATEMENT,
           unit="influence", ragged_by="token_offsets"),
    Column("influence_loss_term", "float32", "token",
           "score by loss-term credit: its own term of the objective only; " + SIGN_STATEMENT,
           unit="influence", ragged_by="token_offsets"),
    Column("captured", "bool", "token", "its gradient was captured; where False, influence means nothing",
           ragged_by="token_offsets"),
    Column("entropy_change", "float32", "token",
           "predicted change of the entropy at this token (evaluation batch)",
           unit="nats", ragged_by="token_offsets"),
    Column("entropy_change_measured", "float32", "token",
           "measured change of the entropy at this token, same prefix, after the update (evaluation batch)",
           unit="nats", ragged_by="token_offsets"),
    Column("token_share", "float32", "token",
           "its share of the predicted entropy change (update batch; else 0); sums to the response's share; "
           "positive = raises entropy", unit="nats", ragged_by="token_offsets"),

    Column("pairwise_member_offsets", "int64", "response",
           "where each response's list begins in pairwise_member", is_offsets=True),
    Column("pairwise_member", "int32", "pairwise", "responses that the columns of a block stand for",
           ragged_by="pairwise_member_offsets"),
    Column("pairwise_offsets", "int64", "response", "where each response's block begins in pairwise",
           is_offsets=True),
    Column("pairwise", "float32", "pairwise",
           "effect of token t on response m, row-major [T_r, n_r]; meta has its pairwise_credit",
           unit="influence", ragged_by="pairwise_offsets"),
)}
# fmt: on

_EVERY_KIND = (
    *("group_id", "prompt_offsets", "prompt_ids"),
    *("group", "row", "reward", "length", "finished"),
    *("token_offsets", "token_id"),
)
_EXPECTED = ("expected_offsets", "expected_ids")
_PAIRWISE = ("pairwise_member_offsets", "pairwise_member", "pairwise_offsets", "pairwise")


@dataclass(frozen=True)
class Kind:
    name: str
    meaning: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    """At least one of these (optional) columns must be there."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


_ENTROPY = Kind(
    ENTROPY_TRACE,
    "entropy and log-prob of every token of the rollout batch",
    required=(*_EVERY_KIND, "accepted", "entropy", "log_prob"),
    optional=(*_EXPECTED, "group_status", "advantage", "selection", "optimizer_step", "first_wrong"),
)
_INFLUENCE = Kind(
    INFLUENCE_TRACE,
    "influence of every token of the traced responses, and why the other groups were skipped",
    required=(*_EVERY_KIND, "group_status", "accepted", "selection", "optimizer_step", "captured"),
    optional=(
        *_EXPECTED,
        *("advantage", "prompt_influence", "first_wrong"),
        *("entropy", "log_prob", "influence_position", "influence_loss_term"),
        *_PAIRWISE,
    ),
    one_of=("influence_position", "influence_loss_term"),
)
_TRACIN = Kind(
    TRACIN,
    "score of every response against a validation objective, and what selection made of it",
    required=(*_EVERY_KIND, "score", "kept", "reason"),
    optional=(
        *_EXPECTED,
        *("accepted", "advantage", "entropy", "log_prob", "first_wrong"),
        *("score_low", "score_high", "weight", "flipped"),
    ),
)
_PROBE = Kind(
    ENTROPY_PROBE,
    "predicted entropy change of an update: per evaluation token and per update response",
    required=(*_EVERY_KIND, "batch", "share", "entropy"),
    optional=(
        *("accepted", "advantage", "log_prob"),
        *("entropy_change", "entropy_change_measured", "token_share"),
    ),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (_ENTROPY, _INFLUENCE, _TRACIN, _PROBE)}

META_KEYS = {
    "step": "training step",
    "credit": "list of the credits in this file: position, loss_term",
    "pairwise_credit": "which credit the pairwise blocks hold",
    "hessian_mode": "identity or inverse",
    "hessian_source": "response or token",
    "contrastive_agg": "sum, mean or advantage",
    "accepted_rejected_scope": "per_prompt or all_selected",
    "output_function": "the objective whose gradients are traced",
    "exclude_self_response": "a token's own response is left out of its score",
    "sign": SIGN_STATEMENT,
    "temperature": "sampling temperature; entropy and log_prob are taken at it",
    "task": "name of the task",
    # tracin
    "diagnosis": "list of sentences: what is notable about this step's scores",
    "selection": "the rule that kept and dropped",
    "val_strategy": "how the validation responses were chosen",
    "method": "how the scores were computed: ghost or tangent",
    "val_loss": "validation loss −mean_r(A_r Σ_t log-prob)",
    "val_norm": "norm of the validation gradient",
    "train_norm": "norm of the gradient of the whole training batch; absent where it was not measured",
    "direction_norm": "norm of the validation gradient after the preconditioner: what scores are products with",
    "cosine": "of the whole batch's gradient and the validation gradient",
    "val_norms": "norm of the validation gradient by layer group",
    # entropy_probe; every entropy change is in nats per token, positive = entropy rises
    "delta_h_predicted": "predicted change of the mean entropy by this update",
    "delta_h_predicted_stderr": "its standard error (jackknife over evaluation sequences)",
    "delta_h_measured": "measured change, same sequences with importance weights",
    "delta_h_measured_stderr": "its standard error",
    "delta_h_difference_stderr": "standard error of predicted minus measured, which share most of their noise",
    "mean_entropy": "of the evaluation sequences before the update, nats per token",
    "learning_rate": "of the update",
    "delta_h_fresh": "measured change on freshly sampled sequences",
    "delta_h_fresh_stderr": "its standard error",
    "delta_h_legacy": "predicted change in the older form, inner product of mean gradients",
    "delta_h_covariance": "the estimate −η·Cov(log π, A)",
    "ess": "effective sample size of the importance weights, in sequences",
    "momentum_share": "part of delta_h_predicted that earlier batches (the first moment) bring",
    "decay_share": "part of delta_h_predicted that weight decay brings",
    "eta_sweep": "list of {eta, predicted, measured, predicted_stderr, measured_stderr, ess}; eta in units of "
    "the learning rate of the update",
}

# columns that another column of the same file decides, filled in when the caller leaves them out
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
    """int64[n + 1]: 0, then the running sum."""
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
            made = offsets_of(arrays[source]) if target == "token_offsets" else np.diff(arrays[source])
            arrays[target] = made.astype(COLUMNS[target].dtype)
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
        raise SchemaError(
            spec.one_of[0], f"is missing, {kind} needs at least one of {', '.join(spec.one_of)}"
        )
    rows = {"group": lengths["group_id"], "response": lengths["group"]}
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
    _check_index("group", arrays["group"], lengths["group_id"])
    if any(name in lengths for name in _PAIRWISE):
        for name in _PAIRWISE:
            if name not in lengths:
                raise SchemaError(name, "is missing; the pairwise columns come together")
        _check_index("pairwise_member", arrays["pairwise_member"], lengths["group"])
        # a response without a list has no block; one with a list has a [T_r, n_r] block
        blocks = arrays["length"].astype(np.int64) * np.diff(arrays["pairwise_member_offsets"])
        if not np.array_equal(np.diff(arrays["pairwise_offsets"]), blocks):
            raise SchemaError("pairwise_offsets", "a block is not length × number of members")


def _check_index(name: str, index: np.ndarray, size: int) -> None:
    if len(index) and (index.min() < 0 or index.max() >= size):
        raise SchemaError(name, f"points outside the {size} entries of this file")
