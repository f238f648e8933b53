"""Can the scores of this model be trusted? Real steps, what scores said of them, and a verdict in words."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.measure import (
    QUESTIONS,
    Effects,
    Pairs,
    Size,
    answers,
    interval,
    pearson,
    planned,
    slope,
    spearman,
    together,
)
from gradtrace.instruments.verify.trial import BASELINE, FREE, Scores, Trial
from gradtrace.intervals import Interval, paired_difference
from gradtrace.terminal import StageProgress
from gradtrace.trace.files import DamagedError, JsonLines, unseal
from gradtrace.trace.results import ResultStore
from gradtrace.trace.run_files import acquire_lock, release_lock

Agreement = dict[str, dict[str, list[float]]]
"""Score → question (a key of `QUESTIONS`, or DONE) → one number per group, in one order for all scores."""
Scoring = Callable[[], Scores]
INFLUENCE, INFLUENCE_OWN = "influence", "influence on own prompt"
OWN = "this run's score"
DONE = "done"
"""The other reading of a score: not what training on the token does, but what the step does to the token."""
TITLES = {name: question.title for name, question in QUESTIONS.items()} | {DONE: "what the step did to it"}


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


FOR_SCORES = 1 / 3
"""Share of the budget after which no further score is begun; that of the verdict always is."""
FEW_GROUPS = 3
"""With fewer groups there is no verdict."""
CLEAR = 0.1
"""A mean that is so much above the baseline's may be real, even if the interval does not say so yet."""
GOOD = 0.7
"""A score whose interval begins here is trusted, even where the baseline is as good."""


def factor_scores() -> dict[str, InfluenceConfig]:
    """Return settings of the other scores: from captured factors, without projection."""
    return {
        "identity, loss term": InfluenceConfig(hessian_mode="identity", pairwise=False),
        "identity, position": InfluenceConfig(hessian_mode="identity", credit="position", pairwise=False),
        "optimizer, position": InfluenceConfig(credit="position", pairwise=False),
    }


def usual_scores(trial: Trial, groups: int) -> dict[str, Scoring]:
    """What the product offers. `groups`: how many have influence on their own prompt."""
    measured = list(trial.members)[:groups]
    return {
        INFLUENCE: trial.influence,
        INFLUENCE_OWN: partial(trial.influence_own, measured),
        **{name: partial(trial.factors, config) for name, config in factor_scores().items()},
    }


def scoring(trial: Trial, config: InfluenceConfig, groups: int) -> Scoring:
    """How a score with these settings is computed."""
    if not config.is_parts:
        return partial(trial.factors, config)
    if asked_of(config) == "token":
        return trial.influence
    return partial(trial.influence_own, list(trial.members)[:groups])


def asked_of(config: InfluenceConfig) -> str:
    """The question that scores with these settings answer."""
    return "token" if config.scope == "all_selected" else "token_own"


def table_of(agreement: Agreement) -> dict[str, dict[str, Interval]]:
    return {n: {kind: interval(values) for kind, values in kinds.items()} for n, kinds in agreement.items()}


def gains_of(agreement: Agreement) -> dict[str, dict[str, Interval]]:
    """What each score has more than the baseline, paired over groups."""
    base = agreement[BASELINE]
    return {
        n: {kind: paired_difference(values, base[kind]) for kind, values in kinds.items()}
        for n, kinds in agreement.items()
    }


@dataclass(frozen=True)
class Books:
    """Sums of influence over groups against what the step did to the groups."""

    predicted: list[float]
    """Of each group."""
    measured: list[float]
    """The change of its objective by the real step, less what momentum and weight decay do alone."""

    @property
    def slope(self) -> float:
        """1: the sums are the changes."""
        return slope(torch.tensor(self.predicted), torch.tensor(self.measured))

    @property
    def pearson(self) -> float:
        return pearson(torch.tensor(self.predicted), torch.tensor(self.measured))


