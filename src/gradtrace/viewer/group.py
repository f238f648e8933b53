"""What the browser gets: JSON for structure, little-endian float32 for everything there is one of per token.

Responses are numbered r0, r1, … inside their group, as on the page. A value that is missing is null in JSON
and NaN in a binary answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import COLUMNS, KINDS, Selection
from gradtrace.viewer.scores import NATS, ScoredStep
from gradtrace.viewer.vocabulary import Vocabulary

MINIATURE_COLUMNS = 180
MOST_POINTS = 1 << 18
"""Points of the tokens page; a larger step is sampled regularly, and the page says so."""
LOSS_MASK = "loss_mask"
"""0 where the policy did not write the token."""
FURTHER_CHANNELS = (LOSS_MASK, "log_prob_before", "log_prob_after")
"""Token columns that the group page gets beside its colours."""
LONGEST_PROMPT_PREVIEW = 400
"""Characters of a prompt in the table of groups."""


def json_bytes(value: Any) -> bytes:
    return json.dumps(clean(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def clean(value: Any) -> Any:
    """NaN and infinities become null: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def float_bytes(arrays: Iterable[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(array, dtype="<f4").tobytes() for array in arrays)


def _about(table: ScoredStep) -> dict[str, Any]:
    """What every page of a step is told about it."""
    return {
        "step": table.step,
        "has_entropy": table.column("entropy") is not None,
        "has_influence": INFLUENCE_TRACE in table.parts,
        "meta": {key: value for key, value in table.meta.items() if key != "alternatives"} | {"unit": table.unit},
        "problems": table.problems,
    }


def step_payload(table: ScoredStep, vocabulary: Vocabulary) -> dict[str, Any]:
    """The table of groups."""
    return {
        **_about(table),
        "groups": [_group_row(table, g, vocabulary) for g in range(table.n_groups)],
        "responses": table.n_responses,
        "scores": table.scores,
        "scales": table.scales,
        "remarks": table.remarks(),
    }


def _group_row(table: ScoredStep, g: int, vocabulary: Vocabulary) -> dict[str, Any]:
    members = table.members(g)
    rewards, lengths = table.rewards(g), table.lengths[members]
    row: dict[str, Any] = {
        "group": g,
        "prompt": vocabulary.text(table.prompt(g).tolist())[:LONGEST_PROMPT_PREVIEW],
        "responses": len(members),
        "accepted": int(table.accepted[members].sum()),
        "passed": len(table.passed(g)),
        "reward": float(np.mean(rewards)) if rewards else None,
        "constant": len(set(rewards)) == 1,
        "status": table.status_name(g),
        "length": float(lengths.mean()) if len(lengths) else None,
        "columns": miniature_columns(table, g),
    }
    books = table.books(g)
    if books is not None and books.is_measured:
        row["change"] = books.change
    tokens = _group_tokens(table, g)
    for name in table.scales:
        mine = table.need(name)[tokens]
        mine = mine[np.isfinite(mine)]
        if COLUMNS[name].adds_up and len(mine):
            positive, negative = mine[mine > 0].sum(), -mine[mine < 0].sum()
            row[name] = {"positive": float(positive), "negative": float(negative)}
        elif len(mine):
            row[name] = float(mine.mean())
    return row


def miniature_columns(table: ScoredStep, g: int) -> int:
    """Width of a group's picture in `miniatures`."""
    return min(MINIATURE_COLUMNS, int(table.lengths[table.members(g)].max(initial=0)))


def miniatures(table: ScoredStep, score: str) -> bytes:
    """For every group in order: float32[responses, columns], the strongest influence in each piece of a
    response, accepted responses first."""
    values = table.column(score)
    if values is None:
        values = np.full(table.n_tokens, np.nan, np.float32)
    lines = []
    for g in range(table.n_groups):
        members, columns = table.members(g), miniature_columns(table, g)
        longest = int(table.lengths[members].max(initial=1))
        accepted_first = sorted(members, key=lambda r: not table.accepted[r])
        lines += [_strongest(values[table.tokens(r)], columns, longest) for r in accepted_first]
    return float_bytes(lines)


def _strongest(values: np.ndarray, columns: int, longest: int) -> np.ndarray:
    """float32[columns]: the value of largest size among the tokens that fall into each column."""
    line = np.full(columns, np.nan, np.float32)
    column = np.arange(len(values)) * columns // longest
    order = np.argsort(np.abs(np.nan_to_num(values)), kind="stable")  # the strongest is written last
    line[column[order]] = values[order]
    return line


def group_payload(table: ScoredStep, g: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Everything about a group but its tokens' numbers, which come with `group_tokens`."""
    ids = _group_ids(table, g)
    return {
        **_about(table),
        "group": g,
        "status": table.status_name(g),
        "prompt": np.searchsorted(ids, table.prompt(g)).tolist(),
        "expected": np.searchsorted(ids, table.expected(g)).tolist(),
        "vocabulary": vocabulary.entries(ids.tolist()),
        "responses": [_response(table, r) for r in table.members(g)],
        "channels": ["token", *_channels(table, g)],
        "colours": _colours(),
        "scores": table.group_scores(g),
        "scales": table.scales,
        "pairwise": _pairwise_members(table, g),
        "alternatives": _alternatives(table, g, ids),
        "remarks": table.remarks(g),
    }


def _channels(table: ScoredStep, g: int) -> list[str]:
    """Return the token columns that the group page gets: colours and others in which the group has any number."""
    rows = _group_tokens(table, g)
    names = [*table.channels(), *(name for name in FURTHER_CHANNELS if table.column(name) is not None)]
    return [name for name in names if np.isfinite(table.need(name)[rows]).any()]


def _colours() -> dict[str, dict[str, Any]]:
    """The token columns that can be colours of the group page, with what the page says about each."""
    brought = {column.name: record for record in KINDS.values() for column in record.brings}
    return {
        name: {
            "title": column.channel,
            "unit": column.unit,
            "signed": column.is_signed,
            "adds_up": column.adds_up,
            "meaning": column.meaning,
            "written_by": f"{brought[name].label} ({brought[name].switch})" if name in brought else "",
        }
        for name, column in COLUMNS.items()
        if column.channel
    }


def _group_ids(table: ScoredStep, g: int) -> np.ndarray:
    """The token ids of a group in order: an index into its vocabulary is a place in this list."""
    gained = [token for each in table.alternatives(g) for token, _, _ in each.gained]
    own = table.token_id[_group_tokens(table, g)]
    return np.unique(np.concatenate([table.prompt(g), table.expected(g), own, np.array(gained, own.dtype)]))


def _alternatives(table: ScoredStep, g: int, ids: np.ndarray) -> list[dict[str, Any]]:
    """Which tokens gained most in the places of the group's strongest: [index into the vocabulary, probability before
    the step, and after it]."""
    return [
        {
            "response": each.response,
            "position": each.position,
            "gained": [[int(np.searchsorted(ids, token)), *change] for token, *change in each.gained],
        }
        for each in table.alternatives(g)
    ]


def _group_tokens(table: ScoredStep, g: int) -> np.ndarray:
    return table.tokens_of(table.members(g))


def _response(table: ScoredStep, r: int) -> dict[str, Any]:
    selection = table.value("selection", r)
    plain = ("reward", "advantage", "prompt_influence", "first_wrong")
    return {
        **{name: table.value(name, r) for name in plain},
        "reward_parts": table.first.reward_parts(int(table.place[r])),
        "accepted": bool(table.accepted[r]),
        "length": int(table.lengths[r]),
        "finished": bool(table.value("finished", r)),
        "selection": Selection(selection).name.lower() if selection is not None else None,
        "segments": _segments(table, r),
    }


def _segments(table: ScoredStep, r: int) -> list[dict[str, Any]] | None:
    """Who wrote which part of a response; None where it is one turn of the policy."""
    parts = table.first.segments(int(table.place[r]))
    if LOSS_MASK not in table.first or not parts:
        return None
    ends = [*(part.start for part in parts[1:]), int(table.lengths[r])]
    return [{**asdict(part), "end": end} for part, end in zip(parts, ends, strict=True)]


def group_tokens(table: ScoredStep, g: int, vocabulary: Vocabulary) -> bytes:
    """float32[channels, tokens of the group], channels as `group_payload` lists them. Channel "token" holds
    indices into the payload's vocabulary."""
    rows = _group_tokens(table, g)
    indices = np.searchsorted(_group_ids(table, g), table.token_id[rows])
    return float_bytes([indices, *(table.need(name)[rows] for name in _channels(table, g))])


def _pairwise_members(table: ScoredStep, g: int) -> dict[str, Any] | None:
    """Which responses the columns of this group's pairwise blocks stand for; None if no block was stored."""
    columns = _pairwise_columns(table, g)
    local = {r: index for index, r in enumerate(table.members(g).tolist())}
    members = [
        {"response": local.get(r), "accepted": bool(table.accepted[r]), "advantage": table.value("advantage", r)}
        for r in columns
    ]
    if not members:
        return None
    score = "influence_own" if table.unit == NATS else f"influence_{table.meta.get('pairwise_credit')}"
    return {"score": score, "members": members}


def _pairwise_columns(table: ScoredStep, g: int) -> list[int]:
    """Union of the member lists of a group's responses, own responses first."""
    own = table.members(g).tolist()
    blocks = (table.pairwise(r) for r in own)
    found = {member for block in blocks if block is not None for member in block.members.tolist()}
    return [r for r in own if r in found] + sorted(found - set(own))


def pairwise_block(table: ScoredStep, g: int, response: int) -> bytes | None:
    """float32[T_r, members]: what each token of response r does to each member; None if it was not stored."""
    columns = _pairwise_columns(table, g)
    block = table.pairwise(int(table.members(g)[response]))
    if block is None:
        return None
    wide = np.full((len(block.scores), len(columns)), np.nan, np.float32)
    wide[:, [columns.index(r) for r in block.members.tolist()]] = block.scores
    return float_bytes([wide])


def pairwise_column(table: ScoredStep, g: int, target: int) -> bytes | None:
    """float32[tokens of the group]: what every token of the group does to response `target`."""
    goal = table.members(g)[target]
    if table.responses_in(INFLUENCE_TRACE)[goal] < 0:
        return None
    values = np.full(table.n_tokens, np.nan, np.float32)
    for r in table.members(g):
        block = table.pairwise(r)
        if block is not None and goal in block.members:
            values[table.tokens(r)] = block.scores[:, block.members.tolist().index(goal)]
    return float_bytes([values[_group_tokens(table, g)]])


def points_payload(table: ScoredStep, vocabulary: Vocabulary) -> dict[str, Any]:
    """What the tokens page needs besides its numbers: which response each point belongs to."""
    responses = _point_responses(table)
    rows = _point_tokens(table)
    return {
        **_about(table),
        "total": len(rows),
        "stride": _stride(rows),
        "scored_groups": len({g for g, _, _ in responses}),
        "responses": [
            {"group": g, "response": index, "accepted": bool(table.accepted[r]), "length": int(table.lengths[r])}
            for g, index, r in responses
        ],
        "vocabulary": vocabulary.entries(np.unique(table.token_id[rows]).tolist()),
        "scores": table.scores,
    }


def _point_responses(table: ScoredStep) -> list[tuple[int, int, int]]:
    """(group, index in it, response) of the responses on the tokens page: the traced ones, or all if none is."""
    everyone = list(table.everyone())
    is_traced = table.responses_in(INFLUENCE_TRACE) >= 0
    return [entry for entry in everyone if is_traced[entry[2]]] or everyone


def _point_tokens(table: ScoredStep) -> np.ndarray:
    """Where the tokens of these responses stand in token columns."""
    return table.tokens_of(r for _, _, r in _point_responses(table))


def _stride(rows: np.ndarray) -> int:
    """Every so many of them are shown."""
    return max(1, math.ceil(len(rows) / MOST_POINTS))


def points(table: ScoredStep, score: str, vocabulary: Vocabulary) -> bytes:
    """float32[3, points]: vocabulary index, entropy, influence of every `stride`-th token."""
    rows = _point_tokens(table)
    ids, shown = np.unique(table.token_id[rows]), rows[:: _stride(rows)]
    columns = [table.column("entropy"), table.column(score)]
    numbers = [np.full(len(shown), np.nan) if each is None else each[shown] for each in columns]
    return float_bytes([np.searchsorted(ids, table.token_id[shown]), *numbers])
