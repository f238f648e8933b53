"""What an optimizer step did to the objective of a group, in words: measured, and added up from its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtrace.instruments.influence import INFLUENCE_TRACE

if TYPE_CHECKING:
    from gradtrace.trace.table import StepTable

PREFIXES = ((1.0, ""), (1e-3, "m-"), (1e-6, "µ-"), (1e-9, "n-"))
MINUS = "\u2212"
NAMED_REST = 0.1
"""The part that no term explains is named from this share of the change on."""
NOT_MEASURED = "This group was not measured (trainer.influence_trace.measure=all measures every group)."
BOOKS = ("objective_change", "change_by_batch", "change_by_own", "change_by_momentum")
"""Columns of groups."""
EARLY = "the scores say what the step did to each token, not what training on it did, because Adam's state was empty."
STOOD_STILL = "the weights did not move, because the learning rate was 0."


class Nats:
    """Numbers in nats, m-nats or smaller, so that the largest of them has three digits; as in format.js."""

    def __init__(self, values: Iterable[float]) -> None:
        top = max((abs(value) for value in values if np.isfinite(value)), default=0.0)
        self.scale, prefix = next((each for each in PREFIXES if top >= 0.01 * each[0]), PREFIXES[0 if top == 0 else -1])
        self.unit = f"{prefix}nats"
        shown = top / self.scale
        self.decimals = 2 if shown == 0 else max(0, min(6, 2 - int(np.floor(np.log10(shown)))))

    def plain(self, value: float) -> str:
        text = f"{abs(value) / self.scale:.{self.decimals}f}"
        return text if float(text) == 0 or value >= 0 else MINUS + text

    def signed(self, value: float) -> str:
        text = self.plain(value)
        return text if value <= 0 or float(text) == 0 else f"+{text}"


@dataclass(frozen=True)
class Books:
    """Changes of a group's objective by one optimizer step, in nats."""

    change: float
    """Measured. NaN where the group was not, like all below but `by_batch`."""
    by_batch: float
    """By the mini-batch's gradient: the sum of its tokens' influence."""
    by_own: float = np.nan
    """The part of that by the group's own tokens."""
    by_momentum: float = np.nan

    @property
    def is_measured(self) -> bool:
        return bool(np.isfinite(self.change))

    @property
    def rest(self) -> float:
        """What the parts do not add up to: curvature."""
        return self.change - self.by_batch - self.by_momentum

    def sentence(self) -> str:
        """What the step did, and what of it came from where."""
        if not self.is_measured:
            does, nats = ("raised" if self.by_batch >= 0 else "lowered"), Nats([self.by_batch])
            return (
                f"By the influence of its tokens, this batch's gradient {does} the group's objective by "
                f"{nats.plain(abs(self.by_batch))} {nats.unit}. {NOT_MEASURED}"
            )
        parts = {
            "its own tokens": self.by_own,
            "other prompts of the batch": self.by_batch - self.by_own,
            "momentum": self.by_momentum,
        }
        if abs(self.rest) > NAMED_REST * abs(self.change):
            parts["curvature (the rest)"] = self.rest
        nats = Nats([self.change, *parts.values()])
        does, show = ("raised", nats.plain) if self.change >= 0 else ("lowered", nats.signed)
        told = {who: show(value) for who, value in parts.items()}
        split = [f"{text} by {who}" for who, text in told.items() if any(digit in text for digit in "123456789")]
        shown = f"{nats.plain(abs(self.change))} {nats.unit}"
        return f"This step {does} the group's objective by {shown}{': ' if split else ''}{', '.join(split)}."


def _traced(table: StepTable, g: int) -> list[int]:
    """The responses of group g that the influence trace has."""
    members = table.members(g)
    return members[table.responses_in(INFLUENCE_TRACE)[members] >= 0].tolist()


def books_of(table: StepTable, g: int) -> Books | None:
    """Those of a group; None where its scores are not in nats, or where it has none."""
    values, members = table.column("influence", INFLUENCE_TRACE), _traced(table, g)
    if values is None or not members:
        return None
    columns = (table.column(name, INFLUENCE_TRACE) for name in BOOKS)
    stored = [np.nan if each is None else float(each[g]) for each in columns]
    if np.isfinite(stored).all():
        return Books(*stored)
    return Books(np.nan, float(sum(np.nansum(values[table.tokens(r)]) for r in members)))


@dataclass(frozen=True)
class BooksStory:
    sentence: str
    at: tuple[int, int] | None = None
    """The token that it names: its response, its index there."""


def books_story(table: StepTable, g: int, name: Callable[[int], str], text: Callable[[int], str]) -> BooksStory | None:
    """What the optimizer step did to a group, and which token made most of it. `name` of a response, `text` of a token
    id."""
    books = books_of(table, g)
    if books is None:
        return None
    parts, at = [books.sentence()], None
    if books.is_measured and (at := _more_than_half(table, _traced(table, g), books.by_own)):
        r, position = at
        token = text(int(table.ids(r)[position]))
        parts.append(f"More than half of the first is token {position} of {name(r)}, {token}.")
    return BooksStory(" ".join([*parts, *_less_likely(table, _traced(table, g))]), at)


def _more_than_half(table: StepTable, members: list[int], total: float) -> tuple[int, int] | None:
    """The token that makes more than half of a sum over these responses; None where no single one does."""
    best, at = 0.5, None
    values = table.column("influence_own", INFLUENCE_TRACE)
    if values is None or not total:
        return None
    for r in members:
        shares = np.nan_to_num(values[table.tokens(r)]) / total
        if len(shares) and shares.max() > best:
            best, at = float(shares.max()), (r, int(shares.argmax()))
    return at if best <= 1.0 else None


def _less_likely(table: StepTable, members: list[int]) -> list[str]:
    """A sentence where accepted responses lost probability by the step (likelihood displacement)."""
    change = table.column("log_prob_change")
    if change is None:
        return []
    good = [r for r in members if table.need("accepted", INFLUENCE_TRACE)[r]]
    fallen = sum(bool(np.nansum(change[table.tokens(r)]) < 0) for r in good)
    which = "the accepted answer" if len(good) == 1 else f"{fallen} of {len(good)} accepted answers"
    return [f"It made {which} less likely."] if fallen else []


def updates_of(table: StepTable, g: int | None = None) -> list[dict[str, Any]]:
    """The optimizer steps that the influence trace describes; those that trained on a group alone."""
    meta = table.parts[INFLUENCE_TRACE].meta if INFLUENCE_TRACE in table.parts else {}
    known = [each for each in meta.get("updates") or [] if isinstance(each, dict)]
    if g is None or not known:
        return known
    own = set(table.need("optimizer_step", INFLUENCE_TRACE)[_traced(table, g)].tolist())
    return [each for each in known if each.get("optimizer_step") in own]


def remarks(updates: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a reader of the scores of these optimizer steps must know."""
    known = [each for each in updates if isinstance(each, Mapping)]
    still = [each for each in known if each.get("learning_rate") == 0]
    early = [each for each in known if each.get("second_moment") == "batch_gradient" and each not in still]
    found = []
    for those, sentence in ((still, STOOD_STILL), (early, EARLY)):
        if those:
            some = f"In {len(those)} of the {len(known)} optimizer steps " if len(those) < len(known) else ""
            found.append(some + sentence if some else sentence[0].upper() + sentence[1:])
    return found
