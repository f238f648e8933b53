"""One response of a TracIn or probe step: its prompt, its tokens, and every column there is one of per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtrace.trace.schema import COLUMNS
from gradtrace.trace.step import Step
from gradtrace.viewer.vocabulary import Vocabulary

PREVIEW = 240
"""Characters of a response in a list."""
SHOWN_ALWAYS = ("group", "row", "reward", "length", "accepted", "advantage")
"""Columns that every list of responses has."""


def response_payload(step: Step, r: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """{prompt, tokens: indices into vocabulary, channels: {column: [T_r]}}."""
    columns = step.tokens(r)
    prompt = step.group(int(step["group"][r])).prompt_ids.tolist()
    ids = sorted({*prompt, *columns["token_id"].tolist()})
    place = {token_id: index for index, token_id in enumerate(ids)}
    return {
        "response": r,
        "prompt": [place[token_id] for token_id in prompt],
        "tokens": [place[token_id] for token_id in columns["token_id"].tolist()],
        "vocabulary": vocabulary.entries(ids),
        "channels": {name: values.tolist() for name, values in columns.items() if COLUMNS[name].dtype == "float32"},
    }


def response_rows(step: Step, vocabulary: Vocabulary, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What lists show of every response; indices are those of the file. `more`: further columns, None where missing."""
    offsets, tokens = step["token_offsets"].tolist(), step["token_id"]
    names = (*SHOWN_ALWAYS, *more)
    columns = {name: step[name].tolist() if name in step else [None] * step.n_responses for name in names}
    rows = []
    for r in range(step.n_responses):
        # A token is at least one character, so that this many tokens are enough.
        ids = tokens[offsets[r] : min(offsets[r + 1], offsets[r] + PREVIEW)].tolist()
        row = {"response": r, **{name: values[r] for name, values in columns.items()}}
        rows.append({**row, "text": vocabulary.text(ids)[:PREVIEW]})
    return rows


def prompts(step: Step, vocabulary: Vocabulary, longest: int) -> list[dict[str, Any]]:
    return [
        {
            "group": g,
            "group_id": int(step["group_id"][g]),
            "text": vocabulary.text(step.group(g).prompt_ids.tolist())[:longest],
        }
        for g in range(step.n_groups)
    ]


def scale_top(values: np.ndarray, quantile: float = 0.99) -> float | None:
    """Top of a colour scale, as on the other pages."""
    finite = np.abs(values[np.isfinite(values)])
    if not len(finite):
        return None
    top = float(np.quantile(finite, quantile))
    return top if top > 0 else float(finite.max())
