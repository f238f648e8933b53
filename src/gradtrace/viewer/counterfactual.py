"""Counterfactual values on the group page: V and ΔV of its tokens, what follows before and after one, and resampling.

"Resample from here" is the one job that a viewer started with `--resample` may run. The viewer itself loads no model;
what samples is given to it by the command (`Sampling`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.counterfactual.columns import MeasuredGroup, from_step
from gradtrace.instruments.counterfactual.measure import ContinuationValue, outcomes, results
from gradtrace.tasks.answers import marked_answer
from gradtrace.viewer.scores import ScoredStep
from gradtrace.viewer.vocabulary import Vocabulary

MOST_ANSWERS = 6
"""Answers that are listed; the rest is summed up."""
EXAMPLES = 3
"""Texts of each answer."""
LONGEST_TEXT = 2000
LONGEST_ANSWER = 60


def measured_group(table: ScoredStep, g: int) -> MeasuredGroup | None:
    """What was measured of this group; None where nothing was, or of other responses (a run that was trained anew)."""
    there = int(table.groups_in(COUNTERFACTUAL)[g])
    if there < 0:
        return None
    file = table.parts[COUNTERFACTUAL]
    joined = table.responses_in(COUNTERFACTUAL)[table.members(g)].tolist()
    return from_step(file)[there] if joined == file.group(there).responses else None


def counterfactual_payload(group: MeasuredGroup | None) -> dict[str, Any] | None:
    """Numbers of every token of the group, in the order of the page's tokens; null where not measured."""
    if group is None:
        return None
    found = results(group.measurement)
    flat: dict[str, Callable[[Any], np.ndarray]] = {
        "delta_v": lambda result: result.delta_v,
        "delta_v_stderr": lambda result: result.stderr,
        "value": lambda result: result.value[1:],
        "value_stderr": lambda result: result.value_stderr[1:],
    }
    return {
        **{name: np.concatenate([pick(result) for result in found]).tolist() for name, pick in flat.items()},
        "prompt_value": float(found[0].value[0]),
        "prompt_value_stderr": float(found[0].value_stderr[0]),
        "bounds": list(group.measurement.stretches().bounds),
        "samples": len(group.measurement.samples),
        "about": {key: value for key, value in group.about.items() if isinstance(value, str | int | float)},
    }


def token_payload(group: MeasuredGroup, response: int, position: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """What the policy writes from before a token of a response, and from after it."""
    source = group.measurement
    values, tree = source.values(), source.tree
    found: dict[str, Any] = {}
    for name, length in {"before": position, "after": position + 1}.items():
        node = tree.node(response, length)
        following = outcomes(source, node)
        found[name] = None if following is None else {
            "value": float(values.value[node]),
            "stderr": float(np.sqrt(values.variance[node])),
            "answers": by_answer(following, length, vocabulary),
        }  # fmt: skip
    return found


def by_answer(following: list[ContinuationValue], length: int, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Outcomes with the same answer and reward together, the likeliest first. Texts begin after `length` tokens."""
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for outcome in following:
        key = (answer_of(vocabulary.words(outcome.ids)), outcome.reward)
        entry = groups.setdefault(key, {"answer": key[0], "reward": key[1], "share": 0.0, "texts": 0, "examples": []})
        entry["share"] += outcome.share
        entry["texts"] += 1
        if len(entry["examples"]) < EXAMPLES:
            text = vocabulary.words(outcome.ids[length:])[:LONGEST_TEXT]
            entry["examples"].append({"text": text, "share": outcome.share, "response": outcome.response})
    ranked = sorted(groups.values(), key=lambda entry: -entry["share"])
    first, rest = ranked[:MOST_ANSWERS], ranked[MOST_ANSWERS:]
    if not rest:
        return first
    share, texts = (sum(entry[name] for entry in rest) for name in ("share", "texts"))
    reward = sum(entry["share"] * entry["reward"] for entry in rest) / (share or 1.0)
    others = {"answer": f"{len(rest)} others", "reward": reward, "share": share, "texts": texts, "examples": []}
    return [*first, others]


def answer_of(text: str) -> str:
    """What a response gives as its answer: what it marks as one, else the end of its last line."""
    kind, answer = marked_answer(text)
    if kind == "plain":
        lines = [line for line in answer.splitlines() if line.strip()] or [""]
        answer = lines[-1].rpartition("=")[2].strip() or lines[-1].strip()
    return answer if len(answer) <= LONGEST_ANSWER else f"… {answer[-LONGEST_ANSWER:]}"


logger = logging.getLogger(__name__)

MOST_K = 512
MOST_TOKENS = 1 << 19
"""Continuations times their longest length in one job."""


class CancelledError(Exception):
    """The visitor does not want the rest."""


Progress = Callable[[int, int], None]
"""Told how many continuations are done, of how many."""


@dataclass(frozen=True)
class Request:
    """k continuations from before and from after a token."""

    run: Path
    step: int
    group: int
    response: int
    position: int
    k: int


class Sampling(Protocol):
    """Loads a run's checkpoint and draws continuations; the viewer only asks for them and shows how far they are."""

    def runs(self) -> list[Path]:
        """The runs that it may sample from: those that the command named."""

    def resample(self, request: Request, most_tokens: int, progress: Progress) -> None:
        """Sample and store; `progress` may raise `CancelledError`, which is passed on."""


class ResampleJob:
    """At most one job at a time; its state is what visitors ask for."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, Any] = {"state": "idle"}

    def state(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._state)

    def start(self, request: Request, run_id: int) -> str:
        """Begin a job; the reason why not, or an empty text."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return "another job is running: wait for it, or cancel it"
            self._cancel.clear()
            where = {name: getattr(request, name) for name in ("step", "group", "response", "position", "k")}
            self._state = {"state": "running", "done": 0, "total": 0, "run": run_id, **where}
            self._thread = threading.Thread(target=self._work, args=(request,), name="gradtrace-resample", daemon=True)
            self._thread.start()
        return ""

    def cancel(self) -> None:
        self._cancel.set()

    def _work(self, request: Request) -> None:
        try:
            self.sampling.resample(request, MOST_TOKENS, self._progress)
            self._set(state="done")
        except CancelledError:
            self._set(state="cancelled")
        except GradtraceError as error:
            self._set(state="failed", error=str(error))
        except Exception as error:  # the page must not wait for ever
            logger.exception("resampling failed")
            self._set(state="failed", error=f"{type(error).__name__}: {error}")

    def _progress(self, done: int, total: int) -> None:
        if self._cancel.is_set():
            raise CancelledError
        self._set(done=done, total=total)

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._state |= changes
