"""From the scores of a step's mini-batches to the columns of its influence trace file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.attribution import SIGN, UNIT, InfluenceConfig, InfluenceTrace
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import (
    Truth,
    group_columns,
    log_prob_columns,
    no_truth,
    response_columns,
    reward_part_columns,
    with_gaps,
)
from gradtrace.instruments.influence.capture import Scored
from gradtrace.trace.kinds.influence_trace import SCORE_OF_CREDIT, Credit
from gradtrace.trace.schema import GroupStatus, Selection, ragged

Entry = tuple[int, int, Scored]
"""A scored response: its row in the batch, its place in the trace, and the mini-batch that it belongs to."""
OWN_MEANING = ("credit", "step")
"""Names in the tracer's description that mean something else in a file: its list of credits, the training step."""
DESCRIBED = (
    *("target", "hessian_mode", "hessian_source", "contrastive_agg", "accepted_rejected_scope", "scope_pass"),
    *("output_function", "exclude_self_response", "response_reduction", "projection_dim_factor"),
)
"""Knobs that say what scores mean; `scope_pass` is one of a run's trace only."""
STATUS_OF_REASON = {
    "constant_reward": GroupStatus.CONSTANT_REWARD,
    "not_captured": GroupStatus.NOT_CAPTURED,
    "non_finite": GroupStatus.NON_FINITE,
}


def describe(config: InfluenceConfig) -> dict[str, Any]:
    """The meaning of the scores, for the file and the viewer."""
    backward = "tail" if config.tail_only else "position"
    return {
        "credit": [backward, "loss_term"] if config.wants_loss_term else [backward],
        "pairwise_credit": backward,
        **{knob: getattr(config, knob, False) for knob in DESCRIBED},
        "sign": SIGN,
        "unit": UNIT,
    }


def influence_columns(
    batch: RolloutBatch,
    scored: list[Scored],
    status: Tensor,
    config: InfluenceConfig,
    pairwise_max_mb: float,
    truth: Truth = no_truth,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of a step's file, and what to say about them: the scored responses, and every group's status."""
    status = status.clone()
    threshold = getattr(config, "accepted_threshold", None)
    entries: list[Entry] = []  # in the order of the batch
    for part in scored:
        for local, row in enumerate(part.rows.tolist()):
            reason = part.trace.skipped.get(int(batch.group[row]))
            if reason is not None:
                status[batch.group[row]] = int(STATUS_OF_REASON[reason])
            elif len(part.trace.position_scores[local]):
                entries.append((row, local, part))
    entries.sort(key=lambda entry: entry[0])
    rows = torch.tensor([row for row, _, _ in entries], dtype=torch.long)
    unscored = (status == int(GroupStatus.SCORED)) & ~torch.isin(torch.arange(len(status)), batch.group[rows])
    status[unscored] = int(GroupStatus.NOT_CAPTURED)
    captured = [part.trace.captured(local).cpu() for _, local, part in entries]
    whole = np.array([bool(flags.all()) for flags in captured], dtype=bool)
    columns = {
        **group_columns(batch, truth),
        "group_status": status.numpy(),
        **response_columns(batch, rows, truth),
        "accepted": accepted(batch.need("rewards"), batch.group, threshold)[rows].numpy(),
        "selection": np.where(whole, Selection.SELECTED, Selection.CUT_AT_TOKEN_CAP).astype(np.uint8),
        "optimizer_step": np.array([int(part.optimizer_step[local]) for _, local, part in entries], dtype=np.int64),
        "prompt_influence": np.array(
            [float(part.trace.rest_scores[local]) for _, local, part in entries], dtype=np.float32
        ),
        "captured": with_gaps(flat(captured, torch.bool), batch, rows, False),
        **log_prob_columns(batch, rows),
        **reward_part_columns(batch, rows),
    }
    for name, scores in score_columns(entries, config).items():
        gap = False if scores.dtype == bool else np.nan
        columns[name] = scores if name == "credit" else with_gaps(scores, batch, rows, gap)
    pairwise, stored = pairwise_columns(entries, pairwise_max_mb, batch)
    said = {key: value for part in scored for key, value in part.trace.meta.items() if key not in OWN_MEANING}
    return columns | pairwise, said | {"pairwise_responses": stored, "mini_batches": len(scored)}


def score_columns(entries: list[Entry], config: InfluenceConfig) -> dict[str, Any]:
    """Scores of the tokens that the policy wrote: of the backward pass for all responses, of their own loss terms for
    those that have them."""
    traces = [(part.trace, local) for _, local, part in entries]
    backward = Credit.TAIL if config.tail_only else Credit.POSITION
    position = [trace.position_scores[local] for trace, local in traces]
    columns: dict[str, Any] = {
        "credit": np.array([Credit[trace.credit_of(local).upper()] for trace, local in traces], dtype=np.uint8),
        "no_step": flat([trace.without_step(local) for trace, local in traces], torch.bool),
        SCORE_OF_CREDIT[backward]: np.nan_to_num(flat(position, torch.float32)),
    }
    if config.wants_loss_term:
        terms = [scores_or_zeros(trace, trace.loss_term_scores, local) for trace, local in traces]
        columns["influence_loss_term"] = flat(terms, torch.float32)
    if any(trace.likelier_scores is not None for trace, _ in traces):
        likelier = [scores_or_zeros(trace, trace.likelier_scores, local) for trace, local in traces]
        columns["influence_likelier"] = flat(likelier, torch.float32)
    return columns


def scores_or_zeros(trace: InfluenceTrace, scores: list[Tensor] | None, local: int) -> Tensor:
    """[T_r]: scores that only some groups have; zeros for the others, whose `credit` says so."""
    own = scores[local] if scores is not None else torch.empty(0)
    return own if len(own) else torch.zeros(len(trace.position_scores[local]))


def flat(tensors: list[Tensor], dtype: torch.dtype) -> np.ndarray:
    """All tensors one after the other, on the CPU."""
    return torch.cat([torch.empty(0, dtype=dtype), *(tensor.to("cpu", dtype) for tensor in tensors)]).numpy()


def pairwise_columns(entries: list[Entry], max_mb: float, batch: RolloutBatch) -> tuple[dict[str, Any], int]:
    """Effects of tokens on sibling responses, for as many responses as the budget allows; and how many that is."""
    index_of = {(id(part), local): index for index, (_, local, part) in enumerate(entries)}
    budget = max_mb * 2**20
    members, blocks, stored = [], [], 0
    for row, local, part in entries:
        siblings, block = part.trace.pairwise_of(local)
        length = len(part.trace.position_scores[local])
        budget -= 4 * length * len(siblings)
        if not siblings or budget < 0:
            members.append(np.empty(0, np.int32))
            blocks.append(np.empty(0, np.float32))
            continue
        full = torch.zeros(length, len(siblings))  # tokens past the cap have zeros, and `captured` says so
        full[: len(block)] = block.float().cpu()
        members.append(np.array([index_of[id(part), sibling] for sibling in siblings], np.int32))
        blocks.append(with_gaps(full, batch, torch.tensor([row])).ravel())
        stored += 1
    if not stored:
        return {}, 0
    columns: dict[str, Any] = {}
    columns["pairwise_member"], columns["pairwise_member_offsets"] = ragged(members)
    columns["pairwise"], columns["pairwise_offsets"] = ragged(blocks, "float32")
    return columns, stored
