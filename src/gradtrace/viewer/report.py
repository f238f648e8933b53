"""One HTML file of a run to send to a colleague: curves, a few steps, chosen groups, and a step of TracIn and of the
entropy probe where the run has them. It opens anywhere, offline.

gradtrace report runs/demo                           → demo-report.html, with its findings; groups that these name, and
                                                     those with most influence
gradtrace report runs/demo -o report.html --steps 3 40 --groups 12 7
gradtrace report runs/a runs/b                       the curves of b laid over those of a
"""

from __future__ import annotations

import argparse
import base64
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.record import KINDS
from gradtrace.trace.schema import COUNTERFACTUAL, ENTROPY_TRACE, INFLUENCE_TRACE, GroupStatus
from gradtrace.trace.step import Step
from gradtrace.viewer import payload
from gradtrace.viewer.ablation_payload import ablation_payload
from gradtrace.viewer.bundle import single_page
from gradtrace.viewer.catalog import RunCatalog, ServedRun, is_run
from gradtrace.viewer.counterfactual_payload import counterfactual_payload, measured_group
from gradtrace.viewer.instrument_pages import instrument_page, navigation
from gradtrace.viewer.news import run_news
from gradtrace.viewer.response_payload import response_payload
from gradtrace.viewer.server import told_group, told_run, told_step, traced_groups
from gradtrace.viewer.step_view import StepView

DEFAULT_GROUPS = 6
FINDING_STEPS = 3
"""Steps that a report holds because of what was found or measured in them, of either."""
PAIRWISE_BUDGET = 24 << 20
"""Bytes of effects between single tokens and responses; groups beyond it come without them."""
POINTS_BUDGET = 4 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the run; further ones are laid over its curves")
    add("-o", "--output", help="file to write (default: NAME-report.html)")
    add("--runs-dir", default="runs", help="where runs are looked up by name (default: runs)")
    add(
        "--steps",
        nargs="+",
        type=int,
        metavar="STEP",
        help="default: first and last scored step, and those of findings",
    )
    add("--groups", nargs="+", type=int, metavar="GROUP", help="the same groups of every step")
    add(
        "--max-groups",
        type=int,
        default=DEFAULT_GROUPS,
        help="groups of each step, those with most influence; groups that findings name come besides",
    )


def run(args: argparse.Namespace) -> int:
    from gradtrace.viewer.view import chosen_runs

    paths = chosen_runs(args.runs, Path(args.runs_dir))
    output = Path(args.output or f"{paths[0].resolve().name}-report.html")
    report = make_report(paths, steps=args.steps, groups=args.groups, max_groups=args.max_groups)
    try:
        atomic_write(output, report.page.encode("utf-8", "replace"))
    except OSError as error:
        raise GradtraceError(f"cannot write {output}: {error.strerror}") from error
    for remark in report.remarks:
        print(remark)
    print(f"{output}: {len(report.page) / 1e6:.1f} MB, {report.size}")
    return 0


