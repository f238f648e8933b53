"""The TracIn page of a step: scores, what was kept, the validation set, and what is notable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradtrace.trace.schema import TracinReason
from gradtrace.trace.step import Step
from gradtrace.viewer.payload import LONGEST_PROMPT_PREVIEW
from gradtrace.viewer.response_payload import prompts, response_rows
from gradtrace.viewer.step_view import members_of
from gradtrace.viewer.vocabulary import Vocabulary

REASONS = {
    TracinReason.KEPT_POSITIVE: "positive",
    TracinReason.KEPT_TOP_FRACTION: "in the top fraction",
    TracinReason.KEPT_FALLBACK: "fallback: too few were positive",
    TracinReason.KEPT_NOT_LOWEST: "not lowest",
    TracinReason.DROPPED_NEGATIVE: "not positive",
    TracinReason.DROPPED_BELOW_FRACTION: "below the top fraction",
    TracinReason.DROPPED_LOWEST: "lowest",
    TracinReason.DROPPED_NON_FINITE: "its score is not finite",
    TracinReason.KEPT_SCORE_ONLY: "nothing is dropped",
    TracinReason.VALIDATION: "validation",
    TracinReason.KEPT_NO_SIGNAL: "the validation gradient is zero",
    TracinReason.KEPT_ZERO: "zero: neither helps nor harms",
    TracinReason.DROPPED_ZERO: "zero: does not help",
    TracinReason.KEPT_WEIGHTED: "weighted",
}
_MORE = ("score_low", "score_high", "weight", "flipped")


def tracin_payload(step: Step, vocabulary: Vocabulary, traced_groups: Mapping[int, int]) -> dict[str, Any]:
    """`traced_groups`: group_id → index of the group on the group page, where the step has one."""
    reasons = step["reason"]
    is_validation = reasons == int(TracinReason.VALIDATION)
    rows = response_rows(step, vocabulary, ("score", "kept", *_MORE))
    for row, code in zip(rows, reasons.tolist(), strict=True):
        reason = TracinReason(code)
        row["reason"] = REASONS.get(reason, reason.name.lower().replace("_", " "))
    groups = prompts(step, vocabulary, LONGEST_PROMPT_PREVIEW)
    for group, own in zip(groups, members_of(step), strict=True):
        group["page"] = None if is_validation[own].any() else traced_groups.get(group["group_id"])
        for index, r in enumerate(own):
            rows[r]["index"] = index
    diagnosis = step.meta.get("diagnosis")
    return {
        "step": step.step,
        "groups": groups,
        "candidates": [row for r, row in enumerate(rows) if not is_validation[r]],
        "validation": [row for r, row in enumerate(rows) if is_validation[r]],
        "diagnosis": [str(sentence) for sentence in diagnosis] if isinstance(diagnosis, list) else [],
        "meta": {key: value for key, value in step.meta.items() if key != "diagnosis"},
        "columns": [name for name in _MORE if name in step and np.isfinite(step[name].astype(float)).any()],
    }
