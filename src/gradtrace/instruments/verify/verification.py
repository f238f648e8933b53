"""Can the scores of this model be trusted? Real steps, what scores said of them, and a verdict in words."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.measure import Effects, Scores, Size, interval, planned
from gradtrace.instruments.verify.trial import BASELINE, FREE, Trial
from gradtrace.intervals import Interval, paired_difference
from gradtrace.terminal import StageProgress
from gradtrace.trace.files import DamagedError, JsonLines, unseal
from gradtrace.trace.results import ResultStore
from gradtrace.trace.run_files import acquire_lock, release_lock

Agreement = dict[str, dict[str, list[float]]]
"""Score → kind of step → one rank correlation per group, in one order for all scores."""
OWN = "this run's score"


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


def exact(**knobs: Any) -> InfluenceConfig:
    """Settings of a score of all groups, without projection."""
    common = {"projection_dim_factor": 0, "loss_term_prompts": 0, "pairwise": False}
    return InfluenceConfig(**{**common, **knobs})


def usual_scores() -> dict[str, InfluenceConfig]:
    """Credit by geometry: what the product offers."""
    credits = {"loss term": "loss_term", "tail": "tail", "position": "position"}
    return {
        f"{geometry}, {name}": exact(hessian_mode=geometry, credit=credit)
        for name, credit in credits.items()
        for geometry in ("optimizer", "identity")
    }


def table_of(agreement: Agreement) -> dict[str, dict[str, Interval]]:
    return {n: {kind: interval(values) for kind, values in kinds.items()} for n, kinds in agreement.items()}


def gains_of(agreement: Agreement) -> dict[str, dict[str, Interval]]:
    """What each score has more than the baseline, paired over groups."""
    base = agreement[BASELINE]
    return {
        n: {kind: paired_difference(values, base[kind]) for kind, values in kinds.items()}
        for n, kinds in agreement.items()
    }


@dataclass(frozen=True, eq=False)
class Verification:
    """How well scores predicted what real optimizer steps do."""

    judged: str
    """The score that the verdict is about."""
    predictions: Mapping[str, Scores]
    effects: list[Effects]
    seconds: float
    """That this call took."""
    left_out: list[str] = field(default_factory=list)
    """Scores that the budget did not reach."""

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
            kinds = found.setdefault(name, {})
            for effects in self.effects:
                known = any(r in scores for step in effects.chosen for r in step)
                kinds.setdefault(effects.kind, []).append(effects.agreement(scores) if known else math.nan)
        return found

    @property
    def table(self) -> dict[str, dict[str, Interval]]:
        return table_of(self.agreement)

    @property
    def is_trustworthy(self) -> bool | None:
        """None: too little was measured to say."""
        return self._judgement()[0]

    @property
    def verdict(self) -> str:
        return self._judgement()[1]

    def _judgement(self) -> tuple[bool | None, str]:
        found = {name: kinds["single_token"] for name, kinds in self.agreement.items()}
        return judgement(found[self.judged], {name: found[name] for name in FREE}, self.judged)

    def record(self) -> dict[str, Any]:
        """Everything that is shown, for report.json."""

        def plain(table: dict[str, dict[str, Interval]]) -> dict[str, Any]:
            return {
                name: {kind: [*map(finite, (v.mean, v.low, v.high)), v.count] for kind, v in kinds.items()}
                for name, kinds in table.items()
            }

        agreement = self.agreement
        return {
            "verdict": self.verdict,
            "trustworthy": self.is_trustworthy,
            "judged": self.judged,
            "baseline": BASELINE,
            "groups": len({tuple(e.groups) for e in self.effects if e.measured}),
            "steps_taken": self.steps_taken,
            "steps_planned": self.steps_planned,
            "left_out": self.left_out,
            "columns": "mean, low and high end of a 95 % interval over groups, groups",
            "table": plain(table_of(agreement)),
            "gain_over_baseline": plain(gains_of(agreement)),
            "steps": [
                {
                    "kind": effects.kind,
                    "group": effects.groups[0],
                    "measured": effects.measured,
                    "predicted": effects.predicted(self.predictions[self.judged]),
                    "baseline": effects.predicted(self.predictions[BASELINE]),
                }
                for effects in self.effects
                if effects.measured
            ],
        }


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
    steps: str = "single-token steps",
) -> tuple[bool | None, str]:
    """Whether a score is to be trusted, and the sentence that says so. `values`: its correlation in each group; `free`:
    the same of baselines without a gradient, the strongest of which it has to beat."""
    own, base = interval(values), interval(free[BASELINE])
    known = {name: found for name, some in free.items() if (found := interval(some)).count >= FEW_GROUPS}
    rival = max(known, key=lambda name: known[name].mean, default=BASELINE)
    gain = paired_difference(values, free[rival])
    who = "scores of this run" if judged.startswith(("this run", "stored")) else judged
    said = f"{who} predict {steps} with {in_brackets(own)}, the baseline {BASELINE} has {in_brackets(base)}"
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
        scores: Mapping[str, InfluenceConfig],
        given: Mapping[str, Scores] | None = None,
        size: Size | None = None,
        seed: int = 0,
        store: ResultStore | None = None,
    ) -> None:
        """`scores`: to be computed; `given`: those that are there already. The first of them all is judged. `store`:
        where scores and steps stay."""
        size = size or Size()
        self.trial, self.scores, self.store = trial, scores, store
        self.given = dict(given or {})
        if not trial.members:
            raise GradtraceError(
                "no group has both accepted and rejected responses: there is no contrast to change. Take "
                "more groups, or more responses to each prompt"
            )
        trial.keep(list(trial.members)[: size.groups])
        self.effects = planned(trial, size, seed)

    def run(self, budget: float = math.inf, progress: StageProgress = silent) -> Verification:
        """`budget`: seconds after which no further step begins."""
        begun = time.monotonic()
        with contextlib.ExitStack() as at_the_end:
            if self.store is not None:
                acquire_lock(self.store.folder)
                at_the_end.callback(release_lock, self.store.folder)
            predictions, left_out = self._predictions(begun + FOR_SCORES * budget, progress)
            self._measure(begun + budget, progress)
        judged = next(iter(predictions))
        return Verification(judged, predictions, self.effects, time.monotonic() - begun, left_out)

    def _predictions(self, deadline: float, progress: StageProgress) -> tuple[dict[str, Scores], list[str]]:
        found: dict[str, Scores] = dict(self.given)
        left_out = []
        for done, (name, config) in enumerate(self.scores.items()):
            progress("scoring", done, len(self.scores))
            kept = self.store is not None and self.store.has(f"score_{slug(name)}")
            if found and time.monotonic() > deadline and not kept:
                left_out.append(name)
                continue
            found[name] = self._score(name, config)
        return found | self.trial.baselines(), left_out

    def _score(self, name: str, config: InfluenceConfig) -> Scores:
        if self.store is None:
            return self.trial.scores(config)
        kept = self.store.get(f"score_{slug(name)}", lambda: {str(r): v for r, v in self.trial.scores(config).items()})
        return {int(r): values for r, values in kept.items()}

    def _measure(self, deadline: float, progress: StageProgress) -> None:
        lines = self._kept_steps()
        total = sum(len(effects.chosen) for effects in self.effects)
        for place, effects in enumerate(self.effects):
            while effects.left and time.monotonic() < deadline:
                progress("taking steps", total - sum(e.left for e in self.effects), total)
                effects.take_next(self.trial)
                if lines is not None:
                    lines.append({"of": place, "measured": effects.measured[-1], "norm": effects.norms[-1]})
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
            effects = self.effects[record["of"]]
            effects.measured.append(record["measured"])
            effects.norms.append(record["norm"])
        return lines


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