@dataclass
class Report:
    page: str
    """A complete HTML document."""
    steps: int
    groups: int
    remarks: list[str]
    """What was left out, and why."""
    height: int = 760

    @property
    def size(self) -> str:
        groups, steps = (
            f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((self.groups, "group"), (self.steps, "step"))
        )
        return f"{groups} of {steps}"

    def __repr__(self) -> str:
        """Short, where a notebook's frame is not shown: the page itself is megabytes."""
        return f"Report({self.size}, {len(self.page) / 1e6:.1f} MB of HTML in .page)"

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame that can run its own script and reach nothing else."""
        source = html.escape(self.page, quote=True)
        return (
            f'<iframe srcdoc="{source}" sandbox="allow-scripts" width="100%" height="{self.height}" '
            'style="border: 1px solid #8884; border-radius: 4px" title="gradtrace report"></iframe>'
        )


def show(run: Any, *, steps: list[int] | None = None, groups: list[int] | None = None, height: int = 760) -> Report:
    """A run inside a notebook: `gradtrace.show("runs/demo")` as the last line of a cell.

    `run`: a path, or what `open_run` returned."""
    path = Path(getattr(run, "path", run))
    if not is_run(path):
        raise GradtraceError(f"no run at {path}")
    report = make_report([path], steps=steps, groups=groups)
    report.height = height
    return report


def make_report(
    paths: list[Path],
    *,
    steps: list[int] | None = None,
    groups: list[int] | None = None,
    max_groups: int = DEFAULT_GROUPS,
) -> Report:
    catalog = RunCatalog(paths, None)
    served = [each for each in (catalog.get(run_id) for run_id in range(len(paths))) if each is not None]
    collected = _Collected()
    first = served[0]
    chosen = steps if steps is not None else _interesting_steps(catalog, first)
    for step in chosen:
        _add_step(collected, catalog, first, step, groups, max_groups)
    answers, score_steps = _score_pages(catalog, first, steps, collected.remarks)
    collected.json |= answers
    for each in served:
        news = run_news(each, 0, 0, {})
        if news["state"] in ("live", "quiet"):
            news["state"] = "stopped"  # a report does not go on
        for kind, trace in news["traces"].items():
            held = score_steps.get(kind, collected.steps) if each is first else []
            kept = [entry for entry in trace["steps"] if entry["step"] in held]
            trace["present"] = bool(kept)
            trace["steps"], trace["count"] = kept, len(kept)
        collected.json[f"runs/{each.id}/findings"] = {"findings": each.run.findings()}
        collected.json[f"runs/{each.id}/story"] = {"sentence": told_run(each)}
        table = ablation_payload(each.run.path)
        if table is not None:
            collected.json[f"runs/{each.id}/ablation"] = table
        collected.json[f"runs/{each.id}/news"] = news
    collected.json["runs"] = {
        "runs": [_listed(each, collected) for each in served],
        "default": [each.id for each in served],
        "skipped": [],
        "instruments": navigation(),
    }
    data = payload.json_bytes({"json": collected.json, "floats": collected.floats})
    page = single_page(data, f"{first.name} · gradtrace report")
    return Report(page, len(collected.steps), collected.groups, collected.remarks)


def _score_pages(
    catalog: RunCatalog, served: ServedRun, steps: list[int] | None, remarks: list[str]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The instruments' pages with the responses that matter most: (answers by path, steps by kind). `steps`: those
    asked for; without one of them that a kind has, its last."""
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


class _Collected:
    def __init__(self) -> None:
        self.json: dict[str, Any] = {}
        self.floats: dict[str, str] = {}
        self.steps: list[int] = []
        self.groups = 0
        self.pairwise_bytes = 0
        self.remarks: list[str] = []

    def add_floats(self, path: str, data: bytes) -> None:
        self.floats[path] = base64.b64encode(data).decode()


def _listed(served: ServedRun, collected: _Collected) -> dict[str, Any]:
    news = collected.json[f"runs/{served.id}/news"]
    return {
        "id": served.id,
        "name": served.name,
        "state": news["state"],
        "traced_steps": len(collected.steps) if served.id == 0 else 0,
        "written": news["written"],
    }


def _interesting_steps(catalog: RunCatalog, served: ServedRun) -> list[int]:
    """The first and the last step with a scored group, without any the last traced one; those of the surest findings,
    and the last ones with counterfactual values."""
    scored: list[int] = []
    numbers = served.run.steps(INFLUENCE_TRACE)
    for candidates in (numbers, reversed(numbers)):
        for step in candidates:
            view = _readable(catalog, served, step)
            if view is not None and any(view.status(g) == GroupStatus.SCORED for g in range(view.n_groups)):
                scored.append(step)
                break
    traced = served.run.steps(ENTROPY_TRACE) or numbers
    found = sorted(_findings(served), key=lambda each: -each.get("confidence", 0.0))
    told = [each["step"] for each in found if each.get("step") in traced][:FINDING_STEPS]
    measured = [step for step in served.run.steps(COUNTERFACTUAL) if step in traced][-FINDING_STEPS:]
    return sorted({*(scored or traced[-1:]), *told, *measured})


def _findings(served: ServedRun) -> list[dict[str, Any]]:
    return [each for each in served.run.findings() if isinstance(each.get("confidence", 0.0), int | float)]


