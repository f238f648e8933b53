"""What would spoil a probe, found before minutes of sampling are spent. Each failure is one sentence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.policy.microbatch import Sequences
from gradtrace.policy.policy import Policy
from gradtrace.rollout.sampler import evaluation_mode


def check_sampling(temperature: float, top_p: float, top_k: int, where: str, wanted: float) -> None:
    """The probe's batches come from the full distribution that entropies and log-probs speak of, at the temperature
    `wanted` that the run trains at."""
    if top_p != 1 or top_k != 0:
        raise GradtraceError(
            f"{where} has top_p={top_p:g}, top_k={top_k}: tokens that cannot be drawn have no importance weight. "
            "Use rollout.top_p=1 rollout.top_k=0"
        )
    if temperature != wanted:
        raise GradtraceError(
            f"{where} was sampled at temperature={temperature:g}, and the run trains at rollout.temperature="
            f"{wanted:g}: entropies and log-probs are those of one temperature. Leave the file out, so that the batch "
            f"is sampled anew, or set rollout.temperature={temperature:g}"
        )


def check_prompts(evaluation: list[list[int]], update: list[list[int]]) -> None:
    """An E that shares prompts with U shows what the update does to its own prompts, not what it does."""
    seen = {tuple(prompt) for prompt in update}
    common = [index for index, prompt in enumerate(evaluation) if tuple(prompt) in seen]
    if common:
        raise GradtraceError(
            f"E and U overlap: {len(common)} of {len(evaluation)} prompts of E are in U as well, the first is prompt "
            f"{common[0]}. Hold E's prompts out of U"
        )


def check_batch(batch: RolloutBatch, name: str, vocabulary: int) -> None:
    """Refuse a batch from a file that does not fit the model or says nothing."""
    empty = (batch.written_counts == 0).nonzero().flatten().tolist()
    if empty:
        raise GradtraceError(f"{name}: response {empty[0]} has no tokens ({len(empty)} such); remove it from the batch")
    largest = max(int(batch.responses.max()), *(max(prompt) for prompt in batch.prompts))
    if largest >= vocabulary:
        raise GradtraceError(
            f"{name}: token id {largest}, the model knows 0 to {vocabulary - 1}: it was made for another model"
        )


def not_reached(policy: Policy, prompt: list[int]) -> set[str]:
    """The trainable parameters that the loss does not reach, by a pass over one token."""
    trainable = policy.trainable()
    one = torch.ones(1, 1, dtype=torch.bool)
    batch = RolloutBatch(
        [prompt], torch.zeros(1, dtype=torch.long), torch.tensor([prompt[:1]]), one, one[0], one.float()
    )
    with evaluation_mode(policy.model):
        log_probs, entropies = policy.statistics(Sequences.of(batch).padded(torch.zeros(1, dtype=torch.long)))
    gradients = torch.autograd.grad((log_probs + entropies).sum(), list(trainable.values()), allow_unused=True)
    return {name for name, gradient in zip(trainable, gradients, strict=True) if gradient is None}


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], missed: set[str]
) -> None:
    """Every parameter that an update moves has moments. Names the first that has not."""
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        lacks = [key for key in ("exp_avg", "exp_avg_sq", "step") if key not in state]
        if lacks and (state or name not in missed):
            raise GradtraceError(
                f"the checkpoint's optimizer state has no {lacks[0]} of parameter {name}: it does not belong to this "
                "model. Probe with optimizer=adamw or optimizer=sgd to start from none"
            )
