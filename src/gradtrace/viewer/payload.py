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

from gradtrace.trace.schema import Selection
from gradtrace.trace.step import Pairwise
from gradtrace.viewer.step_view import GROUP_CHANNELS, LIKELIER, LOSS_MASK, TOKEN_CHANNELS, StepView
from gradtrace.viewer.vocabulary import Vocabulary

MINIATURE_COLUMNS = 180
MOST_POINTS = 1 << 18
"""Points of the tokens page; a larger step is sampled regularly, and the page says so."""
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


def _about(view: StepView) -> dict[str, Any]:
    """What every page of a step is told about it."""
    return {
        "step": view.step,
        "has_entropy": view.channel("entropy") is not None,
        "has_influence": view.influence is not None,
        "meta": view.meta,
        "problems": view.problems,
    }


def step_payload(view: StepView, vocabulary: Vocabulary) -> dict[str, Any]:
    """The table of groups."""
    return {
        **_about(view),
        "groups": [_group_row(view, g, vocabulary) for g in range(view.n_groups)],
        "responses": view.layout.n_responses,
        "tokens": view.n_tokens,
        "credits": view.scores,
        "common_credit": view.common_credit,
        "scales": view.scales,
    }


def _group_row(view: StepView, g: int, vocabulary: Vocabulary) -> dict[str, Any]:
    members = view.members[g]
    rewards = [float(view.layout["reward"][r]) for r in members]
    status = view.status(g)
    row: dict[str, Any] = {
        "group": g,
        "prompt": vocabulary.text(view.layout.group(g).prompt_ids.tolist())[:LONGEST_PROMPT_PREVIEW],
        "responses": len(members),
        "accepted": sum(bool(view.response_value("accepted", r)) for r in members),
        "reward": float(np.mean(rewards)) if rewards else None,
        "best_reward": max(rewards, default=None),
        "constant": len(set(rewards)) == 1,
        "status": status.name.lower() if status is not None else None,
        "length": float(np.mean([view.layout["length"][r] for r in members])) if members else None,
        "longest": max((int(view.layout["length"][r]) for r in members), default=0),
        "credit": next(iter(view.group_scores(g)), None),
    }
    for name in TOKEN_CHANNELS:
        values = view.channel(name)
        if values is None or not members:
            continue
        mine = values[view.places(members)]
        mine = mine[np.isfinite(mine)]
        if name.startswith("influence_") and len(mine):
            positive, negative = mine[mine > 0].sum(), -mine[mine < 0].sum()
            row[name] = {"positive": float(positive), "negative": float(negative)}
        elif len(mine):
            row[name] = float(mine.mean())
    return row


def miniature_columns(view: StepView, g: int) -> int:
    return min(MINIATURE_COLUMNS, max((int(view.layout["length"][r]) for r in view.members[g]), default=0))


def miniatures(view: StepView, credit: str) -> bytes:
    """For every group in order: float32[responses, columns], the strongest influence in each piece of a
    response, accepted responses first."""
    values = view.channel(f"influence_{credit}")
    pictures = []
    for g, members in enumerate(view.members):
        columns = miniature_columns(view, g)
        longest = max((int(view.layout["length"][r]) for r in members), default=0)
        picture = np.full((len(members), columns), np.nan, np.float32)
        accepted_first = sorted(members, key=lambda r: not view.response_value("accepted", r))
        for line, r in enumerate(accepted_first):
            if values is not None:
                picture[line] = _strongest(values[view.tokens(r)], columns, longest)
        pictures.append(picture)
    return float_bytes(pictures)


def _strongest(values: np.ndarray, columns: int, longest: int) -> np.ndarray:
    """float32[columns]: the value of largest size among the tokens that fall into each column."""
    line = np.full(columns, np.nan, np.float32)
    if not len(values):
        return line
    column = np.arange(len(values)) * columns // max(longest, 1)
    order = np.argsort(np.abs(np.nan_to_num(values)), kind="stable")  # the strongest is written last
    line[column[order]] = values[order]
    return line