@dataclass(frozen=True, eq=False)
class Verification:
    """How well scores predicted what real optimizer steps do."""

    judged: str
    """The score that the verdict is about."""
    predictions: Mapping[str, Scores]
    effects: list[Effects]
    seconds: float
    """That this call took."""
    done: Mapping[int, Scores] = field(default_factory=dict)
    """Group → row → what the step did to each token's own term, less what momentum and weight decay do alone."""
    left_out: list[str] = field(default_factory=list)
    """Scores that the budget did not reach."""
    question: str = "token"
    """The one that the verdict is about."""
    is_first_step: bool = False
    """Adam's state is empty."""

    @property
    def steps_taken(self) -> int:
        return sum(len(effects.measured) for effects in self.effects)

    @property
    def steps_planned(self) -> int:
        return sum(len(effects.chosen) for effects in self.effects)

    @property
    def agreement(self) -> Agreement:
        found: Agreement = {}
        for name, scores in self.predictions.items():
            found[name] = {key: answers(self.effects, scores, question) for key, question in QUESTIONS.items()}
            pairs = [flat_pairs(scores, rows) for rows in self.done.values()]
            found[name][DONE] = together(pairs, [len(own[0]) > 1 for own in pairs], spearman)
        # Kinds that nothing was planned of, and readings that were not reached, have no column.
        there = {key for kinds in found.values() for key, values in kinds.items() if values}
        return {name: {key: values for key, values in kinds.items() if key in there} for name, kinds in found.items()}

    @property
    def table(self) -> dict[str, dict[str, Interval]]:
        return table_of(self.agreement)

    @property
    def books(self) -> Books:
        """Of the groups in which the judged score has a number for every token."""
        scores = self.predictions[self.judged]
        pairs = [flat_pairs(scores, rows, whole=True) for rows in self.done.values()]
        there = [own for own in pairs if len(own[0])]
        return Books([float(one.sum()) for one, _ in there], [float(other.sum()) for _, other in there])

    @property
    def is_trustworthy(self) -> bool | None:
        """None: too little was measured to say."""
        return self._judgement()[0]

    @property
    def verdict(self) -> str:
        return self._judgement()[1]

    def _judgement(self) -> tuple[bool | None, str]:
        found = {name: kinds[self.question] for name, kinds in self.agreement.items()}
        free = {name: found[name] for name in FREE}
        trusted, said = judgement(found[self.judged], free, self.judged, ASKED[self.question])
        return trusted, f"{said}. {FIRST_STEP}" if self.is_first_step else said

    def record(self) -> dict[str, Any]:
        """Everything that is shown, for report.json."""

        def plain(table: dict[str, dict[str, Interval]]) -> dict[str, Any]:
            return {
                name: {kind: [*map(finite, (v.mean, v.low, v.high)), v.count] for kind, v in kinds.items()}
                for name, kinds in table.items()
            }

        agreement, books = self.agreement, self.books
        return {
            "verdict": self.verdict,
            "trustworthy": self.is_trustworthy,
            "question": ASKED[self.question],
            "judged": self.judged,
            "baseline": BASELINE,
            "groups": len({e.group for e in self.effects if e.measured}),
            "steps_taken": self.steps_taken,
            "steps_planned": self.steps_planned,
            "left_out": self.left_out,
            "first_step": self.is_first_step,
            "columns": "mean, low and high end of a 95 % interval over groups, groups",
            "table": plain(table_of(agreement)),
            "gain_over_baseline": plain(gains_of(agreement)),
            "books": {
                "slope": finite(books.slope),
                "pearson": finite(books.pearson),
                "predicted": books.predicted,
                "measured": books.measured,
            },
            "steps": [
                {
                    "kind": effects.kind,
                    "group": effects.group,
                    "measured": [step[0] for step in effects.measured],
                    "measured_own": [step[1] for step in effects.measured],
                    "predicted": [finite(v) for v in effects.predicted(self.predictions[self.judged])],
                    "baseline": effects.predicted(self.predictions[BASELINE]),
                }
                for effects in self.effects
                if effects.measured
            ],
        }


ASKED = {
    "token": "what training on a token does to the mini-batch's objective",
    "token_own": "what training on a token does to its own prompt's objective",
}
"""The questions that a verdict can be about."""
FIRST_STEP = (
    "Adam's state is empty: its first step is like the gradient's sign and hardly depends on how much a token weighs; "
    "influence then says what the step does to a token"
)


def flat_pairs(scores: Scores, done: Scores, whole: bool = False) -> Pairs:
    """Scores and changes of a group's tokens, one after the other, where there are scores; `whole`: nothing unless
    there are scores of all of them."""
    own = [scores[r] if r in scores else torch.full_like(values, math.nan) for r, values in done.items()]
    predicted, measured = torch.cat(own), torch.cat(list(done.values()))
    known = ~predicted.isnan()
    if whole and not bool(known.all()):
        known = torch.zeros_like(known)
    return predicted[known], measured[known]


def finite(value: float) -> float | None:
    """The value for JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def number(value: float) -> str:
    """ "-.21", ".88", "1.00"."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"


def in_brackets(value: Interval) -> str:
    """ ".88 [.84, .91]"; of one group there is no interval."""
    return (
        number(value.mean) if value.count < 2 else f"{number(value.mean)} [{number(value.low)}, {number(value.high)}]"
    )


