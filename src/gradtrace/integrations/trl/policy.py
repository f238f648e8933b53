"""TRL's model with the statistics that our instruments ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gradtrace.integrations.trl.batches import LeftPadded
from gradtrace.policy.microbatch import MicroBatch
from gradtrace.policy.policy import Policy


@dataclass
class TrlPolicy(Policy):
    log_probs_and_entropies: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
    """`GRPOTrainer._get_per_token_logps_and_entropies` of the trainer."""
    reentrant: bool
    """The model has torch's older kind of checkpoints, through which `autograd.grad` does not pass."""
    syncs: Callable[[], bool]
    """Whether the backward pass of training that comes next is the last one before the optimizer step."""

    def statistics(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """A slice as TRL computes it; other inputs (for forward-mode derivatives, which TRL's fused head has not)
        with the model's own head. Draws nothing from the generators that training draws from."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            if self.reentrant or not isinstance(micro, LeftPadded):
                stack.enter_context(without_checkpointing(self.model))
            if not isinstance(micro, LeftPadded):
                return super().statistics(micro)
            log_probs, entropies, _ = self.log_probs_and_entropies(
                self.model, micro.input_ids, micro.attention_mask, micro.mask.shape[1], compute_entropy=True
            )
        assert entropies is not None
        mask = micro.mask.to(log_probs.device)
        return log_probs[mask], entropies[mask]

    @contextmanager
    def own_pass(self) -> Iterator[list[Tensor]]:
        """What FSDP has accumulated of training's gradients waits."""
        model = self.model
        if not isinstance(model, FSDPModule):
            with super().own_pass() as outputs:
                yield outputs
            return
        model.set_requires_gradient_sync(False)
        try:
            with super().own_pass() as outputs:
                yield outputs
        finally:
            model.set_requires_gradient_sync(self.syncs())


@contextmanager
def without_checkpointing(model: Any) -> Iterator[None]:
    """Forward mode keeps no activations, and torch's checkpoints and transformers' hook on the embeddings, which calls
    `requires_grad_`, do not work under it."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    embedding = model.get_input_embeddings()
    hooks = dict(embedding._forward_hooks)
    for module in switched:
        module.gradient_checkpointing = False
    for key, hook in hooks.items():
        if getattr(hook, "__name__", "") == "make_inputs_require_grads":
            del embedding._forward_hooks[key]
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True
        embedding._forward_hooks.update(hooks)


def policy_of(trainer: Any, log_probs_and_entropies: Callable[..., Any]) -> TrlPolicy:
    model = trainer.accelerator.unwrap_model(trainer.model)
    reentrant = bool((trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
    return TrlPolicy(
        model,
        trainer.accelerator.device,
        trainer.temperature,
        log_probs_and_entropies,
        reentrant,
        lambda: bool(trainer.accelerator.sync_gradients),
    )
