"""One rollout of a traced `GRPOTrainer`, from its generation to the last slice of its first pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.observer import OptimizerStep
from gradtrace.integrations.trl.batches import LeftPadded
from gradtrace.integrations.trl.policy import TrlPolicy
from gradtrace.policy.microbatch import Sequences


@dataclass(eq=False)
class TracedRollout:
    batch: RolloutBatch
    """The rollout in the order of generation; old_log_probs and entropies fill up slice by slice."""
    update: OptimizerStep
    """All that is trained on of it, as one: TRL deals groups out over slices and optimizer steps."""
    policy: TrlPolicy
    began_at: int
    """TRL's global step when it was generated."""
    rows: Tensor
    """long[r]: the completions that this process trains on."""
    slices_left: int
    has_statistics: bool
    """TRL took log-probs (and we entropies) of the sampling weights when it generated."""
    token_weight: Tensor = field(init=False)
    """float[R]: what the loss multiplied each completion's tokens by."""
    log_prob_weight: Tensor = field(init=False)
    """float[R, C]: derivative of TRL's loss by each token's log-prob, as its backward pass had it."""
    entropy_weight: Tensor = field(init=False)
    """float[R, C]: the same by each token's entropy (an entropy bonus)."""

    def __post_init__(self) -> None:
        own = {name: self.batch.need(name).clone() for name in ("old_log_probs", "entropies")}
        self.batch = self.batch.replace(**own)  # columns of this batch alone, which are written to
        shape = self.batch.response_mask.shape
        self.token_weight = torch.ones(shape[0])
        self.log_prob_weight = torch.zeros(shape, dtype=torch.float64)
        self.entropy_weight = torch.zeros(shape, dtype=torch.float64)

    def see_statistics(self, micro: LeftPadded, log_probs: Tensor, entropies: Tensor, terms: bool) -> None:
        """Take log-probs and entropies [b, C] of a slice's forward pass; with `terms`, listen to its backward pass as
        well."""
        if not self.has_statistics:  # then no optimizer step lies between sampling and this pass
            # Those that selection left out are masked here; theirs are known already.
            whole = micro.mask.any(1)
            rows, mask = micro.rows[whole], micro.mask[whole]
            for name, values in (("old_log_probs", log_probs), ("entropies", entropies)):
                own = values.detach().float().cpu()[whole]
                self.batch.need(name)[rows, : mask.shape[1]] = torch.where(mask, own, 0)
        if terms:
            for values, store in ((log_probs, self.log_prob_weight), (entropies, self.entropy_weight)):
                if values.requires_grad:
                    values.register_hook(_stores(store, micro.rows))

    def share_statistics(self, ranks: Ranks) -> None:
        """Log-probs and entropies of the other ranks' passes. Collective."""
        names = ("old_log_probs", "entropies")
        if self.has_statistics:
            return
        for rows, *columns in ranks.gather((self.rows, *(self.batch.need(name)[self.rows] for name in names))):
            for name, values in zip(names, columns, strict=True):
                self.batch.need(name)[rows] = values

    def token_terms(self, rows: Tensor) -> Tensor:
        """[2, N]: every token's own term of TRL's loss, before it was averaged, and its log-prob. The term is linear in
        the token's log-prob and entropy with the derivatives that the backward pass had, which gives the term's
        gradient for any loss type."""
        micro = Sequences.of(self.batch).micro_batch(rows, self.policy.best_layout())
        log_probs, entropies = self.policy.statistics(micro)
        chosen = self.batch.response_mask[rows]
        scale = (1.0 / self.token_weight[rows, None]).expand(chosen.shape)[chosen].to(log_probs)
        log_prob_weight = self.log_prob_weight[rows][chosen].to(log_probs) * scale
        entropy_weight = self.entropy_weight[rows][chosen].to(log_probs) * scale
        return torch.stack([log_prob_weight * log_probs + entropy_weight * entropies, log_probs])


def _stores(store: Tensor, rows: Tensor) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        store[rows, : gradient.shape[1]] = gradient.detach().to(store)

    return hook
