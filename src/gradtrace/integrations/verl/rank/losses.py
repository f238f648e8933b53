"""Our losses and advantages for verl, and the loss function that carries the trace's settings to the ranks."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.algorithms import (
    AdvantageInputs,
    LossInputs,
    advantage,
    advantage_names,
    policy_loss,
    policy_loss_names,
)
from gradtrace.algorithms.registry import import_algorithms
from gradtrace.attribution import TrainingPass
from gradtrace.errors import GradtraceError
from gradtrace.instruments.registry import instruments
from gradtrace.integrations.verl import ALGORITHMS, PREFIX
from gradtrace.integrations.verl.rank.sequences import dense
from gradtrace.integrations.verl.tables import CORRECTION

VERL_LOSSES_WITH_PLAIN_GRADIENT = ("vanilla", "gspo", "cispo")
"""verl's losses whose gradient at ratio 1 is −A∇ℓ for every token."""


token_kl: Any = core_algos.kl_penalty
_extras: contextvars.ContextVar[tuple[dict[str, Any], dict[str, Any]]] = contextvars.ContextVar(
    "gradtrace_loss_extras", default=({"entropies": None, "ref_log_probs": None}, {})
)
"""Columns of the micro-batch that verl does not hand to a policy loss, and the options of ours."""
advantage_options: dict[str, Any] = {}
"""Options of the driver's estimator, which the trainer sets."""


