"""`StepTable`: the files of one training step, joined: responses by their row in the rollout, groups by their id.

The file with most responses of the rollout gives the order. A column comes from the first file that has it; where that
file lacks a response, floats are NaN, flags False, other numbers -1. Rows of -1 (TracIn's validation set, the entropy
probe's evaluation batch) are no part of the rollout and stand in their own file alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradtrace.trace.columns import COLUMNS, Column, offsets_of
from gradtrace.trace.step import Pairwise, Step


class StepTable:
    def __init__(self, step: int, parts: Mapping[str, Step], problems: Sequence[str] = (), whole: bool = False) -> None:
        """`parts`: at least one file of the step, by instrument. `problems`: why others cannot be read. `whole`: of a
        single file, its rows of -1 as well."""
        assert len(parts) == 1 or not whole
        self.step = step
        self.parts = parts
        self.problems = list(problems)
        self.first = max(parts.values(), key=lambda part: np.count_nonzero(part["row"] >= 0))
        """The file that gives the order."""
        self.place = np.flatnonzero((self.first["row"] >= 0) | whole)
        """[R]: where each response stands in that file."""
        self.group_place = np.arange(self.first.n_groups) if whole else _rollout_groups(self.first)
        """[G]: where each group stands in it."""
        number = np.full(self.first.n_groups, -1)
        number[self.group_place] = np.arange(len(self.group_place))
        self.row: np.ndarray = self.first["row"][self.place]
        self.group: np.ndarray = number[self.first["group"][self.place]]
        self.offsets = offsets_of(self.first["length"][self.place])
        self.token_id: np.ndarray = _flat(self.first["token_id"], _token_places(self.first, self.place))
        self._members = np.split(
            np.argsort(self.group, kind="stable"),
            np.cumsum(np.bincount(self.group, minlength=len(self.group_place)))[:-1],
        )
        self._columns: dict[tuple[str, str], np.ndarray | None] = {}
        self._places = {name: self._joined(name, part) for name, part in parts.items()}

    def __repr__(self) -> str:
        return f"StepTable({self.step}: {', '.join(self.parts)}; {self.n_responses} responses, {self.n_tokens} tokens)"

    @property
    def n_groups(self) -> int:
        return len(self.group_place)

    @property
    def n_responses(self) -> int:
        return len(self.row)

    @property
    def n_tokens(self) -> int:
        return len(self.token_id)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that its files have."""
        return list(dict.fromkeys(name for _, part in self._by_precedence() for name in part.columns))

    def members(self, g: int) -> np.ndarray:
        """The responses of group g."""
        return self._members[g]

    def everyone(self) -> Iterator[tuple[int, int, int]]:
        """(group, index in it, response) of every response, group after group."""
        for g, members in enumerate(self._members):
            for index, r in enumerate(members.tolist()):
                yield g, index, r

    def tokens(self, r: int) -> slice:
        """Where the tokens of response r stand in token columns."""
        return slice(int(self.offsets[r]), int(self.offsets[r + 1]))

    def tokens_of(self, responses: Iterable[int]) -> np.ndarray:
        """Where the tokens of these responses stand, one response after the other."""
        spans = [np.arange(self.offsets[r], self.offsets[r + 1]) for r in responses]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)

    def ids(self, r: int) -> np.ndarray:
        """The token ids of response r."""
        return self.token_id[self.tokens(r)]

    def prompt(self, g: int) -> np.ndarray:
        """The token ids of the prompt of group g."""
        return self.first.ragged("prompt_ids", int(self.group_place[g]))

    def expected(self, g: int) -> np.ndarray:
        """The token ids of the right answer, from any file that has it; empty where none does."""
        for name, part in self.parts.items():
            there = int(self.groups_in(name)[g])
            if "expected_ids" in part and there >= 0 and len(ids := part.ragged("expected_ids", there)):
                return ids
        return np.empty(0, np.int32)

    def responses_in(self, instrument: str) -> np.ndarray:
        """[R]: where each response stands in the file of an instrument; -1 = it is not there."""
        return self._places.get(instrument, np.full(self.n_responses, -1))

    def groups_in(self, instrument: str) -> np.ndarray:
        """[G]: where each group stands in the file of an instrument; -1 = it is not there."""
        if instrument not in self.parts:
            return np.full(self.n_groups, -1)
        part = self.parts[instrument]
        if part is self.first:
            return self.group_place
        own = _rollout_groups(part)
        there = dict(zip(part["group_id"][own].tolist(), own.tolist(), strict=True))
        return np.array([there.get(g, -1) for g in self.first["group_id"][self.group_place].tolist()], np.int64)

    def column(self, name: str, instrument: str = "") -> np.ndarray | None:
        """[G], [R] or [N] by the column's level; None if no file has it. `instrument`: from its file alone."""
        key = (name, instrument)
        if key not in self._columns:
            self._columns[key] = self._column(name, instrument)
        return self._columns[key]

    def need(self, name: str, instrument: str = "") -> np.ndarray:
        """A column that every file of the step has, such as rewards."""
        values = self.column(name, instrument)
        assert values is not None, name
        return values

    def has(self, name: str, r: int) -> bool:
        """Whether the file that a column comes from has response r."""
        kind = self._source(name)
        return kind is not None and bool(self.responses_in(kind)[r] >= 0)

    def value(self, name: str, r: int) -> Any:
        """One number of response r; None where the file with this column lacks it."""
        return self.need(name)[r].item() if self.has(name, r) else None

    def token_table(self) -> dict[str, np.ndarray]:
        """A row per token: step, group_id, response, position, the columns of tokens, responses and groups."""
        response = np.repeat(np.arange(self.n_responses), self.lengths)
        group = self.group[response]
        table = {
            "step": np.full(self.n_tokens, self.step),
            "group_id": self.need("group_id")[group],
            "response": response,
            "position": np.arange(self.n_tokens) - self.offsets[response],
        }
        places: dict[str, Any] = {"token": slice(None), "response": response, "group": group}
        for name in self.columns:
            column = COLUMNS[name]
            is_flat = column.level == "token" or column.ragged_by is None
            if column.level in places and is_flat and not column.is_offsets and name not in ("group", "group_id"):
                table[name] = self.need(name)[places[column.level]]
        return table

    def channels(self) -> dict[str, Column]:
        """The token columns of this step that are colours of the group page."""
        shown = {name: column for name, column in COLUMNS.items() if column.channel}
        stored = set(self.columns)
        return {
            name: column
            for name, column in shown.items()
            if (name in stored if column.derived is None else self.column(name) is not None)
        }

    def pairwise(self, r: int) -> Pairwise | None:
        """The effects of the tokens of response r on others; None where none are stored."""
        for kind, part in self._by_precedence():
            places = self.responses_in(kind)
            if "pairwise" not in part or places[r] < 0:
                continue
            block = part.pairwise(int(places[r]))
            if block is None:
                return None
            members = _numbers_of(places, part.n_responses)[block.members]
            return Pairwise(block.scores[:, members >= 0], members[members >= 0])
        return None

    def _by_precedence(self) -> list[tuple[str, Step]]:
        return sorted(self.parts.items(), key=lambda item: item[1] is not self.first)

    def _source(self, name: str, instrument: str = "") -> str | None:
        """The instrument whose file a column comes from: the one that gives the order, else the first that has it."""
        having = (kind for kind, part in self._by_precedence() if instrument in ("", kind) and name in part)
        return next(having, None)

    def _column(self, name: str, instrument: str) -> np.ndarray | None:
        column = COLUMNS[name]
        if column.derived is not None:
            return column.derived(self)
        kind = self._source(name, instrument)
        if kind is None:
            return None
        part = self.parts[kind]
        values = part[name]
        if column.valid is not None:
            values = np.where(column.valid(part), values, np.float32(np.nan))
        if column.points_at == "response":
            values = _numbers_of(self.responses_in(kind), part.n_responses)[values]
        if column.points_at == "group":
            values = _numbers_of(self.groups_in(kind), part.n_groups)[values]
        if column.level == "group":
            return _spread(values, self.groups_in(kind))
        if column.level == "response":
            return _spread(values, self.responses_in(kind))
        return _spread(values, self._tokens_in(kind))

    def _tokens_in(self, kind: str) -> np.ndarray:
        """[N]: where each token stands in a file; -1 = it is not there."""
        return _token_places(self.parts[kind], self.responses_in(kind), self.lengths)

    def _joined(self, name: str, part: Step) -> np.ndarray:
        """[R]: where each response stands in a file. One of other tokens is of another rollout, and left out."""
        if part is self.first:
            return self.place
        theirs = part["row"]
        if not len(theirs):
            return np.full(self.n_responses, -1)
        order = np.argsort(theirs, kind="stable")
        nearest = order[np.minimum(np.searchsorted(theirs, self.row, sorter=order), len(order) - 1)]
        places = np.where(theirs[nearest] == self.row, nearest, -1)
        foreign = (places >= 0) & (part["length"][places] != self.lengths)
        places[foreign] = -1
        tokens = _token_places(part, places, self.lengths)
        differs = (tokens >= 0) & (part["token_id"][tokens] != self.token_id) if part.n_tokens else tokens >= 0
        foreign[np.repeat(np.arange(self.n_responses), self.lengths)[differs]] = True
        if foreign.any():
            places[foreign] = -1
            self.problems.append(
                f"step {self.step} of {name}: {np.count_nonzero(foreign)} of its responses are not those of "
                f"{self.first.kind} in the same row, so they are left out: it was written by another run"
            )
        return places