def _named_groups(served: ServedRun, step: int, count: int) -> list[int]:
    """Groups of a step that its findings name."""
    culprits = [
        each for finding in _findings(served) if finding.get("step") == step for each in finding.get("culprits", [])
    ]
    named = [each.get("group") for each in culprits]
    return sorted({group for group in named if isinstance(group, int) and 0 <= group < count})


def _readable(catalog: RunCatalog, served: ServedRun, step: int) -> StepView | None:
    try:
        return catalog.step_view(served, step)
    except StepUnreadableError:
        return None


def _add_step(
    collected: _Collected,
    catalog: RunCatalog,
    served: ServedRun,
    step: int,
    groups: list[int] | None,
    max_groups: int,
) -> None:
    view = catalog.step_view(served, step)
    if view is None:
        raise GradtraceError(f"{served.name} has no trace of step {step}; `gradtrace trace` lists what there is")
    base = f"runs/{served.id}/steps/{step}"
    table = told_step(view, served)
    collected.steps.append(step)
    collected.json[base] = table
    collected.json[f"{base}/tokens"] = payload.points_payload(view, served.vocabulary)
    for credit in view.scores or ["position"]:
        points = payload.points(view, credit, served.vocabulary)
        if len(points) <= POINTS_BUDGET:
            collected.add_floats(f"{base}/points?credit={credit}", points)
        collected.add_floats(f"{base}/miniatures?credit={credit}", payload.miniatures(view, credit))
    if f"{base}/points?credit={(view.scores or ['position'])[0]}" not in collected.floats:
        del collected.json[f"{base}/tokens"]
        collected.remarks.append(f"step {step}: its tokens page is left out, it would be too large")
    measured = catalog.trace_step(served, COUNTERFACTUAL, step)
    chosen = {*_strongest_groups(table, max_groups), *_named_groups(served, step, view.n_groups)}
    if measured is not None:
        values = set(measured["group_id"].tolist())
        chosen |= {g for g, group_id in enumerate(view.layout["group_id"].tolist()) if group_id in values}
    for g in groups if groups is not None else sorted(chosen):
        if not 0 <= g < view.n_groups:
            raise GradtraceError(f"step {step} has groups 0 to {view.n_groups - 1}, not {g}")
        _add_group(collected, view, served, f"{base}/groups/{g}", g, measured)


def _strongest_groups(table: dict[str, Any], count: int) -> list[int]:
    """Groups by the sum of their |influence|; unscored ones only if there is no other."""

    def strength(group: dict[str, Any]) -> float:
        sums = group.get(f"influence_{group['credit']}") or {}
        return float(sums.get("positive", 0.0) + sums.get("negative", 0.0))

    ranked = sorted(table["groups"], key=lambda group: -strength(group))
    scored = [group["group"] for group in ranked if group["status"] == "scored"]
    return sorted((scored or [group["group"] for group in ranked])[:count])


def _add_group(
    collected: _Collected, view: StepView, served: ServedRun, path: str, g: int, measured: Step | None
) -> None:
    values = measured_group(view, g, measured)
    structure = told_group(view, g, served, values)
    blocks = {}
    if structure["pairwise"] is not None:
        found = {r: payload.pairwise_block(view, g, r) for r in range(len(view.members[g]))}
        blocks = {r: block for r, block in found.items() if block is not None}
    size = sum(len(block) for block in blocks.values())
    if collected.pairwise_bytes + size > PAIRWISE_BUDGET:
        structure["pairwise"] = None
        blocks = {}
        collected.remarks.append(f"{path}: effects on single responses are left out, they would be too large")
    collected.pairwise_bytes += sum(len(block) for block in blocks.values())
    collected.json[path] = structure
    if values is not None:
        following = counterfactual_payload(values)
        collected.json[f"{path}/counterfactual"] = {"measured": following, "resample": False, "run": ""}
    collected.add_floats(f"{path}/tokens", payload.group_tokens(view, g, served.vocabulary))
    for r, block in blocks.items():
        collected.add_floats(f"{path}/pairwise/{r}", block)
    collected.groups += 1