@dataclass(eq=False)
class GradtraceLoss:
    """Called in place of verl's `ppo_loss`. The trainer sends it to every worker (`set_loss_fn`), and with it
    what the engine there has to trace."""

    actor: Any
    """verl's ActorConfig."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of our policy loss."""
    instruments: Mapping[str, Any] = field(default_factory=dict)
    """Name → settings of the instruments that are on; which steps they observe is said in the data of each."""
    folder: str = ""
    """Where each rank leaves its tables."""
    temperature: float = 1.0
    """Of the rollout."""
    selecting: bool = False
    """Responses are left out of updates: mini-batches are filled up, and a mean over responses counts those that are
    real."""
    engine_attached: bool = field(default=False, init=False)
    see: Callable[[Any, Any], None] | None = field(default=None, init=False)
    """Called with the model's output and the micro-batch of every pass of training."""

    @property
    def training_pass(self) -> TrainingPass:
        """What is true of every backward pass of this loss."""
        mode = self.actor.policy_loss.get("loss_mode", "vanilla")
        name = mode.removeprefix(PREFIX)
        plain, own_kl = mode in VERL_LOSSES_WITH_PLAIN_GRADIENT, False
        if not plain and name in policy_loss_names():
            ours = policy_loss(name, **self.options)
            plain, own_kl = ours.plain_at_ratio_one, ours.own_kl
        return TrainingPass(
            policy_gradient_at_ratio_one=plain,
            kl_in_loss=bool(self.actor.use_kl_loss) or own_kl,
            entropy_bonus=self.actor.entropy_coeff != 0,
        )

    def __call__(
        self, model_output: Any, data: Any, dp_group: Any = None, **ignored: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        asked = [name for name in self.instruments if instruments()[name].record is not None]
        if asked and not self.engine_attached:
            raise GradtraceError(
                f"gradtrace was asked for ({', '.join(asked)}), but this worker runs verl's own engine. "
                "Workers must load the plugin: pass VERL_USE_EXTERNAL_MODULES=gradtrace.integrations.verl to all "
                "nodes, e.g. with "
                "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=gradtrace.integrations.verl"
            )
        entropies = model_output.get("entropy", None)
        entropies = None if entropies is None else no_padding_2_padding(entropies, data)
        if self.see is not None:
            self.see(model_output, data)
        token = _extras.set((extras_of(entropies, data), self.options))
        try:
            return ppo_loss(self.actor, model_output, data, dp_group)
        finally:
            _extras.reset(token)

    def policy_terms(self, log_probs: Tensor, old_log_probs: Tensor, entropies: Tensor | None, data: Any) -> Tensor:
        """[b, T]: every token's own term of the policy loss, before aggregation, zero outside the mask."""
        mode = self.actor.policy_loss.get("loss_mode", "vanilla")
        options = dict(self.options)
        if mode == "vanilla":
            clip = {"clip_low": self.actor.clip_ratio_low, "clip_high": self.actor.clip_ratio_high}
            mode, options = "ppo", {**clip, "dual_clip": self.actor.clip_ratio_c}
        name = mode.removeprefix(PREFIX)
        if not knows_token_terms(name):
            raise GradtraceError(f"loss-term credit does not know the token terms of loss_mode={mode}")
        mask = dense(data, "response_mask", log_probs).bool()
        advantages, extras = dense(data, "advantages", log_probs), extras_of(entropies, data)
        inputs = LossInputs(log_probs, old_log_probs, advantages, mask, **extras)
        return torch.where(mask, policy_loss(name, **options)(inputs).loss, 0.0)

    def token_losses(self, log_probs: Tensor, entropies: Tensor | None, data: Any) -> Tensor:
        """[b, T]: every token's own term of the whole loss, before aggregation."""
        values = self.policy_terms(log_probs, dense(data, "old_log_probs", log_probs), entropies, data)
        extras = extras_of(entropies, data)
        if CORRECTION in data:
            values = values * dense(data, CORRECTION, log_probs)
        if self.actor.entropy_coeff:
            values = values - self.actor.entropy_coeff * extras["entropies"]
        if self.actor.use_kl_loss and self.actor.kl_loss_coef:
            kl = token_kl(log_probs, extras["ref_log_probs"], self.actor.kl_loss_type)
            values = values + self.actor.kl_loss_coef * kl
        return torch.where(dense(data, "response_mask", log_probs).bool(), values, 0.0)


def extras_of(entropies: Tensor | None, data: Any) -> dict[str, Any]:
    """What losses may ask for beside log-probs and advantages."""
    reference = data.get("ref_log_prob", None)
    return {"entropies": entropies, "ref_log_probs": None if reference is None else reference.to_padded_tensor(0.0)}


def knows_token_terms(mode: str) -> bool:
    """Whether `GradtraceLoss.token_losses` can tell a token's own term of this loss_mode."""
    return mode == "vanilla" or mode.removeprefix(PREFIX) in policy_loss_names()


# ---------------------------------------------------------------- how actor.loss_agg_mode weighs tokens


def batch_weights(mask: Tensor, actor: Any) -> Tensor:
    """float[R, T]: the weight of every token in the loss of a whole batch with this mask."""
    lengths = mask.sum(1)
    tokens, sequences, longest = int(lengths.sum()), int((lengths > 0).sum()), int(lengths.max())
    return mask * _response_weights(actor, lengths, tokens, sequences, longest).float()[:, None]


def micro_batch_weights(micro_batch: Any, actor: Any) -> Tensor:
    """float[b]: what verl multiplies the token losses of each response of a micro-batch by."""
    mask = micro_batch["response_mask"]
    lengths = torch.stack([part.sum() for part in mask.unbind()]).cpu()
    tokens, sequences, ranks = (
        float(micro_batch[name]) for name in ("batch_num_tokens", "global_batch_size", "dp_size")
    )
    longest = int(mask.offsets().diff().max())
    return (ranks * _response_weights(actor, lengths, tokens, sequences, longest)).float()


def _response_weights(actor: Any, lengths: Tensor, tokens: float, sequences: float, longest: int) -> Tensor:
    """float64[b], from the lengths of responses and from what their whole mini-batch holds."""
    one, tokens, sequences = torch.ones_like(lengths, dtype=torch.float64), max(tokens, 1), max(sequences, 1)
    weights = {
        "token-mean": one / tokens,
        "token-sum": one,
        "seq-mean-token-mean": one / sequences / (lengths + 1e-8),
        "seq-mean-token-sum": one / sequences,
        "seq-mean-token-sum-norm": one / sequences / (actor.loss_scale_factor or longest),
    }
    mode = actor.loss_agg_mode
    if mode not in weights:
        raise GradtraceError(
            f"actor.loss_agg_mode={mode}: how it weighs tokens is not known to gradtrace. Valid: {', '.join(weights)}."
        )
    return weights[mode]


# ---------------------------------------------------------------- what verl calls


def verl_policy_loss(name: str) -> Any:
    """Our policy loss `name` with the signature that verl calls."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        columns, options = _extras.get()
        function = policy_loss(name, **options)
        if missing := [column for column in columns if column in function.needs and columns[column] is None]:
            raise GradtraceError(
                f"actor.policy_loss.loss_mode={name} needs {' and '.join(missing)}. Run it with gradtrace's trainer "
                "(VERL_USE_EXTERNAL_MODULES=gradtrace.integrations.verl, +gradtrace.metrics=true), "
                "actor.calculate_entropy=true and actor.use_kl_loss=true (its coefficient may be 0)"
            )
        mask = response_mask.bool()
        outputs = function(LossInputs(log_prob, old_log_prob, advantages, mask, **columns))
        values = outputs.loss if rollout_is_weights is None else outputs.loss * rollout_is_weights
        total = agg_loss(values, response_mask, loss_agg_mode, **config.global_batch_info)
        tokens = mask.sum().clamp(min=1)
        metrics = {key: float(value / tokens) for key, value in outputs.metric_sums().items()}
        return total, metrics

    loss.__name__ = f"{PREFIX}{name}"
    return loss


def verl_advantage(name: str) -> Any:
    """Our estimator `name` with the signature that verl calls."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray | None = None,
        config: Any = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor]:
        if index is None:
            raise GradtraceError(f"algorithm.adv_estimator={PREFIX}{name} needs the prompts' uids")
        _, groups = np.unique(np.asarray(index, dtype=str), return_inverse=True)
        inputs = AdvantageInputs(token_level_rewards.sum(-1), torch.from_numpy(groups), response_mask.bool().cpu())
        outputs = advantage(name, **advantage_options)(inputs)
        advantages = outputs.advantages.to(token_level_rewards)
        return advantages, advantages if outputs.returns is None else outputs.returns

    estimate.__name__ = f"{PREFIX}{name}"
    return estimate


def register() -> None:
    """Every loss and every estimator that needs no critic as gradtrace_NAME; those that verl lacks as NAME too."""
    if path := os.environ.get(ALGORITHMS):
        import_algorithms(path)
    for name in policy_loss_names():
        function = verl_policy_loss(name)
        register_policy_loss(f"{PREFIX}{name}")(function)
        if name not in core_algos.POLICY_LOSS_REGISTRY:
            register_policy_loss(name)(function)
    for name in advantage_names():
        if "values" in advantage(name).needs or f"{PREFIX}{name}" in core_algos.ADV_ESTIMATOR_REGISTRY:
            continue
        estimator = verl_advantage(name)
        register_adv_est(f"{PREFIX}{name}")(estimator)
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            register_adv_est(name)(estimator)
