"""One step as the viewer shows it: the entropy trace and the influence trace of a step, put side by side.

The entropy trace holds every response of the rollout, the influence trace only the traced ones. Here the
influence columns are laid over the responses of the entropy trace; what was not traced is NaN. If a run has
only one of the two, that one is the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from gradtrace.trace.kinds.influence_trace import Credit
from gradtrace.trace.reader import Run, StepUnreadableError
from gradtrace.trace.schema import BLAME, ENTROPY_TRACE, INFLUENCE_TRACE, GroupStatus
from gradtrace.trace.step import Step

TOP_QUANTILE = 0.99
"""Colour scales end here, so that one extreme token cannot wash out the rest."""

CREDITS = ("loss_term", "tail", "position")
"""What a score counts, the most telling first."""
LIKELIER = "likelier"
"""The score of a step that makes a token likelier, instead of the step that training takes on it."""
SCORES = (*CREDITS, LIKELIER)
TOKEN_CHANNELS = ("entropy", "log_prob", "mismatch", *(f"influence_{score}" for score in SCORES))
LOSS_MASK = "loss_mask"
"""A channel of the group page: 0 where the policy did not write the token."""
BLAME_CHANNELS = ("token_grad_share", "reference_gap")
"""Channels of the group page that stand in the blame of the step."""
NO_STEP = "no_step"
"""A channel of the group page: 1 where training takes no step on the token, such as a clipped one."""
GROUP_CHANNELS = (*TOKEN_CHANNELS, *BLAME_CHANNELS, NO_STEP, LOSS_MASK)


class StepView:
    def __init__(
        self,
        step: int,
        entropy: Step | None,
        influence: Step | None,
        problems: list[str],
        blame: Step | None = None,
    ) -> None:
        """At least one of the first two traces is there. `problems` says why another one could not be read."""
        self.step = step
        self.entropy = entropy
        self.influence = influence
        self.blame = blame
        self.problems = problems
        layout = entropy if entropy is not None else influence
        assert layout is not None
        self.layout: Step = layout
        self.offsets: np.ndarray = layout["token_offsets"]
        self.group: np.ndarray = layout["group"]
        self.n_groups, self.n_tokens = layout.n_groups, layout.n_tokens
        self.members = members_of(layout)
        """Responses (indices in the layout) of each group."""
        self.meta: dict[str, Any] = influence.meta if influence is not None else {}
        self._channels: dict[str, np.ndarray | None] = {}

    def everyone(self) -> Iterator[tuple[int, int, int]]:
        """(group, index in it, response) of every response."""
        for g, members in enumerate(self.members):
            for index, r in enumerate(members):
                yield g, index, r

    @cached_property
    def influence_group(self) -> dict[int, int]:
        """Group of the layout → group of the influence trace."""
        return {} if self.influence is None else self._groups_in(self.influence)

    def _groups_in(self, trace: Step) -> dict[int, int]:
        """Group of the layout → the same group of another trace."""
        there = {group_id: g for g, group_id in enumerate(trace["group_id"].tolist())}
        here = self.layout["group_id"].tolist()
        return {g: there[group_id] for g, group_id in enumerate(here) if group_id in there}

    @cached_property
    def influence_response(self) -> dict[int, int]:
        """Response of the layout → response of the influence trace, where it was traced."""
        return {} if self.influence is None else self._responses_in(self.influence)

    def _responses_in(self, trace: Step) -> dict[int, int]:
        """Response of the layout → the same response of another trace, where that has it."""
        if trace is self.layout:
            return {response: response for response in range(self.layout.n_responses)}
        pairs: dict[int, int] = {}
        traced = members_of(trace)
        for g, theirs in self._groups_in(trace).items():
            pairs.update(self._match(trace, self.members[g], traced[theirs]))
        return pairs

    def _match(self, trace: Step, ours: list[int], theirs: list[int]) -> Iterator[tuple[int, int]]:
        """Pairs with the same rollout row; where rows are unknown, the same place in a group
        of the same size. The tokens must agree."""
        our_rows, their_rows = self.layout["row"], trace["row"]
        by_row = {int(their_rows[r]): r for r in theirs if their_rows[r] >= 0}
        if not by_row and len(ours) == len(theirs):
            candidates = list(zip(ours, theirs, strict=True))
        else:
            candidates = [(r, by_row[int(our_rows[r])]) for r in ours if int(our_rows[r]) in by_row]
        for r, s in candidates:
            if np.array_equal(token_ids(self.layout, r), token_ids(trace, s)):
                yield r, s

    def status(self, group: int) -> GroupStatus | None:
        """Why the group was or was not scored; None where no influence trace of it exists."""
        theirs = self.influence_group.get(group)
        if self.influence is None or theirs is None:
            return None
        return GroupStatus(self.influence["group_status"][theirs])

    def tokens(self, response: int) -> slice:
        return slice(int(self.offsets[response]), int(self.offsets[response + 1]))

    def places(self, responses: Iterable[int]) -> np.ndarray:
        """Where the tokens of these responses stand in the layout, one response after the other."""
        spans = [np.arange(self.offsets[r], self.offsets[r + 1]) for r in responses]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)

    def channel(self, name: str) -> np.ndarray | None:
        """float32[n_tokens] in the layout's order, NaN where nothing was traced; None if no file has it."""
        if name not in self._channels:
            self._channels[name] = self._make_channel(name)
        return self._channels[name]

    def _make_channel(self, name: str) -> np.ndarray | None:
        if name == "mismatch":  # the trainer's log-prob minus the sampler's
            ratio = self._make_channel("ratio")
            return None if ratio is None else np.log(ratio)
        if self.layout is not self.influence and name in self.layout:
            return self.layout[name].astype(np.float32)
        trace = self.blame if name in BLAME_CHANNELS else self.influence
        if trace is None or name not in trace:
            return None
        found = trace[name].astype(np.float32)
        if name.startswith("influence_"):
            found[~self._scored(name)] = np.nan
        if self.layout is trace:
            return found
        pairs = self.influence_response if trace is self.influence else self._responses_in(trace)
        values = np.full(self.n_tokens, np.nan, np.float32)
        offsets = trace["token_offsets"]
        for response, theirs in pairs.items():
            values[self.tokens(response)] = found[offsets[theirs] : offsets[theirs + 1]]
        return values

    def _scored(self, name: str) -> np.ndarray:
        """bool[tokens of the influence trace]: where a column of scores means something. A token must be captured;
        columns of loss terms hold zeros for responses without them. With credit=both the file names position for all
        responses, and those with loss terms are the ones that have any."""
        assert self.influence is not None
        captured: np.ndarray = self.influence["captured"]
        if "credit" not in self.influence or name in ("influence_tail", "influence_position"):
            return captured
        offsets = self.influence["token_offsets"]
        has_terms = self.influence["credit"] == int(Credit.LOSS_TERM)
        if "influence_loss_term" in self.influence:
            not_zero = np.concatenate([[0], np.cumsum(self.influence["influence_loss_term"] != 0)])
            has_terms = has_terms | (np.diff(not_zero[offsets]) > 0)
        return captured & np.repeat(has_terms, np.diff(offsets))

    @cached_property
    def scales(self) -> dict[str, float | None]:
        """Top of the step-wide colour scale of each channel; None where there is nothing to scale."""
        tops: dict[str, float | None] = {}
        for name in TOKEN_CHANNELS:
            values = self.channel(name)
            finite = np.abs(values[np.isfinite(values)]) if values is not None else np.empty(0)
            tops[name] = float(np.quantile(finite, TOP_QUANTILE)) if len(finite) else None
        return tops

    @cached_property
    def scores(self) -> list[str]:
        """Scores that this step's influence trace holds, those by credit first."""
        return [score for score in SCORES if self.channel(f"influence_{score}") is not None]

    @property
    def credits(self) -> list[str]:
        return [score for score in self.scores if score != LIKELIER]

    def group_scores(self, group: int) -> list[str]:
        """Scores that a group has; the first is the most telling one."""
        tokens = [self.tokens(r) for r in self.members[group]]
        found = {score: self.channel(f"influence_{score}") for score in self.scores}
        return [s for s, v in found.items() if v is not None and any(np.isfinite(v[t]).any() for t in tokens)]

    @cached_property
    def common_credit(self) -> str | None:
        """The most telling credit that every scored group has: only then can groups be compared."""
        scored = [scores for g in range(self.n_groups) if (scores := self.group_scores(g))]
        shared = [credit for credit in self.credits if all(credit in scores for scores in scored)]
        return next(iter([*shared, *self.credits]), None)

    def expected_ids(self, group: int) -> list[int]:
        """The right answer, from whichever trace has it; empty where none does."""
        candidates = [self.layout.group(group).expected_ids]
        if self.influence is not None and group in self.influence_group:
            candidates.append(self.influence.group(self.influence_group[group]).expected_ids)
        return next((ids.tolist() for ids in candidates if ids is not None and len(ids)), [])

    def response_value(self, name: str, response: int) -> Any:
        """A response column from whichever trace has it (influence first: it knows more), as a plain value."""
        theirs = self.influence_response.get(response)
        if self.influence is not None and theirs is not None and name in self.influence:
            return self.influence[name][theirs].item()
        return self.layout[name][response].item() if name in self.layout else None


def token_ids(step: Step, response: int) -> np.ndarray:
    offsets = step["token_offsets"]
    return step["token_id"][offsets[response] : offsets[response + 1]]


def members_of(step: Step) -> list[list[int]]:
    """The responses of each group."""
    lists: list[list[int]] = [[] for _ in range(step.n_groups)]
    for response, group in enumerate(step["group"].tolist()):
        lists[group].append(response)
    return lists


def load_step_view(run: Run, step: int) -> StepView | None:
    """The step from the traces that have it and are readable; None if none is. `problems` tells the rest."""
    traces: dict[str, Step | None] = {}
    problems = []
    for kind in (ENTROPY_TRACE, INFLUENCE_TRACE, BLAME):
        traces[kind] = None
        if step in run.entries(kind):
            try:
                traces[kind] = run.step(kind, step)
            except StepUnreadableError as error:
                problems.append(str(error))
    if traces[ENTROPY_TRACE] is None and traces[INFLUENCE_TRACE] is None:
        if problems:
            raise StepUnreadableError("; ".join(problems))
        return None
    return StepView(step, traces[ENTROPY_TRACE], traces[INFLUENCE_TRACE], problems, traces[BLAME])
