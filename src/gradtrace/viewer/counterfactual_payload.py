"""What the group page shows of counterfactual values: V and ΔV of its tokens, and what follows before and after one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradtrace.instruments.counterfactual.columns import MeasuredGroup, from_step
from gradtrace.instruments.counterfactual.results import Outcome, outcomes, results
from gradtrace.tasks.answers import marked_answer
from gradtrace.trace.step import Step
from gradtrace.viewer.step_view import StepView, token_ids
from gradtrace.viewer.vocabulary import Vocabulary

MOST_ANSWERS = 6
"""Answers that are listed; the rest is summed up."""
EXAMPLES = 3
"""Texts of each answer."""
LONGEST_TEXT = 2000
LONGEST_ANSWER = 60


def measured_group(view: StepView, g: int, trace: Step | None) -> MeasuredGroup | None:
    """What was measured of this group; None where nothing was, or of other responses (a run that was trained anew)."""
    if trace is None:
        return None
    group_id = int(view.layout["group_id"][g])
    found = next((group for group in from_step(trace) if group.group_id == group_id), None)
    own = [token_ids(view.layout, r).tolist() for r in view.members[g]]
    return found if found is not None and found.measurement.responses == own else None


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
    nodes = {"before": tree.node(response, position), "after": tree.node(response, position + 1)}
    found: dict[str, Any] = {}
    for name, node in nodes.items():
        following = outcomes(source, node)
        length = position if name == "before" else position + 1
        found[name] = None if following is None else {
            "value": float(values.value[node]),
            "stderr": float(np.sqrt(values.variance[node])),
            "answers": by_answer(following, length, vocabulary),
        }  # fmt: skip
    return found


def by_answer(following: list[Outcome], length: int, vocabulary: Vocabulary) -> list[dict[str, Any]]:
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
    rest = ranked[MOST_ANSWERS:]
    if rest:
        share = sum(entry["share"] for entry in rest)
        reward = sum(entry["share"] * entry["reward"] for entry in rest) / (share or 1.0)
        texts = sum(entry["texts"] for entry in rest)
        other = {
            "answer": f"{len(rest)} others",
            "reward": reward,
            "share": share,
            "texts": texts,
            "examples": [],
        }
        ranked = [*ranked[:MOST_ANSWERS], other]
    return ranked


def answer_of(text: str) -> str:
    """What a response gives as its answer: what it marks as one, else the end of its last line."""
    kind, answer = marked_answer(text)
    if kind == "plain":
        lines = [line for line in answer.splitlines() if line.strip()] or [""]
        answer = lines[-1].rpartition("=")[2].strip() or lines[-1].strip()
    return answer if len(answer) <= LONGEST_ANSWER else f"… {answer[-LONGEST_ANSWER:]}"
