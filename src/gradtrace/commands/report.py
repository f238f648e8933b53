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
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.commands import add_runs_dir
from gradtrace.commands.pages import write_page
from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import KINDS, GroupStatus
from gradtrace.trace.reader import StepUnreadableError
from gradtrace.viewer.bundle import single_page
from gradtrace.viewer.catalog import RunCatalog, ServedRun, chosen_runs, is_run, run_news
from gradtrace.viewer.counterfactual import counterfactual_payload, measured_group
from gradtrace.viewer.group import group_tokens, json_bytes, miniatures, pairwise_block, points, points_payload
from gradtrace.viewer.pages import ablation_payload, instrument_page, navigation, response_payload
from gradtrace.viewer.scores import SCORES, ScoredStep
from gradtrace.viewer.server import told_group, told_run, told_step, traced_groups

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
    add_runs_dir(parser)
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
    paths = chosen_runs(args.runs, args.runs_dir)
    output = Path(args.output or f"{paths[0].resolve().name}-report.html")
    report = make_report(paths, steps=args.steps, groups=args.groups, max_groups=args.max_groups)
    write_page(output, report.page)
    for remark in report.remarks:
        print(remark)
    print(f"{output}: {len(report.page) / 1e6:.1f} MB, {report.size}")
    return 0


