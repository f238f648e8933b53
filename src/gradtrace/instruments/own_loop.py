"""`gradtrace.record`: a step of a loop of one's own, on disk for every command; stored steps as batches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTrace, TokenParts
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth
from gradtrace.instruments.entropy_trace import RECORD as ENTROPY_RECORD
from gradtrace.instruments.entropy_trace.reporter import entropy_columns
from gradtrace.instruments.influence import RECORD as INFLUENCE_RECORD
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.columns import parts_columns, table_of_parts
from gradtrace.instruments.influence.factor_columns import describe, influence_columns, scores_table
from gradtrace.instruments.influence.plan import status_by_advantage, status_by_contrast
from gradtrace.instruments.record import Record
from gradtrace.segments import Segment
from gradtrace.trace.columns import InstrumentRecord
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.step import Step
from gradtrace.trace.token_text import Rules, TokenBytes
from gradtrace.trace.writer import TraceWriter

PAIRWISE_MB = 64.0
TokenLists = Tensor | Sequence[Any]
"""One row of numbers for each response: lists or tensors of its tokens, or a padded tensor [R, T]."""


@dataclass(eq=False)
class _OpenRun:
    """A run that this process records; the end of the process closes it."""

    files: RunFiles
    records: dict[str, Record] = field(default_factory=dict)

    def record(self, about: InstrumentRecord) -> Record:
        if about.name not in self.records:
            self.records[about.name] = Record(about, None, TraceWriter(self.files.traces, about.name, on_error="raise"))
        return self.records[about.name]


_runs: dict[Path, _OpenRun] = {}


def record(
    run_dir: str | os.PathLike[str],
    step: int,
    *,
    prompts: Sequence[Any],
    responses: TokenLists,
    rewards: Any,
    log_probs: TokenLists | None = None,
    entropies: TokenLists | None = None,
    advantages: Any = None,
    group: Any = None,
    trace: TokenParts | InfluenceTrace | None = None,
    loss_mask: TokenLists | None = None,
    segments: Sequence[Sequence[Segment]] | None = None,
    tokenizer: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Write what happened in one training step; `gradtrace view RUN_DIR` shows it, also while training goes on.

    `prompts`: token ids of each prompt. `responses`: token ids of each response; `group`: which prompt each answers
    (default: equally many for each prompt, in order). `rewards`: one number for each response. `log_probs` and
    `entropies`: one number for each token; with both there is an entropy trace. `advantages`: one number for each
    response or for each token. `trace`: what `InfluenceTracer.parts` (or `score`) returned for these responses, in
    this order; then there is an influence trace. `loss_mask`: for each token whether the policy wrote it; tool results,
    users' turns and templates (False) are shown and never scored. `segments`: who wrote which part of each response,
    and in which turn; left out: as the mask has it. `tokenizer`: a transformers tokenizer, or the text of every token
    id; once is enough. `metrics`: further numbers of the step's line in metrics.jsonl.
    """
    batch = batch_of_lists(prompts, responses, rewards, group, loss_mask, log_probs, entropies, advantages)
    if segments is not None:
        batch = batch.replace(segments=[list(parts) for parts in segments])
    tokens = [] if trace is None else trace.tokens if isinstance(trace, TokenParts) else trace.position_scores
    if trace is not None and len(tokens) != len(batch):
        raise GradtraceError(
            f"record: the trace has {len(tokens)} responses, here are {len(batch)}: give those that were scored, in "
            "the same order"
        )
    if wrong := [r for r, own in enumerate(tokens) if len(own) and len(own) != int(batch.written_counts[r])]:
        raise GradtraceError(
            f"record: the trace has {len(tokens[wrong[0]])} tokens of response {wrong[0]}, of which the policy wrote "
            f"{int(batch.written_counts[wrong[0]])}: give the scores and loss_mask the same tokens"
        )
    if trace is None and batch.entropies is None:
        raise GradtraceError("record: give log_probs and entropies, or a trace: there is nothing else to show")
    run = _open(Path(run_dir))
    if tokenizer is not None and not (run.files.path / "token_bytes.npz").exists():
        run.files.write_token_bytes(_token_bytes(tokenizer))
    if batch.entropies is not None and batch.old_log_probs is not None:
        rows = torch.arange(len(batch))
        run.record(ENTROPY_RECORD).write(step, batch, rows, entropy_columns(batch), {})
    if trace is not None:
        rows, columns, said = _influence(batch, trace)
        run.record(INFLUENCE_RECORD).write(step, batch, rows, columns, said)
    line = {"critic/rewards/mean": float(batch.need("rewards").mean())}
    if batch.entropies is not None:
        line["actor/entropy"] = float(batch.entropies[batch.response_mask].mean())
    run.files.log(step, line | (trace.metrics if isinstance(trace, InfluenceTrace) else {}) | dict(metrics or {}))


