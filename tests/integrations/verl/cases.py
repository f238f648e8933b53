"""Layouts and knobs under which the engine must give the same scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.plan import StepPlan

PLAN = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
"""Mini-batch of each of the 16 responses; groups of four."""

EXACT = {"enable": True, "on_error": "raise"}
OLDER = {
    "hessian_mode": "inverse",
    "reg_rule": "per_dimension",
    "credit": "position",
    "target": "output_function",
}
"""The original's definition: one function as step and target, H⁻¹ between them."""
CONTRAST = {"target": "log_prob", "preconditioner_form": "factored"}
"""Own terms in the optimizer's geometry, about the contrast of log-probs."""


def ranks_of(world: int) -> list[list[int]]:
    """Rows of each rank. On two, the groups of the first mini-batch are split, those of the second are not."""
    if world == 1:
        return [list(range(16))]
    return [[0, 1, 2, 9, 4, 5, 6, 7], [8, 3, 10, 11, 12, 13, 14, 15]]


@dataclass(frozen=True)
class Case:
    engine: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    check_gradients: bool = False
    first_only: bool = False
    """No group of the second mini-batch is to be scored."""
    turns: bool = False
    """Responses hold tokens that the policy did not write."""


# One scope over the whole mini-batch: nothing is scored inside of a pass, so gradients of all responses are there.
_GLOBAL = {"accepted_rejected_scope": "all_selected"}

LAYOUTS = {
    "packed": Case(knobs=_GLOBAL, check_gradients=True),
    "padded": Case({"packed": False}, {"packed": False}, knobs=_GLOBAL, check_gradients=True),
    "checkpointing": Case({"checkpointing": True}, knobs=_GLOBAL, check_gradients=True),
    "dynamic": Case(layout={"dynamic": True}, knobs=_GLOBAL, check_gradients=True),
    "offload": Case(
        {"param_offload": True, "optimizer_offload": True},
        {"entropies": True},
        knobs=_GLOBAL,
        check_gradients=True,
    ),
    "bucket": Case({"pad_to_length": True, "pad_to_length_bucket": 16}, knobs=_GLOBAL, check_gradients=True),
}
KNOBS = {
    "per_prompt": Case(),
    "token": Case(knobs={"hessian_source": "token"}),
    "projected": Case(knobs={"projection_dim_factor": 4}),
    "sequence_mean": Case(actor={"loss_agg_mode": "seq-mean-token-mean"}),
    "log_prob": Case(knobs={"output_function": "log_prob"}),
    "loss_term": Case(knobs={"credit": "both"}),
    "leave_out": Case(knobs={"exclude_self_response": True, "contrastive_agg": "sum"}),
}
# Adapters start from random numbers of their own, so there is nothing to compare scores with.
LORA = {"lora": Case({"lora_rank": 4}, knobs=_GLOBAL, check_gradients=True)}
FIRST_ONLY = {"first_only": Case(first_only=True)}
FACTORED = {
    "contrast": Case(knobs=CONTRAST),
    "contrast_padded": Case({"packed": False}, {"packed": False}, knobs=CONTRAST),
}
HALF_PRECISION = {
    "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    "half_precision_attention": True,
}
"""Of an engine that computes in bf16, with an attention that has nothing else, as flash attention."""
PARTS = {
    "parts": Case(knobs={"measure": "all"}),
    "parts_padded": Case({"packed": False}, {"packed": False}, knobs={"measure": "all", "pairwise": False}),
    "parts_dynamic": Case(layout={"dynamic": True}, knobs={"accepted_rejected_scope": "per_prompt", "measure": 0}),
    "parts_sequence_mean": Case({"checkpointing": True}, actor={"loss_agg_mode": "seq-mean-token-mean"}),
    "parts_turns": Case(knobs={"measure": "all"}, turns=True),
    "parts_corrected": Case(layout={"corrected": True}, knobs={"measure": "all"}),
    "parts_bf16": Case(HALF_PRECISION, knobs={"measure": "all"}),
}
"""The default score. A run that computes in bf16 has it from passes in float32 all the same."""
TURNS = {
    "turns": Case(knobs={"credit": "both"}, turns=True),
    "turns_padded": Case({"packed": False}, {"packed": False}, {"loss_agg_mode": "seq-mean-token-mean"}, turns=True),
}
CORRECTED = {
    "corrected": Case(layout={"corrected": True}, knobs={"credit": "both"}),
}
"""Tokens are weighed by verl's rollout correction."""
CASES = LAYOUTS | KNOBS | LORA | FIRST_ONLY | FACTORED | PARTS | TURNS | CORRECTED


def knobs_of(name: str) -> dict[str, Any]:
    """The influence knobs of a case."""
    older = {} if name in FACTORED | PARTS else OLDER
    return {**EXACT, **older, **CASES[name].knobs}


def plan_of(name: str, batch: RolloutBatch) -> StepPlan:
    """What the reporter would plan, with all groups scored."""
    every = torch.arange(len(batch.prompts))
    none, knobs = every[:0], knobs_of(name)
    measured = every if knobs.get("measure") == "all" else none
    own = every if knobs.get("accepted_rejected_scope") == "per_prompt" else measured
    return StepPlan.of(batch, 1, torch.zeros(len(every), dtype=torch.long), own=own, measured=measured)


def names(world: int, *kinds: dict[str, Case]) -> list[str]:
    """The cases of these kinds that are run on so many ranks: all on two, some of them on one (time)."""
    on_one = ("packed", "padded", "dynamic", "per_prompt", "parts")
    return [name for kind in kinds for name in kind if world == 2 or name in on_one]


PROBES = {
    "probe_packed": Case(),
    "probe_padded": Case({"packed": False, "checkpointing": True}, {"packed": False}),
    "probe_lora": Case({"lora_rank": 4, "param_offload": True, "optimizer_offload": True}),
    "probe_bf16": Case(HALF_PRECISION),
    "probe_dynamic": Case(layout={"dynamic": True}, actor={"loss_agg_mode": "seq-mean-token-mean"}),
}
PROBED_OPTIM = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
"""Of the probed step: with decay, and with clipping that clips."""


PROBES_OF_OTHER_NUMBERS = ("probe_bf16", "probe_lora")
"""Whose update the embedded loop would not make: another precision, other random numbers."""


def probes(world: int) -> list[str]:
    return list(PROBES) if world == 2 else ["probe_packed"]