@dataclass
class ReportPage:
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
        return f"ReportPage({self.size}, {len(self.page) / 1e6:.1f} MB of HTML in .page)"

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame that can run its own script and reach nothing else."""
        source = html.escape(self.page, quote=True)
        return (
            f'<iframe srcdoc="{source}" sandbox="allow-scripts" width="100%" height="{self.height}" '
            'style="border: 1px solid #8884; border-radius: 4px" title="gradtrace report"></iframe>'
        )


def show(run: Any, *, steps: list[int] | None = None, groups: list[int] | None = None, height: int = 760) -> ReportPage:
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
) -> ReportPage:
    """`steps`, `groups`: those to hold; without them the interesting ones."""
    return _Report(paths, groups, max_groups).make(steps)


class _Report:
    """Collects what the page would ask the viewer's server for, by its address there."""

    def __init__(self, paths: list[Path], groups: list[int] | None, max_groups: int) -> None:
        self.catalog = RunCatalog(paths, None)
        self.served = [each for each in map(self.catalog.get, range(len(paths))) if each is not None]
        self.first = self.served[0]
        """The run whose steps are shown; of the others there are curves."""
        self.chosen_groups, self.max_groups = groups, max_groups
        self.json: dict[str, Any] = {}
        self.floats: dict[str, str] = {}
        self.steps: dict[str, list[int]] = {}
        """The steps that are held of each instrument with a page of its own, and of all others under ""."""
        self.groups = 0
        self.pairwise_bytes = 0
        self.remarks: list[str] = []

    def make(self, steps: list[int] | None) -> ReportPage:
        self.steps[""] = self._interesting_steps() if steps is None else steps
        for step in self.steps[""]:
            self._add_step(step)
        for kind, record in KINDS.items():
            if record.address is not None:
                self._add_pages(kind, record.address, steps or [])
        for each in self.served:
            self._add_run(each)
        self.json["runs"] = {
            "runs": [self._listed(each) for each in self.served],
            "default": [each.id for each in self.served],
            "skipped": [],
            "instruments": navigation(),
        }
        data = json_bytes({"json": self.json, "floats": self.floats})
        page = single_page(data, f"{self.first.name} · gradtrace report")
        return ReportPage(page, len(self.steps[""]), self.groups, self.remarks)

    # ------------------------------------------------------------ runs

    def _add_run(self, served: ServedRun) -> None:
        news = run_news(served, 0, 0, {})
        if news["state"] in ("live", "quiet"):
            news["state"] = "stopped"  # a report does not go on
        for kind, trace in news["traces"].items():
            held = self.steps.get(kind, self.steps[""]) if served is self.first else []
            trace["steps"] = [entry for entry in trace["steps"] if entry["step"] in held]
            trace["count"] = len(trace["steps"])
            trace["present"] = bool(trace["steps"])
        path = f"runs/{served.id}"
        self.json[f"{path}/findings"] = {"findings": served.run.findings()}
        self.json[f"{path}/story"] = {"sentence": told_run(served)}
        table = ablation_payload(served.run.path)
        if table is not None:
            self.json[f"{path}/ablation"] = table
        self.json[f"{path}/news"] = news

    def _listed(self, served: ServedRun) -> dict[str, Any]:
        news = self.json[f"runs/{served.id}/news"]
        return {
            "id": served.id,
            "name": served.name,
            "state": news["state"],
            "traced_steps": len(self.steps[""]) if served is self.first else 0,
            "written": news["written"],
        }

    def _add_pages(self, kind: str, address: str, asked: list[int]) -> None:
        """An instrument's page with the responses that matter most: of the steps asked for, or else of its last."""
        there = self.first.run.steps(kind)
        self.steps[kind] = []
        for number in [step for step in asked if step in there] or there[-1:]:
            try:
                step = self.catalog.trace_step(self.first, kind, number)
            except StepUnreadableError as error:
                self.remarks.append(str(error))
                continue
            assert step is not None
            source, vocabulary = instrument_page(kind), self.first.vocabulary
            page = source.payload(step, vocabulary, traced_groups(self.catalog, self.first, number))
            path = f"runs/{self.first.id}/steps/{number}/{address}"
            self.json[path] = page
            for r in sorted({row["response"] for row in source.in_report(page)}):
                self.json[f"{path}/responses/{r}"] = response_payload(step, r, vocabulary)
            self.steps[kind].append(number)

    # ------------------------------------------------------------ steps

    def _interesting_steps(self) -> list[int]:
        """The first and the last step with a scored group, without any the last traced one; those of the surest
        findings, and the last ones with counterfactual values."""
        run, scored = self.first.run, list[int]()
        numbers = run.steps(INFLUENCE_TRACE)
        for candidates in (numbers, numbers[::-1]):
            scored += itertools.islice(filter(self._has_scores, candidates), 1)
        traced = run.steps(ENTROPY_TRACE) or numbers
        found = sorted(self._findings(), key=lambda each: -each.get("confidence", 0.0))
        told = [each["step"] for each in found if each.get("step") in traced][:FINDING_STEPS]
        measured = [step for step in run.steps(COUNTERFACTUAL) if step in traced][-FINDING_STEPS:]
        return sorted({*(scored or traced[-1:]), *told, *measured})

    def _has_scores(self, step: int) -> bool:
        try:
            view = self.catalog.step_view(self.first, step)
        except StepUnreadableError:
            return False
        return view is not None and any(view.status(g) == GroupStatus.SCORED for g in range(view.n_groups))

    def _findings(self) -> list[dict[str, Any]]:
        found = self.first.run.findings()
        return [each for each in found if isinstance(each.get("confidence", 0.0), int | float)]

    def _add_step(self, step: int) -> None:
        served = self.first
        view = self.catalog.step_view(served, step)
        if view is None:
            raise GradtraceError(f"{served.name} has no trace of step {step}; `gradtrace trace ls` lists its steps")
        base = f"runs/{served.id}/steps/{step}"
        table = told_step(view, served)
        self.json[base] = table
        scores = view.scores or [SCORES[0]]
        for score in scores:
            floats = points(view, score, served.vocabulary)
            if len(floats) <= POINTS_BUDGET:
                self._add_floats(f"{base}/points?score={score}", floats)
            self._add_floats(f"{base}/miniatures?score={score}", miniatures(view, score))
        if f"{base}/points?score={scores[0]}" in self.floats:
            self.json[f"{base}/tokens"] = points_payload(view, served.vocabulary)
        else:
            self.remarks.append(f"step {step}: its tokens page is left out, it would be too large")
        for g in self._groups_of(view, table) if self.chosen_groups is None else self.chosen_groups:
            if not 0 <= g < view.n_groups:
                raise GradtraceError(f"step {step} has groups 0 to {view.n_groups - 1}, not {g}")
            self._add_group(view, f"{base}/groups/{g}", g)

    def _groups_of(self, view: ScoredStep, table: dict[str, Any]) -> list[int]:
        """Groups with most influence, those that findings name, those with counterfactual values."""
        told = [finding for finding in self._findings() if finding.get("step") == view.step]
        named = [culprit.get("group") for finding in told for culprit in finding.get("culprits", [])]
        measured = np.flatnonzero(view.groups_in(COUNTERFACTUAL) >= 0).tolist()
        return sorted(
            {*_strongest_groups(table, self.max_groups), *(g for g in range(view.n_groups) if g in named), *measured}
        )

    def _add_group(self, view: ScoredStep, path: str, g: int) -> None:
        values = measured_group(view, g)
        structure = told_group(view, g, self.first, values)
        found = [pairwise_block(view, g, r) for r in range(len(view.members(g)))] if structure["pairwise"] else []
        blocks = {r: block for r, block in enumerate(found) if block is not None}
        size = sum(map(len, blocks.values()))
        if self.pairwise_bytes + size > PAIRWISE_BUDGET:
            structure["pairwise"], blocks, size = None, {}, 0
            self.remarks.append(f"{path}: effects on single responses are left out, they would be too large")
        self.pairwise_bytes += size
        self.json[path] = structure
        if values is not None:
            following = counterfactual_payload(values)
            self.json[f"{path}/counterfactual"] = {"measured": following, "resample": False, "run": ""}
        self._add_floats(f"{path}/tokens", group_tokens(view, g, self.first.vocabulary))
        for r, block in blocks.items():
            self._add_floats(f"{path}/pairwise/{r}", block)
        self.groups += 1

    def _add_floats(self, path: str, data: bytes) -> None:
        self.floats[path] = base64.b64encode(data).decode()


def _strongest_groups(table: dict[str, Any], count: int) -> list[int]:
    """Groups by the sum of their |influence|; unscored ones only if there is no other."""

    def strength(group: dict[str, Any]) -> float:
        sums: dict[str, float] = next((group[name] for name in table["scores"] if group.get(name)), {})
        return float(sums.get("positive", 0.0) + sums.get("negative", 0.0))

    ranked = sorted(table["groups"], key=lambda group: -strength(group))
    scored = [group["group"] for group in ranked if group["status"] == "scored"]
    chosen = (scored or [group["group"] for group in ranked])[:count]
    measured = [group["group"] for group in ranked if "change" in group]
    if chosen and measured and not set(measured) & set(chosen):
        chosen[-1] = measured[0]  # one group shows what a step really did
    return chosen
