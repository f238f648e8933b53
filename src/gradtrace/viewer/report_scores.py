"""The instruments' pages of a report: one step of each, and the responses that matter most."""

from __future__ import annotations

from typing import Any

from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.record import KINDS
from gradtrace.viewer.catalog import RunCatalog, ServedRun
from gradtrace.viewer.instrument_pages import instrument_page
from gradtrace.viewer.response_payload import response_payload
from gradtrace.viewer.server import traced_groups


def score_pages(
    catalog: RunCatalog, served: ServedRun, steps: list[int] | None, remarks: list[str]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """(answers by path, steps by kind). `steps`: those asked for; without one of them that a kind has, its last."""
    answers: dict[str, Any] = {}
    chosen: dict[str, list[int]] = {}
    for kind, record in KINDS.items():
        if record.address is None:
            continue
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
            source = instrument_page(kind)
            page = source.payload(step, served.vocabulary, traced_groups(catalog, served, number))
            path = f"runs/{served.id}/steps/{number}/{record.address}"
            answers[path] = page
            for r in sorted({row["response"] for row in source.in_report(page)}):
                answers[f"{path}/responses/{r}"] = response_payload(step, r, served.vocabulary)
            chosen[kind].append(number)
    return answers, chosen