def judgement(
    values: Sequence[float],
    free: Mapping[str, Sequence[float]],
    judged: str = OWN,
    question: str = ASKED["token"],
) -> tuple[bool | None, str]:
    """Whether a score is to be trusted, and the sentence that says so. `values`: its correlation in each group; `free`:
    the same of baselines without a gradient, the strongest of which it has to beat."""
    own, base = interval(values), interval(free[BASELINE])
    known = {name: found for name, some in free.items() if (found := interval(some)).count >= FEW_GROUPS}
    rival = max(known, key=lambda name: known[name].mean, default=BASELINE)
    gain = paired_difference(values, free[rival])
    who = "scores of this run" if judged.startswith(("this run", "stored")) else judged
    said = f"{who} predict {question} with {in_brackets(own)}, the baseline {BASELINE} has {in_brackets(base)}"
    if judged == INFLUENCE:
        said = said.replace(" predict ", " predicts ", 1)
    if rival != BASELINE and number(known[rival].mean) != number(base.mean):
        said += f", {rival} {in_brackets(known[rival])}"
    if base.count >= FEW_GROUPS and not own.count:
        return False, f"not trustworthy: {who} are the same for every token"
    if own.count < FEW_GROUPS:
        few = "no group" if not own.count else "1 group" if own.count == 1 else f"{own.count} groups"
        why = f"too little to judge: {few} measured to the end, {FEW_GROUPS} are needed"
        return None, f"{why}; {said}" if own.count else why
    if own.high < 0:
        return False, f"not trustworthy, they point the wrong way: {said}"
    if own.low > 0 and gain.low > 0:
        return True, said
    if own.low >= GOOD:
        return True, f"{said}, which is as good and needs no gradient"
    if gain.mean > CLEAR:
        return None, f"undecided, {own.count} groups are too few to tell them from a baseline: {said}"
    return False, f"not trustworthy, no better than the baseline: {said}"


class Verifier:
    """Scores a trial, takes its steps until the budget is spent, and goes on where it was."""

    def __init__(
        self,
        trial: Trial,
        scores: Mapping[str, Scoring],
        given: Mapping[str, Scores] | None = None,
        size: Size | None = None,
        seed: int = 0,
        store: ResultStore | None = None,
        question: str = "token",
    ) -> None:
        """`scores`: to be computed; `given`: those that are there already. The first of them all is judged. `store`:
        where scores and steps stay."""
        self.trial, self.scores, self.store, self.question = trial, scores, store, question
        self.given = dict(given or {})
        if not trial.members:
            raise GradtraceError(
                "every response has advantage 0: each group's rewards are all alike, and training on it does nothing. "
                "Take more groups, or more responses to each prompt"
            )
        self.effects = planned(trial, size or Size(), seed)

    def run(self, budget: float = math.inf, progress: StageProgress = silent) -> Verification:
        """`budget`: seconds after which no further step begins."""
        begun = time.monotonic()
        with contextlib.ExitStack() as at_the_end:
            if self.store is not None:
                acquire_lock(self.store.folder)
                at_the_end.callback(release_lock, self.store.folder)
            predictions, left_out = self._predictions(begun + FOR_SCORES * budget, progress)
            done = self._done() if time.monotonic() < begun + budget else {}
            self._measure(begun + budget, progress)
        return Verification(
            next(iter(predictions)),
            predictions,
            self.effects,
            time.monotonic() - begun,
            done,
            left_out,
            self.question,
            self.trial.is_first_step,
        )

    def _predictions(self, deadline: float, progress: StageProgress) -> tuple[dict[str, Scores], list[str]]:
        found: dict[str, Scores] = dict(self.given)
        left_out = []
        for done, (name, scoring) in enumerate(self.scores.items()):
            progress("scoring", done, len(self.scores))
            kept = self.store is not None and self.store.has(slug(name))
            if found and time.monotonic() > deadline and not kept:
                left_out.append(name)
                continue
            found[name] = self._kept(slug(name), scoring)
        return found | self.trial.baselines(), left_out

    def _kept(self, name: str, made: Scoring) -> Scores:
        if self.store is None:
            return made()
        kept = self.store.get(name, lambda: {str(r): values for r, values in made().items()})
        return {int(r): values for r, values in kept.items()}

    def _done(self) -> dict[int, Scores]:
        done = self._kept("step_done", lambda: self.trial.done)
        return {group: {r: done[r] for r in rows} for group, rows in self.trial.members.items()}

    def _measure(self, deadline: float, progress: StageProgress) -> None:
        lines = self._kept_steps()
        total = sum(len(effects.chosen) for effects in self.effects)
        for place, effects in enumerate(self.effects):
            while effects.left and time.monotonic() < deadline:
                progress("taking steps", total - sum(e.left for e in self.effects), total)
                effects.take_next(self.trial)
                if lines is not None:
                    lines.append({"of": place, "measured": effects.measured[-1]})
        progress("taking steps", total - sum(e.left for e in self.effects), total)

    def _kept_steps(self) -> JsonLines | None:
        """The file of the steps, those that it holds read."""
        if self.store is None:
            return None
        lines = JsonLines(self.store.folder / "steps.jsonl")
        for line in lines.path.read_bytes().splitlines():
            try:
                record = unseal(line)
            except DamagedError as error:
                raise GradtraceError(f"{lines.path} is damaged: {error}. Delete {lines.path.parent}") from None
            self.effects[record["of"]].measured.append(record["measured"])
        return lines


def slug(name: str) -> str:
    return "score_" + "".join(letter if letter.isalnum() else "_" for letter in name)
