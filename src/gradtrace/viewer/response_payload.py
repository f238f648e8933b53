"""One response of a TracIn or probe step: its prompt, its tokens, and every column there is one of per token."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtrace.trace.schema import COLUMNS
from gradtrace.trace.step import Step
from gradtrace.viewer.vocabulary import Vocabulary

PREVIEW = 240
"""Characters of a response in a list."""


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
        "channels": {
            name: values.tolist() for name, values in columns.items() if COLUMNS[name].dtype == "float32"
        },
    }


def response_rows(step: Step, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """What lists show of every response; indices are those of the file."""
    offsets, tokens = step["token_offsets"], step["token_id"]
    rows = []
    for r in range(step.n_responses):
        ids = tokens[offsets[r] : offsets[r + 1]]
        row = {
            "response": r,
            "group": int(step["group"][r]),
            "row": int(step["row"][r]),
            "reward": float(step["reward"][r]),
            "length": int(step["length"][r]),
            # A token is at least one character, so that this many tokens are enough.
            "text": vocabulary.text(ids[:PREVIEW].tolist())[:PREVIEW],
        }
        for name in ("accepted", "advantage"):
            row[name] = step[name][r].item() if name in step else None
        rows.append(row)
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
