"""The share of the update that the mismatch of sampler and trainer makes, on the ranks of a verl job.

g_ρ and g_ρ − g_1 (`instruments.mismatch`) are the gradients of Σ s_t ℓ_t with the slopes s_t of the two losses by the
log-probs: two passes of verl's own over the first mini-batch of a step, whose gradients stay in FSDP's shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.host import Gradient
from gradtrace.instruments.mismatch import share_metrics, slopes
from gradtrace.integrations.verl.parts import write_rank_file
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, dense, micro_batch_weights
from gradtrace.integrations.verl.told import SAMPLED, MismatchInputs


class RankMismatch:
    """Lives in the engine of a rank; every method is called by all ranks together."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        self.engine = engine
        self.loss = loss
        self.ranks = Ranks(engine.get_data_parallel_group())
        self.last_step = -1

    def measure(self, inputs: MismatchInputs, data: Any) -> None:
        """Before the training passes of a step's first mini-batch; what is found goes to this rank's part file."""
        if inputs.step == self.last_step:
            return
        self.last_step = inputs.step
        due, whole = self._gradient(data, difference=True), self._gradient(data, difference=False)
        squares = [sum(self.ranks.products(*pair).values()) for pair in ((due, due), (due, whole), (whole, whole))]
        write_rank_file(Path(inputs.parts_dir), inputs.step, dist.get_rank(), {}, {"metrics": share_metrics(*squares)})

    def _gradient(self, mini_batch: Any, difference: bool) -> Gradient:
        """g_ρ, or g_ρ − g_1 (`difference`)."""

        def objective(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
            log_probs = no_padding_2_padding(model_output["log_probs"], data)
            weights = micro_batch_weights(data, self.loss.actor).to(log_probs)[:, None]

            def loss(leaf: Tensor, old: Tensor) -> Tensor:
                return (self.loss.policy_terms(leaf, old, model_output, data) * weights).sum()

            found = slopes(loss, log_probs, dense(data, SAMPLED, log_probs))[int(difference)]
            return (found * log_probs).sum(), {}

        self.engine.optimizer_zero_grad()
        self.engine.plain_passes(mini_batch, objective, forward_only=False)
        gradient = {
            name: p.grad.detach().clone() for name, p in self.engine.module.named_parameters() if p.grad is not None
        }
        self.engine.optimizer_zero_grad()
        return gradient
