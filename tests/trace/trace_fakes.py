"""Trace columns with known contents, for tests of the files."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.trace.columns import KINDS, GroupStatus, Selection, offsets_of, ragged


def influence_columns(
    seed: int = 0, groups: int = 2, siblings: int = 3, length: int = 5, pairwise: bool = False
) -> dict[str, Any]:
    """`groups` scored groups of `siblings` responses of 1..length tokens, then one skipped group."""
    rng = np.random.default_rng(seed)
    responses = groups * siblings
    lengths = rng.integers(1, length + 1, responses) if length else np.zeros(responses, int)
    tokens = int(lengths.sum())
    prompts, prompt_offsets = ragged([list(range(3 + g)) for g in range(groups + 1)])
    expected, expected_offsets = ragged([[7, 8]] * groups + [[]])
    columns: dict[str, Any] = {
        "group_id": np.arange(groups + 1) * 10,
        "prompt_ids": prompts,
        "prompt_offsets": prompt_offsets,
        "group_status": [GroupStatus.SCORED] * groups + [GroupStatus.CONSTANT_REWARD],
        "expected_ids": expected,
        "expected_offsets": expected_offsets,
        "group": np.repeat(np.arange(groups), siblings),
        "row": np.arange(responses) + 100,
        "reward": (np.arange(responses) % siblings == 0).astype(np.float32),
        "advantage": rng.standard_normal(responses),
        "accepted": np.arange(responses) % siblings == 0,
        "length": lengths,
        "finished": np.ones(responses, bool),
        "selection": np.full(responses, Selection.SELECTED),
        "optimizer_step": np.full(responses, seed),
        "prompt_influence": rng.standard_normal(responses),
        "first_wrong": np.full(responses, -1),
        "token_id": rng.integers(0, 1000, tokens),
        "entropy": rng.random(tokens),
        "log_prob": -rng.random(tokens),
        "influence": rng.standard_normal(tokens),
        "influence_own": rng.standard_normal(tokens),
        "captured": np.ones(tokens, bool),
    }
    if pairwise:
        members = [np.arange(g * siblings, (g + 1) * siblings) for g in columns["group"]]
        columns["pairwise_member"], columns["pairwise_member_offsets"] = ragged(members)
        blocks = lengths * siblings
        columns["pairwise"] = rng.standard_normal(int(blocks.sum()))
        columns["pairwise_offsets"] = offsets_of(blocks)
    return columns


def entropy_columns(seed: int = 0, **sizes: int) -> dict[str, Any]:
    kind = KINDS[ENTROPY_TRACE]
    columns = influence_columns(seed, **sizes)
    return {name: columns[name] for name in kind.required + kind.optional if name in columns}
