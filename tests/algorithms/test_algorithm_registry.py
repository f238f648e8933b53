"""Names, options and user-defined algorithms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gradtrace.algorithms import (
    AdvantageInputs,
    AdvantageOutputs,
    LossInputs,
    LossOutputs,
    advantage,
    advantage_names,
    policy_loss,
    policy_loss_names,
    register_advantage,
    register_policy_loss,
)
from gradtrace.algorithms.registry import advantages, policy_losses
from gradtrace.errors import GradtraceError

MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.fixture(autouse=True)
def restore_registries() -> Iterator[None]:
    before = dict(policy_losses.entries()), dict(advantages.entries())
    yield
    policy_losses._entries, advantages._entries = before


def test_the_promised_algorithms_are_there() -> None:
    assert advantage_names() == ["dr_grpo", "gae", "grpo", "reinforce_plus_plus", "rloo", "turn_rloo"]
    assert policy_loss_names() == ["archer", "cispo", "gspo", "ppo"]


def test_a_user_can_add_a_policy_loss() -> None:
    @register_policy_loss("reinforce", needs=("entropies",))
    def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> LossOutputs:
        return LossOutputs(-scale * inputs.advantages * inputs.log_probs)

    loss = policy_loss("reinforce", scale=0.5)
    assert loss.needs == {"entropies"}
    assert loss.options == {"scale": 0.5}
    ones = torch.ones(2, 3)
    assert loss(LossInputs(-ones, -ones, ones, MASK)).loss.tolist() == [[0.5] * 3] * 2


def test_a_user_can_add_an_advantage_estimator() -> None:
    @register_advantage("reward_itself")
    def reward_itself(inputs: AdvantageInputs) -> AdvantageOutputs:
        return AdvantageOutputs(inputs.rewards.unsqueeze(-1) * inputs.mask)

    outputs = advantage("reward_itself")(AdvantageInputs(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), MASK))
    assert outputs.advantages.tolist() == [[1.0] * 3, [2.0] * 3]


def test_a_name_is_taken_once() -> None:
    with pytest.raises(GradtraceError, match="'ppo' is registered already"):
        register_policy_loss("ppo")(lambda inputs: LossOutputs(inputs.log_probs))


def test_unknown_names_and_options_name_the_nearest() -> None:
    with pytest.raises(GradtraceError, match=r"no policy loss 'gppo': did you mean 'ppo'\? Valid: archer, cispo"):
        policy_loss("gppo")
    with pytest.raises(GradtraceError, match="no advantage estimator 'grppo': did you mean 'grpo'"):
        advantage("grppo")
    with pytest.raises(GradtraceError, match="'ppo' has no option 'clip_hi': did you mean 'clip_high'"):
        policy_loss("ppo", clip_hi=0.28)
    with pytest.raises(GradtraceError, match=r"'rloo' has no option 'gamma': Valid: none"):
        advantage("rloo", gamma=1.0)


def test_an_option_without_default_must_be_given() -> None:
    @register_policy_loss("with_option")
    def with_option(inputs: LossInputs, *, strength: float) -> LossOutputs:
        return LossOutputs(strength * inputs.log_probs)

    with pytest.raises(GradtraceError, match="needs the option 'strength'"):
        policy_loss("with_option")
    assert policy_loss("with_option", strength=2.0).options == {"strength": 2.0}


def test_the_package_imports_without_the_rest_of_gradtrace() -> None:
    # A person with a training loop of their own uses this alone: no Ray, no config, no command line.
    code = (
        "import sys, gradtrace.algorithms as package; "
        "[getattr(package, name) for name in package.__all__]; package.policy_loss('ppo'); package.advantage('grpo'); "
        "print(sorted(m for m in sys.modules if m.startswith(('gradtrace.', 'ray', 'hydra', 'transformers'))))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = ast.literal_eval(loaded)
    allowed = ("gradtrace.algorithms", "gradtrace.errors")
    assert [name for name in names if not name.startswith(allowed)] == []


def test_a_loss_is_not_plain_at_ratio_one_unless_it_says_so() -> None:
    """A trace may ride on the training pass of a plain loss only, so a contributed loss must claim it."""

    @register_policy_loss("half_of_the_tokens")
    def half(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.advantages * inputs.log_probs)

    assert not policy_loss("half_of_the_tokens").plain_at_ratio_one
    assert all(policy_loss(name).plain_at_ratio_one for name in ("ppo", "gspo", "cispo", "archer"))
    assert policy_loss("archer").own_kl and not policy_loss("archer", kl_low_entropy=0.0).own_kl
