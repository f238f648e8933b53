"""Can each row of a data set be judged, and is its own solution right? `gradtrace doctor --task` asks this."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradtrace.commands.eval.evaluation import find_source
from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Item
from gradtrace.tasks.datasets import messages_of
from gradtrace.tasks.prepare.recipes import PREPARATIONS
from gradtrace.tasks.rewards import RewardFunction, named_reward
from gradtrace.tasks.sandbox import missing_isolation
from gradtrace.tasks.sources import Row, read_source


@dataclass
class RowsReport:
    source: str
    reward: str
    """Its name."""
    rows: int
    judged: int = 0
    """Rows by which a response can be judged."""
    references: int = 0
    """Reference solutions that were run."""
    passed: int = 0
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_rows(name: str, reward_name: str | None) -> RowsReport:
    """Check the rows of data/NAME, or of a source."""
    source = find_source(name, "") if name in PREPARATIONS else name
    rows = read_source(source, "--task")
    reward = named_reward(reward_name or reward_of(rows, name, source))
    report = RowsReport(source, f"reward.name={reward.name}", len(rows))
    good = []
    for number, row in enumerate(rows):
        item = item_of(row, f"{source}, row {number}")
        try:
            reward.check([item])
        except GradtraceError as error:
            report.problems.append(str(error))
        else:
            good.append(item)
    report.judged = len(good)
    if reward.name == "code":
        run_references(reward, [item for item in good if item.get("code")], report)
    return report


def reward_of(rows: list[Row], name: str, source: str) -> str:
    known = PREPARATIONS.get(name) or PREPARATIONS.get(str(rows[0].get("data_source")) if rows else "")
    if known is None:
        raise GradtraceError(f"--task {source}: rows of an unknown data set. Say what judges them: --reward code.")
    return known.reward


def item_of(row: Row, where: str) -> Item:
    messages = messages_of(row.get("prompt")) or []
    return {"row": where, **row, "prompt": "\n".join(message["content"] for message in messages)}


def run_references(reward: RewardFunction, items: list[Item], report: RowsReport) -> None:
    """Judge the solutions in the column `code`; one that fails says that no program passes."""
    if not items:
        return
    if why_not := missing_isolation():
        report.remarks.append(f"Reference solutions were not run: this machine isolates no programs ({why_not}).")
        return
    for item in items:
        report.references += 1
        try:
            if reward([item["code"]], [item]) == [1.0]:
                report.passed += 1
            else:
                report.problems.append(f"{item['row']}: its own solution (`code`) does not pass its tests.")
        except GradtraceError as error:
            report.problems.append(str(error))
            report.judged -= 1
