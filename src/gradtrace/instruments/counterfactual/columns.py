"""Measured groups to and from the columns of a step file; what a file holds is enough to go on sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.counterfactual.measure import results
from gradtrace.instruments.counterfactual.tree import Measurement, PrefixTree, Sample
from gradtrace.trace.columns import ragged
from gradtrace.trace.reader import read_run
from gradtrace.trace.step import Step
from gradtrace.trace.writer import TraceWriter

RESPONSE_COLUMNS = ("row", "finished", "accepted", "advantage")
TOKEN_COLUMNS = ("entropy", "log_prob", "loss_mask")


@dataclass(eq=False)
class MeasuredGroup:
    """A group of a training step: its measurement, and what the run's traces know about it."""

    group_id: int
    measurement: Measurement
    about: dict[str, Any]
    """How it was measured: the entry of the group in `meta["measured"]`."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """`RESPONSE_COLUMNS` [R] and `TOKEN_COLUMNS` [tokens], as far as they are known."""


def to_columns(groups: list[MeasuredGroup]) -> dict[str, Any]:
    """The columns of a step file that holds these groups."""
    sources = [group.measurement for group in groups]
    of_groups = [results(source) for source in sources]
    found = [result for own in of_groups for result in own]
    responses = [response for source in sources for response in source.responses]
    first = np.cumsum([0, *(len(source.responses) for source in sources)])
    columns: dict[str, Any] = {"group_id": [group.group_id for group in groups]}
    columns["prompt_ids"], columns["prompt_offsets"] = ragged([source.prompt for source in sources])
    columns["prompt_value"] = np.array([own[0].value[0] for own in of_groups])
    columns["prompt_value_stderr"] = np.array([own[0].value_stderr[0] for own in of_groups])
    columns["group"] = np.repeat(np.arange(len(sources)), np.diff(first))
    columns["reward"] = np.concatenate([source.rewards for source in sources])
    columns["token_id"], columns["token_offsets"] = ragged(responses)
    columns["delta_v"] = np.concatenate([result.delta_v for result in found])
    columns["delta_v_stderr"] = np.concatenate([result.stderr for result in found])
    columns["value"] = np.concatenate([result.value[1:] for result in found])
    columns["value_stderr"] = np.concatenate([result.value_stderr[1:] for result in found])
    columns["sampling_log_prob"] = np.concatenate([own for source in sources for own in source.log_probs])
    for name in (*RESPONSE_COLUMNS, *TOKEN_COLUMNS):
        if all(name in group.columns for group in groups):
            columns[name] = np.concatenate([group.columns[name] for group in groups])
    samples = [(source, at, sample) for source, at in zip(sources, first, strict=False) for sample in source.samples]
    columns["continuation_response"] = np.array([at + s.tree.owner[c.node] for s, at, c in samples], int)
    columns["continuation_start"] = np.array([s.tree.depth[c.node] for s, _, c in samples], int)
    columns["continuation_reward"] = np.array([c.reward for *_, c in samples], np.float32)
    columns["continuation_finished"] = np.array([c.finished for *_, c in samples], bool)
    columns["continuation_ids"], columns["continuation_offsets"] = ragged([c.ids for *_, c in samples])
    return columns


def from_step(step: Step) -> list[MeasuredGroup]:
    """Inverse of `to_columns`. Samples that do not fit the responses, in a file from elsewhere, are left out."""
    about = step.meta.get("measured")
    about = about if isinstance(about, list) else []
    entries = {str(entry.get("group_id")): entry for entry in about if isinstance(entry, dict)}
    return [_group(step, g, entries.get(str(step["group_id"][g]), {})) for g in range(step.n_groups)]


def _group(step: Step, g: int, about: dict[str, Any]) -> MeasuredGroup:
    group = step.group(g)
    tokens = [step.tokens(r) for r in group.responses]
    responses = [own["token_id"].tolist() for own in tokens]
    tree = PrefixTree(responses)
    measured = np.zeros(len(tree), bool)
    measured[0] = np.isfinite(step["prompt_value"][g])
    for path, own in zip(tree.paths, tokens, strict=True):
        measured[path] = np.isfinite(own["value"])
    limit = about.get("max_new_tokens")
    measurement = Measurement(
        prompt=group.prompt_ids.tolist(),
        responses=responses,
        rewards=step["reward"][group.responses].astype(float),
        ended=np.array(
            [
                bool(step["finished"][r]) or len(own) == limit or about.get("max_turns", 1) > 1
                for r, own in zip(group.responses, responses, strict=True)
            ]
        ),
        log_probs=[own["sampling_log_prob"].astype(float) for own in tokens],
        measured=measured,
        samples=list(_samples(step, group.responses, tree)),
        written=[own["loss_mask"] for own in tokens] if "loss_mask" in step else None,
    )
    columns = {name: step[name][group.responses] for name in RESPONSE_COLUMNS if name in step}
    for name in TOKEN_COLUMNS:
        if name in step:
            columns[name] = np.concatenate([own[name] for own in tokens])
    return MeasuredGroup(group.group_id, measurement, about, columns)


def _samples(step: Step, responses: list[int], tree: PrefixTree) -> Iterable[Sample]:
    place = {r: index for index, r in enumerate(responses)}
    offsets, ids = step["continuation_offsets"], step["continuation_ids"]
    rewards, finished = step["continuation_reward"], step["continuation_finished"]
    for c in np.flatnonzero(np.isin(step["continuation_response"], responses)):
        own = place[int(step["continuation_response"][c])]
        start = int(step["continuation_start"][c])
        if not 0 <= start <= len(tree.paths[own]):
            continue
        continuation = ids[offsets[c] : offsets[c + 1]].tolist()
        node, followed = tree.leaves_at(tree.node(own, start), continuation)
        if followed < len(continuation):
            yield Sample(node, continuation[followed:], float(rewards[c]), bool(finished[c]))


def stored_groups(run_dir: Path, step: int) -> list[MeasuredGroup]:
    """What was measured of a training step so far."""
    run = read_run(run_dir)
    return from_step(run.step(COUNTERFACTUAL, step)) if step in run.steps(COUNTERFACTUAL) else []


def write_groups(writer: TraceWriter, step: int, groups: list[MeasuredGroup], meta: dict[str, Any]) -> None:
    """Replace what is stored of a training step; it is on disk when this returns."""
    groups = sorted(groups, key=lambda group: group.group_id)
    entries = [{**group.about, "group_id": group.group_id} for group in groups]
    writer.write(step, to_columns(groups), {**meta, "measured": entries})
    writer.flush()
