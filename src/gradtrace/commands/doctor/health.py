"""What is wrong or notable about a run, in words: `examine(open_run(path))`. Used by `gradtrace doctor RUN`.

A *problem* means that something was lost or failed; a *notable* finding may be as it should be, and says how to tell.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.tracin import TRACIN
from gradtrace.instruments.tracin.diagnosis import diagnose_step
from gradtrace.instruments.verify.in_training import VALIDITY, VALIDITY_BASELINE
from gradtrace.instruments.verify.trial import BASELINE
from gradtrace.instruments.verify.verification import judgement
from gradtrace.trace.columns import KINDS, GroupStatus
from gradtrace.trace.files import read_confined
from gradtrace.trace.reader import RunReader
from gradtrace.trace.run_files import is_held
from gradtrace.trace.step import Step

WINDOW = 0.1
"""Share of the steps that "at the beginning" and "at the end" mean, at least 3 steps."""
FEW_STEPS = 6
"""With fewer steps nothing is said about trends."""
COLLAPSED, COLLAPSED_NATS = 0.1, 0.02
"""Entropy below this share of its beginning, or below this many nats per token."""
EXPLODED = 3.0
MOSTLY_CONSTANT = 0.5
OFTEN_CUT = 0.3
SPIKE = 20.0
NEAR_PERFECT = 0.95
OFTEN = 0.5


@dataclass(frozen=True)
class HealthNote:
    is_problem: bool
    """Something was lost or failed; else it is notable."""
    what: str


def problem(what: str) -> HealthNote:
    return HealthNote(True, what)


def notable(what: str) -> HealthNote:
    return HealthNote(False, what)


def examine(run: RunReader) -> list[HealthNote]:
    """Reads the whole run once. Problems come first."""
    rows = run.metrics_by_step()
    findings = [
        *_metrics_findings(rows),
        *_instrument_findings(run, rows),
        *_from_detectors(run),
    ]
    traced = any(run.steps(kind) for kind in run.kinds())
    if not rows and not traced and not is_held(run.path) and not (run.path / "ablation.json").exists():
        findings.append(problem("metrics.jsonl has no line: the run never finished a step."))
    damaged = [problem(f"{each} (left out when reading)") for each in run.verify()]
    return sorted([*damaged, *findings], key=lambda note: not note.is_problem)


def _from_detectors(run: RunReader) -> Iterator[HealthNote]:
    """What the detectors said while it ran, each detector's surest finding."""
    surest: dict[str, dict[str, Any]] = {}
    for finding in run.findings():
        name, known = str(finding.get("detector")), surest.get(str(finding.get("detector")))
        if known is None or float(finding.get("confidence", 0)) > float(known.get("confidence", 0)):
            surest[name] = finding
    for name, finding in surest.items():
        sure = float(finding.get("confidence", 0))
        yield notable(f"step {finding.get('step')}, {name} ({sure:.0%} sure): {finding.get('sentence')}")


class _Series:
    """A metric over the steps that have it."""

    def __init__(self, rows: Mapping[int, Mapping[str, Any]], name: str) -> None:
        found = [(step, row[name]) for step, row in rows.items() if isinstance(row.get(name), int | float)]
        self.steps = [step for step, value in found if math.isfinite(value)]
        self.values = [float(value) for _, value in found if math.isfinite(value)]
        self.non_finite = [step for step, value in found if not math.isfinite(value)]

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def has_trend(self) -> bool:
        return len(self.values) >= FEW_STEPS

    @property
    def window(self) -> int:
        return max(3, round(WINDOW * len(self.values)))

    @property
    def first(self) -> float:
        return statistics.fmean(self.values[: self.window])

    @property
    def last(self) -> float:
        return statistics.fmean(self.values[-self.window :])

    def above(self, limit: float) -> list[int]:
        return [step for step, value in zip(self.steps, self.values, strict=True) if value > limit]


