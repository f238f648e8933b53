"""The configured policy loss of responses, token by token, before it is aggregated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradtrace.algorithms import LossInputs, LossOutputs, entropy_bonus, kl_estimate, policy_loss
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.batch import RolloutBatch
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.policy import Policy


class PolicyLoss:
    def __init__(self, policy: Policy, algorithm: AlgorithmConfig, max_response_length: int) -> None:
        """`max_response_length` is what the aggregation `fixed_length` divides by."""
        self.policy = policy
        self.algorithm = algorithm
        self.max_response_length = max_response_length
        self.policy_loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)

    def losses(
        self, batch: RolloutBatch, micro: MicroBatch, log_probs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Per token [r, T], before aggregation: the policy loss, the terms added to it, and sums for metrics."""
        device = log_probs.device
        mask = micro.mask.to(device)
        reference = micro.column(batch, "ref_log_probs", device)
        outputs = self.policy_loss(
            LossInputs(
                log_probs=log_probs,
                old_log_probs=micro.column(batch, "old_log_probs", device),
                advantages=micro.column(batch, "advantages", device),
                mask=mask,
                ref_log_probs=reference,
                entropies=entropies,
            )
        )
        penalties = []
        token_sums = {**outputs.metric_sums(), "actor/entropy": entropies.detach().sum()}
        if self.algorithm.entropy_coef:
            penalties.append(entropy_bonus(entropies, mask, self.algorithm.entropy_coef))
        if self.algorithm.kl_coef:
            kl = kl_estimate(log_probs, reference, mask, self.algorithm.kl_estimator)
            penalties.append(self.algorithm.kl_coef * kl)
            token_sums["actor/kl_loss"] = kl.detach().sum()
        return outputs.loss, penalties, token_sums

    def token_losses(self, batch: RolloutBatch, micro_batches: MicroBatches, rows: Tensor) -> Tensor:
        """[N]: of every token that the policy wrote its own term of the loss at the current weights, before
        aggregation; response after response in the order of `rows`. Old log-probs must be set."""
        found: dict[int, Tensor] = {}
        for micro in micro_batches.laid_out(self.policy.best_layout())(rows):
            terms = self.terms(batch, micro, *(micro.unflatten(values) for values in self.policy.statistics(micro)))
            for index, row in enumerate(micro.rows.tolist()):
                found[row] = terms[index, micro.mask[index]]
        return torch.cat([found[row] for row in rows.tolist()])

    def terms(self, batch: RolloutBatch, micro: MicroBatch, log_probs: Tensor, entropies: Tensor) -> Tensor:
        """[r, T]: every token's own term of the whole loss, before aggregation."""
        policy_losses, penalties, _ = self.losses(batch, micro, log_probs, entropies)
        return torch.stack([policy_losses, *penalties]).sum(0)

    def policy_terms(
        self, batch: RolloutBatch, micro: MicroBatch, log_probs: Tensor, old_log_probs: Tensor, entropies: Tensor
    ) -> Tensor:
        """[r, T]: every token's own term of the policy loss for ratios to any old log-probs."""
        return policy_terms(self.policy_loss, batch, micro, log_probs, old_log_probs, entropies)


def policy_terms(
    loss: Callable[[LossInputs], LossOutputs],
    batch: RolloutBatch,
    micro: MicroBatch,
    log_probs: Tensor,
    old_log_probs: Tensor,
    entropies: Tensor,
) -> Tensor:
    """[r, T]: every token's own term of a policy loss for ratios to any old log-probs."""
    device = log_probs.device
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=micro.column(batch, "advantages", device),
        mask=micro.mask.to(device),
        ref_log_probs=micro.column(batch, "ref_log_probs", device),
        entropies=entropies.detach(),
    )
    return loss(inputs).loss


@torch.no_grad()
def fill_statistics(policy: Policy, batch: RolloutBatch, micro_batches: MicroBatches, rows: Tensor) -> RolloutBatch:
    """The batch with old_log_probs and entropies of `rows` under the current weights."""
    old_log_probs = torch.zeros_like(batch.sampler_log_probs)
    entropies = torch.zeros_like(batch.sampler_log_probs)
    for micro in micro_batches(rows):
        length = micro.mask.shape[1]
        log_probs, micro_entropies = (micro.unflatten(values).to(entropies) for values in policy.statistics(micro))
        old_log_probs[micro.rows, :length] = log_probs
        entropies[micro.rows, :length] = micro_entropies
    return batch.replace(old_log_probs=old_log_probs, entropies=entropies)