def group_payload(view: StepView, g: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Everything about a group but its tokens' numbers, which come with `group_tokens`."""
    members = view.members[g]
    group = view.layout.group(g)
    prompt = group.prompt_ids.tolist()
    expected = view.expected_ids(g)
    ids = sorted({*prompt, *expected, *_token_ids(view, members)})
    place = {token_id: index for index, token_id in enumerate(ids)}
    status = view.status(g)
    scores = view.group_scores(g)
    return {
        **_about(view),
        "group": g,
        "groups": view.n_groups,
        "group_id": group.group_id,
        "status": status.name.lower() if status is not None else None,
        "prompt": [place[token_id] for token_id in prompt],
        "expected": [place[token_id] for token_id in expected],
        "vocabulary": vocabulary.entries(ids),
        "responses": [_response(view, r) for r in members],
        "channels": ["token", *(name for name in GROUP_CHANNELS if view.channel(name) is not None)],
        "credits": [score for score in scores if score != LIKELIER],
        "likelier": LIKELIER in scores,
        "scales": view.scales,
        "pairwise": _pairwise_members(view, g),
    }


def _token_ids(view: StepView, members: list[int]) -> list[int]:
    return np.unique(view.layout["token_id"][view.places(members)]).tolist()


def _response(view: StepView, r: int) -> dict[str, Any]:
    selection = view.response_value("selection", r)
    plain = ("row", "reward", "advantage", "optimizer_step", "prompt_influence", "first_wrong")
    return {
        **{name: view.response_value(name, r) for name in plain},
        "reward_parts": view.layout.reward_parts(r),
        "accepted": bool(view.response_value("accepted", r)),
        "length": int(view.layout["length"][r]),
        "finished": bool(view.response_value("finished", r)),
        "selection": Selection(selection).name.lower() if selection is not None else None,
        "segments": _segments(view, r),
    }


def _segments(view: StepView, r: int) -> list[dict[str, Any]] | None:
    """Who wrote which part of a response; None where it is one turn of the policy."""
    parts = view.layout.segments(r)
    if LOSS_MASK not in view.layout or not parts:
        return None
    ends = [*(part.start for part in parts[1:]), int(view.layout["length"][r])]
    return [{**asdict(part), "end": end} for part, end in zip(parts, ends, strict=True)]


def group_tokens(view: StepView, g: int, vocabulary: Vocabulary) -> bytes:
    """float32[channels, tokens of the group], channels as `group_payload` lists them. Channel "token" holds
    indices into the payload's vocabulary."""
    structure = group_payload(view, g, vocabulary)
    rows = view.places(view.members[g])
    ids = np.array(structure["vocabulary"]["ids"], np.int64)
    arrays = [np.searchsorted(ids, view.layout["token_id"][rows])]
    for name in structure["channels"][1:]:
        values = view.channel(name)
        assert values is not None
        arrays.append(values[rows])
    return float_bytes(arrays)


def _pairwise_members(view: StepView, g: int) -> dict[str, Any] | None:
    """Which responses the columns of this group's pairwise blocks stand for; None if no block was stored."""
    columns = _pairwise_columns(view, g)
    if view.influence is None or not columns:
        return None
    local = {theirs: index for index, theirs in enumerate(_traced_members(view, g)) if theirs is not None}
    influence = view.influence
    return {
        "credit": view.meta.get("pairwise_credit"),
        "members": [
            {
                "response": local.get(s),
                "accepted": bool(influence["accepted"][s]),
                "advantage": float(influence["advantage"][s]) if "advantage" in influence else None,
            }
            for s in columns
        ],
    }


def _traced_members(view: StepView, g: int) -> list[int | None]:
    """The influence trace's index of each response of group g."""
    return [view.influence_response.get(r) for r in view.members[g]]


def _pairwise_columns(view: StepView, g: int) -> list[int]:
    """Union of the member lists of a group's responses, own responses first (indices in the influence trace)."""
    own = [theirs for theirs in _traced_members(view, g) if theirs is not None]
    blocks = [_block(view, theirs) for theirs in own]
    found = {member for block in blocks if block is not None for member in block.members.tolist()}
    return [s for s in own if s in found] + sorted(found - set(own))


def _block(view: StepView, theirs: int | None) -> Pairwise | None:
    return view.influence.pairwise(theirs) if view.influence is not None and theirs is not None else None


def pairwise_block(view: StepView, g: int, response: int) -> bytes | None:
    """float32[T_r, members]: what each token of response r does to each member; None if it was not stored."""
    columns = _pairwise_columns(view, g)
    block = _block(view, _traced_members(view, g)[response])
    if block is None:
        return None
    wide = np.full((len(block.scores), len(columns)), np.nan, np.float32)
    place = {s: index for index, s in enumerate(columns)}
    wide[:, [place[s] for s in block.members.tolist()]] = block.scores
    return float_bytes([wide])


def pairwise_column(view: StepView, g: int, target: int) -> bytes | None:
    """float32[tokens of the group]: what every token of the group does to response `target`."""
    traced = _traced_members(view, g)
    goal = traced[target]
    if goal is None:
        return None
    columns: list[np.ndarray] = []
    for r, theirs in zip(view.members[g], traced, strict=True):
        line = np.full(int(view.layout["length"][r]), np.nan, np.float32)
        block = _block(view, theirs)
        if block is not None and goal in block.members:
            line[:] = block.scores[:, block.members.tolist().index(goal)]
        columns.append(line)
    return float_bytes(columns)


def points_payload(view: StepView, vocabulary: Vocabulary) -> dict[str, Any]:
    """What the tokens page needs besides its numbers: which response each point belongs to."""
    responses, total = _point_responses(view)
    stride = max(1, math.ceil(total / MOST_POINTS))
    ids = _token_ids(view, [r for _, _, r in responses])
    return {
        **_about(view),
        "total": total,
        "stride": stride,
        "scored_groups": len({g for g, _, _ in responses}),
        "responses": [
            {"group": g, "response": index, "accepted": bool(view.response_value("accepted", r)),
             "length": int(view.layout["length"][r])}
            for g, index, r in responses
        ],
        "vocabulary": vocabulary.entries(ids),
        "credits": view.scores if view.influence_response else [],
        "common_credit": view.common_credit,
    }  # fmt: skip


def _point_responses(view: StepView) -> tuple[list[tuple[int, int, int]], int]:
    """(group, index in it, response) of the responses on the tokens page: the traced ones, or all if none is."""
    everyone = list(view.everyone())
    chosen = [entry for entry in everyone if entry[2] in view.influence_response] or everyone
    return chosen, sum(int(view.layout["length"][r]) for _, _, r in chosen)


def points(view: StepView, credit: str, vocabulary: Vocabulary) -> bytes:
    """float32[3, points]: vocabulary index, entropy, influence of every `stride`-th token."""
    structure = points_payload(view, vocabulary)
    chosen, _ = _point_responses(view)
    rows = view.places(r for _, _, r in chosen)[:: structure["stride"]]
    missing = np.full(view.n_tokens, np.nan, np.float32)
    entropy, influence = view.channel("entropy"), view.channel(f"influence_{credit}")
    ids = np.array(structure["vocabulary"]["ids"], np.int64)
    return float_bytes(
        [
            np.searchsorted(ids, view.layout["token_id"][rows]),
            (entropy if entropy is not None else missing)[rows],
            (influence if influence is not None else missing)[rows],
        ]
    )
