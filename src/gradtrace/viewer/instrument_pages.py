"""Pages of instruments: for each kind of trace what its page gets, and which responses a report holds in full.

TracIn and the entropy probe have pages of their own. Any other instrument gets a page that lists its responses with all
their numbers and colours their tokens by its token columns, without a line of code here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradtrace.instruments.blame.report import gradient_report
from gradtrace.trace.record import KINDS, InstrumentRecord
from gradtrace.trace.schema import BLAME, COLUMNS, ENTROPY_PROBE, TRACIN, Column
from gradtrace.trace.step import Step
from gradtrace.viewer.payload import LONGEST_PROMPT_PREVIEW
from gradtrace.viewer.probe_payload import probe_payload
from gradtrace.viewer.response_payload import SHOWN_ALWAYS, prompts, response_rows, scale_top
from gradtrace.viewer.tracin_payload import tracin_payload
from gradtrace.viewer.vocabulary import Vocabulary

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
        "groups": prompts(step, vocabulary, LONGEST_PROMPT_PREVIEW),
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
    return {**page, "report": gradient_report(step, vocabulary.token_bytes, SHOWN_BLAMED).as_json()}


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
