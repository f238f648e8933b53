"""`Step`: one step of one trace, its columns as arrays, and views of a group, a response, its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtrace.segments import Segment
from gradtrace.trace.columns import (
    COLUMNS,
    FORMAT_VERSION,
    INFLUENCE_SCORES,
    GroupStatus,
    SchemaError,
    SegmentRole,
    Selection,
    check_layout,
    check_values,
)
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError

if TYPE_CHECKING:
    import pandas
    import pyarrow


@dataclass(frozen=True)
class Group:
    index: int
    """The index of the group in this file."""
    group_id: int
    """The index of the group in the rollout batch."""
    prompt_ids: np.ndarray
    expected_ids: np.ndarray | None
    """Token ids of the right answer; None if the task did not give it."""
    status: GroupStatus | None
    responses: list[int]
    """Indices of its responses in this file; empty for a skipped group of an influence trace."""


@dataclass(frozen=True)
class Response:
    """One response; columns that the file lacks are None."""

    index: int
    group: int
    row: int
    reward: float
    length: int
    finished: bool
    accepted: bool | None = None
    advantage: float | None = None
    selection: Selection | None = None
    optimizer_step: int | None = None
    prompt_influence: float | None = None
    first_wrong: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """The columns of this kind alone, such as the score of a TracIn step."""


@dataclass(frozen=True)
class Pairwise:
    scores: np.ndarray
    """float32[T_r, n_r]: effect of token t on response members[m]."""
    members: np.ndarray
    """int32[n_r]: indices of responses in this file."""


class Step:
    def __init__(self, kind: str, step: int, arrays: SafeNpz) -> None:
        """Check the layout; columns are decoded when they are asked for."""
        self.kind = kind
        self.step = step
        self._arrays = arrays
        self._check()
        self.meta = self._read_meta()
        self.n_groups = len(arrays["group_id"])
        self.n_responses = len(arrays["group"])
        self.n_tokens = int(arrays["token_offsets"][-1])

    def __repr__(self) -> str:
        return (
            f"Step({self.kind} {self.step}: {self.n_groups} groups, {self.n_responses} responses, "
            f"{self.n_tokens} tokens)"
        )

    @property
    def columns(self) -> list[str]:
        """Names of the columns in this file, those of level meta left out."""
        return [name for name in self._arrays if name in COLUMNS and COLUMNS[name].level != "meta"]

    def _ipython_key_completions_(self) -> list[str]:
        """Names that a notebook offers to complete after `step["`: those of the columns."""
        return self.columns

    def __contains__(self, name: str) -> bool:
        return name in self._arrays and name in COLUMNS and COLUMNS[name].level != "meta"

    def __getitem__(self, name: str) -> np.ndarray:
        """A whole column, flat."""
        if name not in self:
            raise KeyError(f"{self.kind} step {self.step} has no column {name!r}; it has {', '.join(self.columns)}")
        return self._arrays[name]

    def group(self, g: int) -> Group:
        return Group(
            index=g,
            group_id=int(self["group_id"][g]),
            prompt_ids=self.ragged("prompt_ids", g),
            expected_ids=self.ragged("expected_ids", g) if "expected_ids" in self else None,
            status=GroupStatus(self["group_status"][g]) if "group_status" in self else None,
            responses=np.flatnonzero(self["group"] == g).tolist(),
        )

    def response(self, r: int) -> Response:
        values: dict[str, Any] = {}
        for name in self.columns:
            column = COLUMNS[name]
            if column.level == "response" and not column.is_offsets:
                value = self[name][r].item()
                values[name] = column.values(value) if column.values else value
        known = {name: values.pop(name) for name in list(values) if name in Response.__dataclass_fields__}
        return Response(index=r, **known, more=values)

    def tokens(self, r: int) -> dict[str, np.ndarray]:
        """The token columns of response r, each [T_r]."""
        return {name: self.ragged(name, r) for name in self.columns if COLUMNS[name].level == "token"}

    def influence(self, r: int) -> np.ndarray | None:
        """[T_r]: the influence scores of response r; None if this is another trace."""
        name = next((name for name in INFLUENCE_SCORES if name in self), None)
        return None if name is None else self.ragged(name, r)

    def written(self, r: int) -> np.ndarray:
        """bool[T_r]: the tokens of response r that the policy wrote; the others are never scored."""
        return self.ragged("loss_mask", r) if "loss_mask" in self else np.ones(int(self["length"][r]), bool)

    def reward_parts(self, r: int) -> dict[str, float]:
        """The parts that the reward of response r is the sum of, before their weights; empty where it is no sum."""
        if "reward_part" not in self:
            return {}
        first, last = self["reward_part_offsets"][r : r + 2].tolist()
        names, at = self["reward_part_name"], self["reward_part_name_offsets"]
        return {
            names[at[k] : at[k + 1]].tobytes().decode(errors="replace"): float(self["reward_part"][k])
            for k in range(first, last)
        }

    def segments(self, r: int) -> list[Segment]:
        """Who wrote which part of response r; one segment of the policy where the file does not say."""
        if "segment_start" not in self:
            return [Segment(0, 0, "assistant")]
        first, last = self["segment_offsets"][r : r + 2].tolist()
        names = self["segment_tool_offsets"]
        return [
            Segment(
                int(self["segment_start"][k]),
                int(self["segment_turn"][k]),
                SegmentRole(self["segment_role"][k]).name.lower(),
                self["segment_tool"][names[k] : names[k + 1]].tobytes().decode(errors="replace"),
            )
            for k in range(first, last)
        ]

    def pairwise(self, r: int) -> Pairwise | None:
        """The block of response r, None where none is stored."""
        if "pairwise" not in self:
            return None
        members = self.ragged("pairwise_member", r)
        if len(members) == 0:
            return None
        return Pairwise(self.ragged("pairwise", r).reshape(-1, len(members)), members)

    def to_pandas(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self._token_table())

    def to_arrow(self) -> pyarrow.Table:
        import pyarrow

        return pyarrow.table(self._token_table())

    def _token_table(self) -> dict[str, np.ndarray]:
        from gradtrace.trace.table import StepTable

        return StepTable(self.step, {self.kind: self}, whole=True).token_table()

    def ragged(self, name: str, index: int) -> np.ndarray:
        """The part of a flat column that belongs to one group or response, such as its prompt."""
        offsets = self[COLUMNS[name].ragged_by or ""]
        return self[name][offsets[index] : offsets[index + 1]]

    def _check(self) -> None:
        version = self._arrays["format_version"] if "format_version" in self._arrays else np.empty(0)
        if version.shape != (1,) or version.dtype.kind not in "iu":
            raise SchemaError("format_version", "is missing: not a gradtrace step file")
        if version[0] > FORMAT_VERSION:
            raise SchemaError(
                "format_version",
                f"is {version[0]}, this gradtrace reads up to {FORMAT_VERSION}: upgrade gradtrace",
            )
        lengths = {}
        for name in self.columns:
            member, expected = self._arrays.members[name], COLUMNS[name].dtype
            if member.dtype != np.dtype(expected) or len(member.shape) != 1:
                raise SchemaError(name, f"is {member.dtype} {member.shape}, expected flat {expected}")
            lengths[name] = member.shape[0]
        check_layout(self.kind, lengths)
        check_values(lengths, self._arrays)

    def _read_meta(self) -> dict[str, Any]:
        if "meta_json" not in self._arrays:
            return {}
        try:
            meta = json.loads(self._arrays["meta_json"].tobytes().decode())
        except (ValueError, RecursionError) as error:
            raise UnsafeNpzError(f"meta_json is not JSON ({error})") from None
        if not isinstance(meta, dict):
            raise UnsafeNpzError("meta_json is not a JSON object")
        return meta
