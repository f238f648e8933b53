"""The TracIn and entropy-probe pages of a report: one step of each, and the responses that matter most."""

from __future__ import annotations

from typing import Any

from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.schema import ENTROPY_PROBE, TRACIN
from gradtrace.trace.step import Step
from gradtrace.viewer.catalog import RunCatalog, ServedRun
from gradtrace.viewer.probe_payload import probe_payload
from gradtrace.viewer.response_payload import response_payload
from gradtrace.viewer.server import traced_groups
from gradtrace.viewer.tracin_payload import tracin_payload

RESPONSES = 24
"""Responses that a report holds in full on either side: most and least helpful, raising and lowering entropy."""


def score_pages(
    catalog: RunCatalog, served: ServedRun, steps: list[int] | None, remarks: list[str]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """(answers by path, steps by kind). `steps`: those asked for; without one of them that a kind has, its last."""
    answers: dict[str, Any] = {}
    chosen: dict[str, list[int]] = {}
    for kind in (TRACIN, ENTROPY_PROBE):
        there = served.run.steps(kind)
        wanted = [step for step in steps or [] if step in there] or there[-1:]
        chosen[kind] = []
        for number in wanted:
            try:
                step = catalog.trace_step(served, kind, number)
            except StepUnreadableError as error:
                remarks.append(str(error))
                continue
            assert step is not None
            answers |= _tracin(catalog, served, step) if kind == TRACIN else _probe(served, step)
            chosen[kind].append(number)
    return answers, chosen


def _tracin(catalog: RunCatalog, served: ServedRun, step: Step) -> dict[str, Any]:
    groups = traced_groups(catalog, served, step.step)
    page = tracin_payload(step, served.vocabulary, groups)
    ranked = sorted(page["candidates"], key=lambda row: row["score"])
    both_ends = [*ranked[:RESPONSES], *ranked[-RESPONSES:]]
    return _with_responses(f"runs/{served.id}/steps/{step.step}/tracin", page, both_ends, served, step)


def _probe(served: ServedRun, step: Step) -> dict[str, Any]:
    page = probe_payload(step, served.vocabulary)
    update = sorted(page["update"], key=lambda row: -abs(row["share"]))[:RESPONSES]
    changes = sorted(page["evaluation"], key=lambda row: -abs((row["entropy_change"] or 0.0) * row["length"]))
    chosen = [*update, *changes[:RESPONSES]]
    return _with_responses(f"runs/{served.id}/steps/{step.step}/probe", page, chosen, served, step)


def _with_responses(
    path: str, page: dict[str, Any], rows: list[dict[str, Any]], served: ServedRun, step: Step
) -> dict[str, Any]:
    numbers = {row["response"] for row in rows}
    whole = {f"{path}/responses/{r}": response_payload(step, r, served.vocabulary) for r in sorted(numbers)}
    return {path: page, **whole}