def _some(steps: list[int]) -> str:
    """ "step 3", "steps 3, 4 and 9", "40 steps, the first is 3"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 5:
        return f"steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    return f"{len(steps)} steps, the first is {steps[0]}"


# ---------------------------------------------------------------- training


def _metrics_findings(rows: dict[int, dict[str, Any]]) -> Iterator[HealthNote]:
    skipped = _Series(rows, "actor/skipped_updates")
    if where := skipped.above(0):
        yield problem(
            f"{sum(skipped.values):.0f} updates were skipped because their gradients were not finite ({_some(where)}). "
            "A smaller learning rate, float32 instead of bf16, or actor.optim.grad_clip may help.",
        )
    for name in sorted({name for row in rows.values() for name in row if name.startswith(("actor/", "critic/"))}):
        if bad := _Series(rows, name).non_finite:
            yield problem(f"{name} is not finite in {_some(bad)}.")
    reward = _Series(rows, "critic/rewards/mean")
    yield from _entropy(_Series(rows, "actor/entropy"), reward)
    yield from _constant_groups(rows, reward)
    cut = _Series(rows, "response_length/clip_ratio")
    if cut and cut.last > OFTEN_CUT:
        yield notable(
            f"{cut.last:.0%} of the responses at the end of the run were cut at the length limit, unfinished: raise "
            "rollout.max_new_tokens (TRL: max_completion_length), or use algorithm.overlong.",
        )
    norm = _Series(rows, "actor/grad_norm")
    if norm.has_trend:
        usual = statistics.median(norm.values)
        if usual > 0 and (spikes := norm.above(SPIKE * usual)):
            yield notable(
                f"The gradient norm is more than {SPIKE:.0f} times its median ({usual:.3g}) in {_some(spikes)}.",
            )
    if reward.has_trend:
        noise = statistics.stdev(reward.values[-reward.window :]) / math.sqrt(reward.window)
        if reward.last < NEAR_PERFECT and reward.last - reward.first <= 2 * noise:
            yield notable(
                f"The reward did not rise: {reward.first:.3f} at the beginning, {reward.last:.3f} at the end.",
            )


def _entropy(entropy: _Series, reward: _Series) -> Iterator[HealthNote]:
    if not entropy.has_trend:
        return
    first, last = entropy.first, entropy.last
    if last < COLLAPSED * first or last < COLLAPSED_NATS:
        solved = bool(reward) and reward.last >= NEAR_PERFECT
        meaning = (
            "The reward is near its top, so this is what a solved task looks like."
            if solved
            else "The policy hardly explores and will learn little from here: try clip_high, an entropy bonus, or "
            "fewer updates per rollout; trainer.entropy_probe says which responses do it."
        )
        yield notable(f"Entropy collapsed: from {first:.3f} to {last:.3f} nats per token. {meaning}")
    elif first > 0 and last > EXPLODED * first:
        yield notable(
            f"Entropy rose from {first:.3f} to {last:.3f} nats per token: the policy becomes noise. Lower the learning "
            "rate or the entropy bonus.",
        )


def _constant_groups(rows: dict[int, dict[str, Any]], reward: _Series) -> Iterator[HealthNote]:
    share = _Series(rows, "rollout/groups_constant")
    if share and share.last > MOSTLY_CONSTANT:
        why = ""
        if reward:
            why = " The task has become too easy." if reward.last > 0.5 else " The task is too hard for the policy."
        yield notable(
            f"{share.last:.0%} of the groups at the end of the run have one constant reward, and teach nothing.{why} "
            "algorithm.dynamic_sampling fills the batch with groups that differ.",
        )


# ---------------------------------------------------------------- instruments


def _instrument_findings(run: RunReader, rows: dict[int, dict[str, Any]]) -> Iterator[HealthNote]:
    for name in sorted({name for row in rows.values() for name in row}):
        instrument, _, counter = name.partition("/")
        if instrument in KINDS and counter.removeprefix("debug_") in ("errors", "write_errors"):
            series = _Series(rows, name)
            if series.above(0):
                yield problem(
                    f"{name} is {max(series.values):.0f}, since step {series.above(0)[0]}: steps are missing."
                )
    yield from _influence(run, rows)
    yield from _tracin(run, rows)
    yield from _probe(rows)


def _influence(run: RunReader, rows: dict[int, dict[str, Any]]) -> Iterator[HealthNote]:
    emitted = _Series(rows, "influence_trace/rows_emitted")
    empty = [step for step, value in zip(emitted.steps, emitted.values, strict=True) if value == 0]
    without_contrast = [step for step in empty if rows[step].get("influence_trace/uid_mixed") == 0]
    strange = [step for step in empty if step not in without_contrast]
    if strange:
        yield problem(
            f"The influence trace has no rows in {_some(strange)}, although groups were mixed. "
            "`gradtrace doctor --model` shows which layers gradient reaches.",
        )
    if without_contrast:
        yield notable(
            f"The influence trace has no rows in {_some(without_contrast)}: no group had different rewards.",
        )
    if labels := _Series(rows, "influence_trace/label_r2").above(0.95):
        yield notable(
            f"Influence scores repeat the labels in {_some(labels)}: who was accepted, and how long the response is, "
            "explains more than 95% of the responses' totals (influence_trace/label_r2). With hessian_mode=inverse "
            "raise reg_scale, or use hessian_mode=optimizer.",
        )
    yield from _validity(run, rows)
    counts = Counter(int(status) for step in run.readable_steps(INFLUENCE_TRACE) for status in step["group_status"])
    if counts[GroupStatus.NON_FINITE]:
        yield problem(f"{counts[GroupStatus.NON_FINITE]} traced groups had gradients that were not finite.")
    if counts[GroupStatus.NOT_CAPTURED]:
        yield problem(
            f"{counts[GroupStatus.NOT_CAPTURED]} groups have no scores: not captured, or not in one mini-batch."
        )


def _validity(run: RunReader, rows: dict[int, dict[str, Any]]) -> Iterator[HealthNote]:
    """Whether scores predicted real optimizer steps: checks of training (verify_every), and `gradtrace verify`."""
    names = (VALIDITY, VALIDITY_BASELINE)
    both = [row for row in rows.values() if all(isinstance(row.get(name), int | float) for name in names)]
    if both:
        own, base = ([float(row[name]) for row in both] for name in names)
        said = judgement(
            own, {BASELINE: base}, question="what half of the tokens of some responses do to the objective"
        )[1]
        yield notable(f"{said[0].upper()}{said[1:]} ({len(both)} checks during training).")
    for report in sorted((run.path / "verify").glob("step_*/report.json"))[-1:]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            found = json.loads(read_confined(run.path.resolve(), f"verify/{report.parent.name}/report.json"))
            said = "".join(letter for letter in str(found["verdict"]) if letter.isprintable())
            yield notable(f"{said[0].upper()}{said[1:]} (`gradtrace verify`, step {int(found['step'])}).")


def _tracin(run: RunReader, rows: dict[int, dict[str, Any]]) -> Iterator[HealthNote]:
    remarks = {step.step: _tracin_remarks(step) for step in run.readable_steps(TRACIN)}
    remarked = [number for number, sentences in remarks.items() if sentences]
    if remarked:
        latest = remarked[-1]
        said = " ".join(remarks[latest])
        yield notable(f"TracIn has remarks on {len(remarked)} of {len(remarks)} steps. Step {latest}: {said}")
    fallback = _Series(rows, "tracin/fallback")
    if fallback and np.mean(fallback.values) > OFTEN:
        yield notable(
            f"TracIn fell back to the top fraction in {np.mean(fallback.values):.0%} of the steps: too few scores were "
            "positive. Is the validation set about the same task?",
        )


def _tracin_remarks(step: Step) -> list[str]:
    stored = step.meta.get("diagnosis")
    return [str(sentence) for sentence in stored] if isinstance(stored, list) and stored else diagnose_step(step)


def _probe(rows: dict[int, dict[str, Any]]) -> Iterator[HealthNote]:
    prefix = "entropy_probe/"
    keys = ("delta_h_predicted", "delta_h_measured", "stderr_difference")
    probed = [
        [row[prefix + key] for key in keys]
        for row in rows.values()
        if all(isinstance(row.get(prefix + key), int | float) for key in keys)
    ]
    if len(probed) < FEW_STEPS:
        return
    predicted, measured, error = np.array(probed, dtype=np.float64).T
    outside = np.abs(predicted - measured) > 3 * error + 0.25 * np.abs(measured)
    if outside.mean() > OFTEN:
        yield notable(
            f"The entropy probe's prediction and measurement differ by more than their error and a quarter of the "
            f"change in {outside.mean():.0%} of {len(probed)} steps: too large updates for a linear prediction.",
        )
