"""Pages of instruments: for each kind of trace what its page gets, and which responses a report holds in full.

TracIn, the entropy probe and the table of `gradtrace ablate` have pages of their own. Any other instrument gets a page
that lists its responses with all their numbers and colours their tokens by its token columns, without a line of code
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame import BLAME
from gradtrace.instruments.blame.report import gradient_report
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE, ProbeBatch
from gradtrace.instruments.tracin import TRACIN, TracinReason
from gradtrace.trace.columns import COLUMNS, KINDS, Column, InstrumentRecord
from gradtrace.trace.files import DamagedError, RefusedError, read_confined, size_confined, unseal
from gradtrace.trace.step import Step
from gradtrace.trace.table import StepTable
from gradtrace.viewer.catalog import ABLATION
from gradtrace.viewer.group import LONGEST_PROMPT_PREVIEW
from gradtrace.viewer.vocabulary import Vocabulary

PREVIEW = 240
"""Characters of a response in a list."""
SHOWN_ALWAYS = ("group", "row", "reward", "length", "accepted", "advantage")
"""Columns that every list of responses has."""


def response_payload(step: Step, r: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """{prompt, tokens: indices into vocabulary, channels: {column: [T_r]}}."""
    columns = step.tokens(r)
    prompt = step.group(int(step["group"][r])).prompt_ids
    ids = np.unique(np.concatenate([prompt, columns["token_id"]]))
    return {
        "response": r,
        "prompt": np.searchsorted(ids, prompt).tolist(),
        "tokens": np.searchsorted(ids, columns["token_id"]).tolist(),
        "vocabulary": vocabulary.entries(ids.tolist()),
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


def prompts(step: Step, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    texts = [vocabulary.text(step.group(g).prompt_ids.tolist()) for g in range(step.n_groups)]
    ids = step["group_id"].tolist()
    return [{"group_id": g, "text": text[:LONGEST_PROMPT_PREVIEW]} for g, text in zip(ids, texts, strict=True)]


def scale_top(values: np.ndarray, quantile: float = 0.99) -> float | None:
    """Top of a colour scale, as on the other pages."""
    finite = np.abs(values[np.isfinite(values)])
    if not len(finite):
        return None
    top = float(np.quantile(finite, quantile))
    return top if top > 0 else float(finite.max())


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
    for row, reason in zip(rows, reasons.tolist(), strict=True):
        row["reason"] = REASONS[TracinReason(reason)]
    groups = prompts(step, vocabulary)
    for g, group in enumerate(groups):
        own = step["group"] == g
        group["page"] = None if is_validation[own].any() else traced_groups.get(group["group_id"])
    return {
        "step": step.step,
        "groups": groups,
        "candidates": [row for r, row in enumerate(rows) if not is_validation[r]],
        "validation": [row for r, row in enumerate(rows) if is_validation[r]],
        "diagnosis": step.meta.get("diagnosis", []),
        "meta": {key: value for key, value in step.meta.items() if key != "diagnosis"},
        "columns": [name for name in _MORE if name in step and np.isfinite(step[name].astype(float)).any()],
    }


CHANGES = ("entropy_change", "entropy_change_measured")


def probe_payload(step: Step, vocabulary: Vocabulary) -> dict[str, Any]:
    rows = response_rows(step, vocabulary, ("share",))
    channels = [name for name in ("entropy", "token_share", *CHANGES) if name in step]
    for name in ("entropy", *CHANGES):
        for r, row in enumerate(rows):
            row[name] = _mean(step.ragged(name, r)) if name in step else None
    is_update = step["batch"] == int(ProbeBatch.UPDATE)
    token_is_update = np.repeat(is_update, step["length"])
    changes = [step[name][~token_is_update] for name in CHANGES if name in step]
    return {
        "step": step.step,
        "groups": prompts(step, vocabulary),
        "update": [row for r, row in enumerate(rows) if is_update[r]],
        "evaluation": [row for r, row in enumerate(rows) if not is_update[r]],
        "channels": channels,
        "scales": {
            # predicted and measured share one scale, so that equal colours mean equal changes
            "change": scale_top(np.concatenate(changes)) if changes else None,
            "token_share": scale_top(step["token_share"][token_is_update]) if "token_share" in step else None,
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
    if _is_number(total):
        rest = total - sum(part["value"] for part in parts)
        if abs(rest) > 1e-3 * max(abs(total), *(abs(part["value"]) for part in parts)):
            parts.append(_part("not attributed", rest))
    return parts


def _part(name: str, value: Any, count: int | None = None) -> dict[str, Any]:
    return {"name": name, "value": float(value), "count": count}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


MOST_BYTES = 16 << 20
_PARTS: dict[str, type] = {
    **dict.fromkeys(("name", "recipe"), str),
    **dict.fromkeys(("rollout", "sweep", "baseline", "agreement"), dict),
    **dict.fromkeys(("columns", "cells"), list),
}


class AblationUnreadableError(GradtraceError):
    """ablation.json is there and is not a table."""


def ablation_payload(folder: Path) -> dict[str, Any] | None:
    """None if the folder has no ablation."""
    try:
        if size_confined(folder, ABLATION) is None:
            return None
        data = read_confined(folder, ABLATION, limit=MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise AblationUnreadableError(f"{ABLATION} is larger than {MOST_BYTES >> 20} MB")
        table = unseal(data, strict=False)
    except (RefusedError, DamagedError, OSError) as error:
        raise AblationUnreadableError(f"{ABLATION} cannot be read: {error}") from error
    for name, kind in _PARTS.items():
        if not isinstance(table.get(name), kind):
            raise AblationUnreadableError(f"{ABLATION} has no {name}; `gradtrace ablate collect` writes it anew")
    agreement = table["agreement"]
    names, matrix = agreement.get("names"), agreement.get("matrix")
    square = isinstance(names, list) and isinstance(matrix, list) and len(names) == len(matrix)
    if not square or any(not isinstance(row, list) or len(row) != len(matrix) for row in matrix):
        raise AblationUnreadableError(f"{ABLATION}: the agreement is no square table of its names")
    if not all(isinstance(entry, dict) for entry in [*table["cells"], *table["columns"]]):
        raise AblationUnreadableError(f"{ABLATION}: cells and columns must be objects")
    return table


RESPONSES = 24
"""Responses that a report holds in full on either side: most and least helpful, raising and lowering entropy."""

SHOWN_BLAMED = 6
"""Rows of each list of blame."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class InstrumentPage:
    payload: Callable[[Step, Vocabulary, Mapping[int, int]], dict[str, Any]]
    """What the page gets. The mapping leads from a group's id to its index on the group page."""
    in_report: Callable[[dict[str, Any]], Rows]
    """The rows of that payload whose responses a report holds in full."""