def _rollout_groups(part: Step) -> np.ndarray:
    """The groups of a file that belong to the rollout: all but those of which it has rows of -1 only."""
    counts = np.bincount(part["group"], minlength=part.n_groups)
    own = np.bincount(part["group"][part["row"] >= 0], minlength=part.n_groups)
    return np.flatnonzero((own > 0) | (counts == 0))


def _token_places(part: Step, places: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    """Where the tokens of the responses at `places` stand in a file; `lengths` -1s for one that is not there."""
    lengths = part["length"][places] if lengths is None else lengths
    starts = np.where(places >= 0, part["token_offsets"][places], 0) - offsets_of(lengths)[:-1]
    found = np.arange(int(lengths.sum())) + np.repeat(starts, lengths)
    return np.where(np.repeat(places >= 0, lengths), found, -1)


def _numbers_of(places: np.ndarray, count: int) -> np.ndarray:
    """The inverse of `places` in a file: the number here of each of its `count` entries. Index -1 has none, as well."""
    numbers = np.full(count + 1, -1)
    numbers[places[places >= 0]] = np.flatnonzero(places >= 0)
    return numbers


def _spread(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """values[places], with NaN, False or -1 where a place is -1."""
    if len(places) == len(values) and (places == np.arange(len(places))).all():
        return values
    if not len(values):
        values = np.zeros(1, values.dtype)
    gaps = places < 0
    if not gaps.any():
        return values[places]
    if values.dtype.kind in "iu":
        values = values.astype(np.int64)
    gap = {"f": np.nan, "b": False}.get(values.dtype.kind, -1)
    return np.where(gaps, np.array(gap, values.dtype), values[places])


def _flat(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    return values if len(values) == len(places) else values[places]