def _influence(
    batch: RolloutBatch, trace: TokenParts | InfluenceTrace
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """Rows, columns and meta of the influence trace."""
    if isinstance(trace, TokenParts):
        every = torch.zeros(len(batch.prompts), dtype=torch.long)  # without advantages nothing tells who was trained on
        status = every if batch.advantages is None else status_by_advantage(batch)
        return parts_columns(batch, table_of_parts(trace), status)
    rows = torch.arange(len(batch))
    table = scores_table([Scored(rows, torch.zeros_like(rows), trace)])
    rows, columns, said = influence_columns(batch, table, status_by_contrast(batch, 0), trace.config, PAIRWISE_MB)
    return rows, columns, describe(trace.config) | said


def _open(path: Path) -> _OpenRun:
    place = path.absolute()
    if place not in _runs:
        _runs[place] = _OpenRun(RunFiles(path))
    return _runs[place]


def batch_of_lists(
    prompts: Sequence[Any],
    responses: TokenLists,
    rewards: Any,
    group: Any = None,
    loss_mask: TokenLists | None = None,
    log_probs: TokenLists | None = None,
    entropies: TokenLists | None = None,
    advantages: Any = None,
) -> RolloutBatch:
    """A batch from the arguments of `record`, each checked against the responses."""
    ids = [_numbers(row, torch.long) for row in responses]
    lengths = torch.tensor([len(row) for row in ids])
    if not len(ids) or not int(lengths.min()):
        raise GradtraceError(f"record: {len(ids)} responses, the shortest of {min(map(len, ids), default=0)} tokens")
    mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def table(name: str, rows: TokenLists | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if rows is None:
            return None
        found, own = torch.zeros(mask.shape, dtype=dtype), [_numbers(row, dtype) for row in rows]
        padded = isinstance(rows, Tensor) and tuple(rows.shape) == tuple(mask.shape)
        wrong = [r for r, row in enumerate(own) if not padded and len(row) != int(lengths[r])]
        if len(own) != len(ids) or wrong:
            said = f"record: {name} has {len(own)} rows for {len(ids)} responses"
            for place in wrong[:1]:
                said += f"; row {place} has {len(own[place])} numbers for {len(ids[place])} tokens"
            raise GradtraceError(said)
        for r, row in enumerate(own):
            found[r, : int(lengths[r])] = row[: int(lengths[r])]
        return found

    weights = _numbers(advantages, torch.float32) if advantages is not None and _is_flat(advantages) else None
    values = _numbers(rewards, torch.float32)
    for name, column in (("rewards", values), ("advantages", weights)):
        if column is not None and (column.dim() != 1 or len(column) != len(ids) or not column.isfinite().all()):
            raise GradtraceError(f"record: {name} must be {len(ids)} finite numbers, one for each response")
    if weights is not None:
        advantages = [weight.expand(int(n)) for weight, n in zip(weights, lengths, strict=True)]
    sampled = table("log_probs", log_probs)
    return RolloutBatch(
        prompts=[_numbers(prompt, torch.long).tolist() for prompt in prompts],
        group=_groups(group, len(prompts), len(ids)),
        responses=table("responses", ids, torch.long),  # type: ignore[arg-type]
        response_mask=mask if loss_mask is None else table("loss_mask", loss_mask, torch.bool),  # type: ignore[arg-type]
        lengths=lengths,
        finished=torch.ones(len(ids), dtype=torch.bool),
        sampler_log_probs=torch.zeros(mask.shape) if sampled is None else sampled,
        rewards=values,
        old_log_probs=sampled,
        entropies=table("entropies", entropies),
        advantages=table("advantages", advantages),
    )


def _groups(group: Any, prompts: int, responses: int) -> Tensor:
    if group is not None:
        found = _numbers(group, torch.long)
        if len(found) != responses or int(found.min()) < 0 or int(found.max()) >= prompts:
            raise GradtraceError(
                f"record: group must be {responses} numbers from 0 to {prompts - 1}, the prompt of each response"
            )
        return found
    if not prompts or responses % prompts:
        raise GradtraceError(
            f"record: {responses} responses cannot be dealt evenly to {prompts} prompts: say with group= whose each is"
        )
    return torch.arange(prompts).repeat_interleave(responses // prompts)


def _is_flat(values: Any) -> bool:
    return values.dim() == 1 if isinstance(values, Tensor) else not hasattr(values[0], "__len__")


def _numbers(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(values).detach().to("cpu", dtype)


def _token_bytes(tokenizer: Any) -> TokenBytes:
    if isinstance(tokenizer, Sequence) and not hasattr(tokenizer, "convert_ids_to_tokens"):
        return TokenBytes([str(text).encode() for text in tokenizer], [0] * len(tokenizer), Rules())
    return TokenBytes.from_tokenizer(tokenizer)


def stored_batch(step: Step) -> RolloutBatch:
    """The responses of a step's file in their order, with the sampler's log-probs and advantages where it has them.
    An item of the batch says which group of the file it is."""
    lengths = torch.tensor(step["length"].astype(np.int64))
    present = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]

    def table(column: np.ndarray, dtype: torch.dtype) -> Tensor:
        found = torch.zeros(present.shape, dtype=dtype)
        found[present] = torch.tensor(np.nan_to_num(column)).to(dtype)
        return found

    several = "loss_mask" in step
    mask = table(step["loss_mask"], torch.bool) if several else present

    advantages = None
    if "advantage" in step:
        advantages = torch.where(mask, torch.tensor(step["advantage"])[:, None], 0.0)
    sampled = torch.zeros(mask.shape)
    if "sampler_log_prob" in step:
        sampled = table(step["sampler_log_prob"], torch.float32)
    return RolloutBatch(
        prompts=[step.group(g).prompt_ids.tolist() for g in range(step.n_groups)],
        group=torch.tensor(step["group"].astype(np.int64)),
        responses=table(step["token_id"], torch.long),
        response_mask=mask,
        lengths=lengths,
        segments=[step.segments(r) for r in range(step.n_responses)] if several else None,
        finished=torch.tensor(step["finished"]),
        sampler_log_probs=sampled,
        items=[{"group": g} for g in range(step.n_groups)],
        rewards=torch.tensor(step["reward"]),
        advantages=advantages,
    )


def stored_truth(step: Step) -> Truth:
    """What the file says about right answers, for `stored_batch` of the same file."""
    expected = [step.group(g).expected_ids for g in range(step.n_groups)]
    wrong = {}
    if "first_wrong" in step:
        for r, (group, place) in enumerate(zip(step["group"], step["first_wrong"], strict=True)):
            wrong[int(group), tuple(step.tokens(r)["token_id"].tolist())] = int(place)

    def truth(item: dict[str, Any], response: list[int]) -> tuple[list[int] | None, int | None]:
        answer = expected[item["group"]]
        known = answer.tolist() if answer is not None and len(answer) else None
        return known, wrong.get((item["group"], tuple(response)))

    return truth