def navigation() -> list[dict[str, Any]]:
    """The instruments as the browser knows them: their tabs, and what to say where one was off."""
    return [
        {"kind": name, "label": record.label, "page": record.address, "switch": record.switch}
        for name, record in KINDS.items()
    ]


def kind_of(page: str) -> str | None:
    """The instrument whose page this is."""
    return next((name for name, record in KINDS.items() if record.address == page), None)


def instrument_page(kind: str) -> InstrumentPage:
    return _PAGES.get(kind, _ANY)


def any_payload(step: Step, vocabulary: Vocabulary, _: Mapping[int, int]) -> dict[str, Any]:
    """Every response with all its numbers, and the token columns that can colour its text."""
    record = KINDS[step.kind]
    own = [COLUMNS[name] for name in step.columns if name not in SHOWN_ALWAYS]
    responses = [column for column in own if column.level == "response" and not column.is_offsets]
    tokens = [column for column in own if column.level == "token" and column.dtype == "float32"]
    rows = response_rows(step, vocabulary, tuple(column.name for column in responses))
    for column in responses:
        if column.values is not None:
            for row in rows:
                row[column.name] = column.values(row[column.name]).name.lower().replace("_", " ")
    return {
        "step": step.step,
        "label": record.label,
        "meaning": record.meaning,
        "groups": prompts(step, vocabulary),
        "responses": rows,
        "columns": [_described(column) for column in responses],
        "channels": [{**_described(column), "top": scale_top(step[column.name])} for column in tokens],
        "meta": _explained(record, step.meta),
    }


def blame_payload(step: Step, vocabulary: Vocabulary, groups: Mapping[int, int]) -> dict[str, Any]:
    """As any instrument's page, the largest shares first, with who made the gradient above it."""
    page = any_payload(step, vocabulary, groups)
    page["columns"].sort(key=lambda column: column["name"] not in ("grad_share", "grad_norm"))
    group = step["group"]
    for row in page["responses"] if "opponent" in step else []:
        r = row["opponent"]
        row["opponent"] = f"p{group[r]} r{(group[:r] == group[r]).sum()}" if r >= 0 else "nobody"
    table = StepTable(step.step, {step.kind: step})
    return {**page, "report": gradient_report(table, vocabulary.token_bytes, SHOWN_BLAMED).as_json()}


def _described(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "heading": column.heading or column.name.replace("_", " "),
        "meaning": column.meaning,
        "unit": column.unit,
        "signed": column.is_signed,
    }


def _explained(record: InstrumentRecord, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Numbers and words that the file says about the step as a whole, with their meaning."""
    plain = {key: value for key, value in meta.items() if isinstance(value, str | int | float) and key != "step"}
    return [{"name": key, "value": value, "meaning": record.meta.get(key, "")} for key, value in plain.items()]


def _ends_of_scores(page: dict[str, Any]) -> Rows:
    ranked = sorted(page["candidates"], key=lambda row: row["score"])
    return [*ranked[:RESPONSES], *ranked[-RESPONSES:]]


def _strongest_changes(page: dict[str, Any]) -> Rows:
    update = sorted(page["update"], key=lambda row: -abs(row["share"]))
    changes = sorted(page["evaluation"], key=lambda row: -abs((row["entropy_change"] or 0.0) * row["length"]))
    return [*update[:RESPONSES], *changes[:RESPONSES]]


_PAGES = {
    BLAME: InstrumentPage(blame_payload, lambda page: page["responses"][: 2 * RESPONSES]),
    TRACIN: InstrumentPage(tracin_payload, _ends_of_scores),
    ENTROPY_PROBE: InstrumentPage(lambda step, words, _: probe_payload(step, words), _strongest_changes),
}
_ANY = InstrumentPage(any_payload, lambda page: page["responses"][: 2 * RESPONSES])
