"""Settings of the algorithm: from rewards to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradtrace.attribution.config import choice, number
from gradtrace.errors import GradtraceError


@dataclass
class DynamicSamplingConfig:
    enable: bool = False
    """DAPO: drop groups whose rewards are all equal and sample new prompts until the batch is full."""
    max_batches: int = number(10, minimum=1)
    """Give up after this many rollouts in one step, and train on what there is (an error if that is nothing)."""


@dataclass
class OverlongConfig:
    enable: bool = False
    """DAPO: a soft penalty for responses that come close to `rollout.max_new_tokens`."""
    buffer: int = number(256, minimum=1)
    """The penalty grows linearly over the last `buffer` tokens before the limit."""
    penalty: float = number(1.0, minimum=0)
    """Subtracted from the reward at the limit."""


@dataclass
class LengthShapingConfig:
    shape: str = choice("none", "cosine", "shortest")
    """`cosine`: right responses lose by length, wrong ones by shortness. `shortest`: by length within the group."""
    strength: float = number(0.5, minimum=0)
    """The most that a reward changes; below 1 a right response stays above a wrong one."""
    threshold: float = 1.0
    """A response is right if its reward is at least this."""


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"
    """How rewards become advantages: a name registered in gradtrace.algorithms (grpo, rloo, turn_rloo, gae …)."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Options of that estimator, e.g. `algorithm.advantage_options.normalize_std=false`; checked by name."""
    policy_loss: str = "ppo"
    """A name registered in gradtrace.algorithms (ppo, gspo, cispo, archer …), or in the file of `path`."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of that loss, e.g. `algorithm.policy_loss_options.clip_high=0.28`; checked by name. A recipe's
    options belong to the recipe's loss: they are dropped when you choose another loss."""
    path: str = ""
    """A file of your own, `my_losses.py`, that registers policy losses or advantages with `@register_policy_loss` and
    `@register_advantage`; `policy_loss` and `advantage` then name them. With engine=verl all nodes must see it."""
    aggregation: str = choice("token_mean", "sequence_mean", "fixed_length")
    """How token losses become one number. fixed_length divides by rollout.max_new_tokens (Dr. GRPO)."""
    kl_coef: float = number(0.0, minimum=0)
    """Weight of the KL penalty against the reference policy in the loss; above 0 loads the reference."""
    kl_estimator: str = choice("k3", "k1", "k2", "k1+", "k3+")
    """k3: low variance, never negative. k2 and the + forms: the right gradient. See gradtrace.algorithms.penalties."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    length_shaping: LengthShapingConfig = field(default_factory=LengthShapingConfig)

    def import_own(self) -> None:
        """Execute the file of `path`, and keep where it is: a run may be continued from another folder."""
        from gradtrace.algorithms.registry import import_algorithms

        self.path = str(Path(self.path).expanduser().absolute())
        import_algorithms(self.path)

    def resolve(self, n: int, max_new_tokens: int) -> None:
        """Names and options exist, and the estimator accepts groups of `n`: it is asked with a dry run.

        Afterwards the options are those that hold, defaults included, for --cfg and the run's config.yaml.
        """
        import torch

        from gradtrace.algorithms.registry import AdvantageInputs, advantage, is_imported, policy_loss

        if self.path and not is_imported(self.path):
            return  # the settings of a run that one was given, whose code nobody has asked to execute
        estimator = advantage(self.advantage, **self.advantage_options)
        loss = policy_loss(self.policy_loss, **self.policy_loss_options)
        mask = torch.ones(2 * n, 1, dtype=torch.bool)
        columns = {name: torch.zeros(2 * n, 1) for name in estimator.needs}
        rewards = torch.arange(2 * n, dtype=torch.float32)
        try:
            estimator(AdvantageInputs(rewards, torch.arange(2).repeat_interleave(n), mask, **columns))
        except GradtraceError as error:
            raise GradtraceError(f"rollout.n={n}, algorithm.advantage={self.advantage}: {error}") from None
        self.advantage_options = dict(estimator.options)
        self.policy_loss_options = dict(loss.options)
        if self.overlong.enable and self.overlong.buffer > max_new_tokens:
            raise GradtraceError(
                f"algorithm.overlong.buffer={self.overlong.buffer} is more than "
                f"rollout.max_new_tokens={max_new_tokens}: even an empty response would be penalised."
            )
