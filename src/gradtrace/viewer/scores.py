"""The influence scores of a step: which it has, which groups were measured, where colour scales end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.influence.books import Books, books_of, remarks, updates_of
from gradtrace.trace.columns import INFLUENCE_SCORES, KINDS, GroupStatus
from gradtrace.trace.reader import RunReader, StepUnreadableError
from gradtrace.trace.table import StepTable

TOP_QUANTILE = 0.99
"""Colour scales end here, so that one extreme token cannot wash out the rest."""

SCORES = (*INFLUENCE_SCORES, "influence_own")
NATS = "nats"


@dataclass(frozen=True)
class Alternatives:
    """The tokens that an optimizer step made likelier in the place of a strong one."""

    response: int
    """Its index in the group."""
    position: int
    gained: list[tuple[int, float, float]]
    """Token id, probability before the step and after it."""


class ScoredStep(StepTable):
    """The step table with what the pages ask about its scores. They are NaN where a token has none."""

    @property
    def meta(self) -> dict[str, Any]:
        return self.parts[INFLUENCE_TRACE].meta if INFLUENCE_TRACE in self.parts else {}

    @cached_property
    def _has_score(self) -> dict[str, np.ndarray]:
        """bool[G] for every score that the step has: the group has any."""
        owner = np.repeat(self.group, self.lengths)
        found = {name: values for name in SCORES if (values := self.column(name)) is not None}
        counts = {name: np.bincount(owner[np.isfinite(each)], minlength=self.n_groups) for name, each in found.items()}
        return {name: each > 0 for name, each in counts.items() if each.any()}

    @cached_property
    def scores(self) -> list[str]:
        """Scores that every scored group of the step has, so that groups can be compared; the default first."""
        is_scored = np.any(list(self._has_score.values()), axis=0) if self._has_score else np.zeros(0, bool)
        return [name for name, has in self._has_score.items() if has[is_scored].all()]

    @property
    def score(self) -> str | None:
        """The score that pages show first."""
        return next(iter(self.scores), None)

    @property
    def unit(self) -> str:
        """Of its scores: nats, or influence where they were made of captured factors."""
        return NATS if "influence" in self._has_score else "influence"

    def group_scores(self, g: int) -> list[str]:
        """Scores of all kinds that a group has, by which its tokens can be coloured; the default first."""
        return [name for name in INFLUENCE_SCORES if name in self._has_score and self._has_score[name][g]]

    @property
    def main_scores(self) -> np.ndarray | None:
        """[N]: the scores that pages show first."""
        return self.need(self.score) if self.score else None

    def books(self, g: int) -> Books | None:
        """What the optimizer step did to the objective of a group; None where scores are not in nats."""
        return books_of(self, g)

    def alternatives(self, g: int) -> list[Alternatives]:
        """Those that the trace holds of a group; entries that it cannot mean are left out."""
        members, found = self.members(g).tolist(), []
        index_of = {int(self.row[r]): index for index, r in enumerate(members)}
        for each in self.meta.get("alternatives") or []:
            try:
                index, position = index_of.get(int(each["row"])), int(each["token"])
                gained = [(int(token), float(before), float(after)) for token, before, after in each["gained"]]
            except (TypeError, KeyError, ValueError):
                continue
            if index is not None and 0 <= position < self.lengths[members[index]]:
                found.append(Alternatives(index, position, gained))
        return found

    def remarks(self, g: int | None = None) -> list[str]:
        """What a reader of the scores of the step, or of a group alone, must know."""
        return remarks(updates_of(self, g))

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
