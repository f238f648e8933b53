"""The influence scores of a step: which credits it has, which groups can be compared, where colour scales end."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import KINDS, GroupStatus
from gradtrace.trace.reader import RunReader, StepUnreadableError
from gradtrace.trace.table import StepTable

TOP_QUANTILE = 0.99
"""Colour scales end here, so that one extreme token cannot wash out the rest."""

CREDITS = ("loss_term", "tail", "position")
"""What a score counts, the most telling first."""
LIKELIER = "likelier"
"""The score of a step that makes a token likelier, instead of the step that training takes on it."""
SCORES = (*CREDITS, LIKELIER)


class ScoredStep(StepTable):
    """The step table with what the pages ask about its scores. They are NaN where a token has none."""

    @property
    def meta(self) -> dict[str, Any]:
        return self.parts[INFLUENCE_TRACE].meta if INFLUENCE_TRACE in self.parts else {}

    def score(self, name: str) -> np.ndarray | None:
        """[N]: the scores of this name, one of `SCORES`."""
        return self.column(f"influence_{name}")

    @cached_property
    def scores(self) -> list[str]:
        """Scores that the step has, those by credit first."""
        return [name for name in SCORES if self.score(name) is not None]

    @property
    def credits(self) -> list[str]:
        return [name for name in self.scores if name != LIKELIER]

    @cached_property
    def _has_score(self) -> dict[str, np.ndarray]:
        """bool[G] for every score: the group has any."""
        owner = np.repeat(self.group, self.lengths)
        scored = {name: owner[np.isfinite(self.need(f"influence_{name}"))] for name in self.scores}
        return {name: np.bincount(found, minlength=self.n_groups) > 0 for name, found in scored.items()}

    def group_scores(self, g: int) -> list[str]:
        """Scores that a group has; the first is the most telling one."""
        return [name for name, has in self._has_score.items() if has[g]]

    def group_credits(self, g: int) -> list[str]:
        """Those of its scores that are of a step which training takes."""
        return [name for name in self.group_scores(g) if name != LIKELIER]

    @cached_property
    def common_credit(self) -> str | None:
        """The most telling credit that every scored group has: only then can groups be compared."""
        scored = [scores for g in range(self.n_groups) if (scores := self.group_scores(g))]
        shared = [credit for credit in self.credits if all(credit in scores for scores in scored)]
        return next(iter([*shared, *self.credits]), None)

    @property
    def common_scores(self) -> np.ndarray | None:
        """[N]: the scores by which all groups of the step can be compared."""
        return self.score(self.common_credit) if self.common_credit else None

    @cached_property
    def accepted(self) -> np.ndarray:
        """Whether each response was accepted, bool[R]; False where no file has the column."""
        found = self.column("accepted")
        return np.zeros(self.n_responses, bool) if found is None else found

    def rewards(self, g: int) -> list[float]:
        """Return the rewards of a group's responses."""
        return self.need("reward")[self.members(g)].tolist()

    def passed(self, g: int) -> list[int]:
        """Responses of a group that were accepted; of one where all rewards are equal, all if it is above 0."""
        members, rewards = self.members(g).tolist(), set(self.rewards(g))
        if len(rewards) == 1:
            return members if max(rewards) > 0 else []
        return [r for r in members if self.accepted[r]]

    def status(self, g: int) -> GroupStatus | None:
        """Why the group was or was not scored; None where no influence trace of it exists."""
        found = self.column("group_status", INFLUENCE_TRACE)
        return None if found is None or found[g] < 0 else GroupStatus(found[g])

    def status_name(self, g: int) -> str | None:
        """The status of a group as the browser gets it."""
        status = self.status(g)
        return None if status is None else status.name.lower()

    @cached_property
    def scales(self) -> dict[str, float | None]:
        """Top of the step-wide colour scale of each channel; None where there is nothing to scale."""
        values = {name: self.need(name) for name, column in self.channels().items() if column.dtype != "bool"}
        finite = {name: np.abs(each[np.isfinite(each)]) for name, each in values.items()}
        return {name: float(np.quantile(each, TOP_QUANTILE)) if len(each) else None for name, each in finite.items()}


def page_kinds() -> list[str]:
    """The instruments whose tokens are shown on the step, group and tokens pages."""
    return [name for name, record in KINDS.items() if record.address is None]


def load_step(run: RunReader, step: int) -> ScoredStep | None:
    """The step for its pages; None where there are none. Raises `StepUnreadableError` if its files are damaged."""
    if not any(step in run.entries(kind) for kind in page_kinds()):
        return None
    parts, problems = run.parts(step)
    if not any(kind in parts for kind in page_kinds()):
        raise StepUnreadableError("; ".join(problems))
    return ScoredStep(step, parts, problems)
