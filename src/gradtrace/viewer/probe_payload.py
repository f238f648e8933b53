"""The entropy page of a step: what the update was predicted to do to entropy, what it did, and who did it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtrace.trace.schema import ProbeBatch
from gradtrace.trace.step import Step
from gradtrace.viewer.payload import LONGEST_PROMPT_PREVIEW
from gradtrace.viewer.response_payload import prompts, response_rows, scale_top
from gradtrace.viewer.vocabulary import Vocabulary

CHANGES = ("entropy_change", "entropy_change_measured")


def probe_payload(step: Step, vocabulary: Vocabulary) -> dict[str, Any]:
    rows = response_rows(step, vocabulary, ("share",))
    offsets = step["token_offsets"]
    channels = [name for name in ("entropy", "token_share", *CHANGES) if name in step]
    for name in ("entropy", *CHANGES):
        has_column = name in channels
        values = step[name] if has_column else step["entropy"]
        for r, row in enumerate(rows):
            row[name] = _mean(values[offsets[r] : offsets[r + 1]]) if has_column else None
    is_update = step["batch"] == int(ProbeBatch.UPDATE)
    token_is_update = np.repeat(is_update, np.diff(offsets))
    changes = [step[name][~token_is_update] for name in CHANGES if name in step]
    return {
        "step": step.step,
        "groups": prompts(step, vocabulary, LONGEST_PROMPT_PREVIEW),
        "update": [row for r, row in enumerate(rows) if is_update[r]],
        "evaluation": [row for r, row in enumerate(rows) if not is_update[r]],
        "channels": channels,
        "scales": {
            # predicted and measured share one scale, so that equal colours mean equal changes
            "change": scale_top(np.concatenate(changes)) if changes else None,
            "token_share": scale_top(step["token_share"][token_is_update]) if "token_share" in step else None,
            "entropy": scale_top(step["entropy"]),
        },
        "parts": _parts(step, is_update),
        "meta": step.meta,
    }


def _parts(step: Step, is_update: np.ndarray) -> list[dict[str, Any]]:
    """Rows that sum to the predicted change: responses that raise and lower it, momentum, decay, and a rest if any."""
    shares = step["share"][is_update].astype(np.float64)
    shares = shares[np.isfinite(shares)]
    parts = [
        _part("responses that raise entropy", shares[shares > 0].sum(), int((shares > 0).sum())),
        _part("responses that lower entropy", shares[shares < 0].sum(), int((shares < 0).sum())),
    ]
    for key, name in (("momentum_share", "momentum of earlier batches"), ("decay_share", "weight decay")):
        if _is_number(step.meta.get(key)):
            parts.append(_part(name, step.meta[key]))
    total = step.meta.get("delta_h_predicted")
    if total is not None and _is_number(total):
        rest = float(total) - sum(part["value"] for part in parts)
        if abs(rest) > 1e-3 * max(abs(float(total)), *(abs(part["value"]) for part in parts)):
            parts.append(_part("not attributed", rest))
    return parts


def _part(name: str, value: Any, count: int | None = None) -> dict[str, Any]:
    return {"name": name, "value": float(value), "count": count}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
