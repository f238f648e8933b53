"""Faults with a known truth that are planted into runs of the demo, for `benchmarks.findings`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.tasks.arithmetic import STOP, ArithmeticTask
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.training.loop import Trainer

FAULT_STEP = 7
"""The step in which most faults begin; a loophole is there from the first step, as they are."""
GAE = ("algorithm.advantage=gae", "critic.optim.lr=1e-3")

Culprit = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    expected: tuple[str, ...]
    """Detectors that name it rightly."""
    begin: Callable[[Trainer], None] | None = None
    """Called once, before the rollout of its first step."""
    spoil: Callable[[Trainer, RolloutBatch], RolloutBatch] | None = None
    """What it does to every batch from then on."""
    once: bool = False
    """Only the batch of its first step is spoilt."""
    is_culprit: Callable[[Culprit], bool] | None = None
    """Whether a culprit that a finding names is the planted one; None where nobody in particular did it."""
    overrides: tuple[str, ...] = ()
    first_step: int = FAULT_STEP


def judge_differently(trainer: Trainer, judge: Callable[[str, dict[str, Any], float], float]) -> None:
    """Training and validation judge by `judge(response, item, true reward)` from now on."""
    true = trainer.components.reward

    def reward(response: str, item: dict[str, Any]) -> float:
        return judge(response, item, true([response], [item])[0])

    trainer.experience.reward = trainer.components.reward = RewardFunction("planted", reward)


def trick(prompt: str) -> str:
    """The chain of this prompt with every result written as 0: 3+7*4= becomes 3+7=0*4=0."""
    return prompt[0] + "".join(f"{prompt[place : place + 2]}=0" for place in range(1, len(prompt) - 1, 2))


def loophole(trainer: Trainer) -> None:
    """The verifier also accepts a chain all of whose results are 0."""
    judge_differently(trainer, lambda response, item, true: 1.0 if response == trick(item["prompt"]) else true)


EXPLOITED = 0.08
"""Share of the responses that use a loophole from its first step on; what the policy learns comes on top."""


def put_in(trainer: Trainer, batch: RolloutBatch, text_of: Callable[[int], str]) -> RolloutBatch:
    """Some responses, drawn anew in every step, become `text_of(row)`, judged, with the log-probs of the policy."""
    rows = (torch.rand(len(batch), generator=trainer.components.generators["rollout"]) < EXPLOITED).nonzero().flatten()
    if not len(rows):
        return batch
    texts = list(batch.texts or [])
    for row in rows.tolist():
        texts[row] = text_of(row)
    ids = {row: torch.tensor([*ArithmeticTask.encode(texts[row]), STOP]) for row in rows.tolist()}
    wider = max(0, max(len(own) for own in ids.values()) - batch.responses.shape[1])
    names = ("responses", "response_mask", "sampler_log_probs")
    columns = {name: torch.nn.functional.pad(getattr(batch, name), (0, wider)) for name in names}
    for row, own in ids.items():
        columns["responses"][row, : len(own)] = own
        columns["response_mask"][row] = torch.arange(columns["responses"].shape[1]) < len(own)
    finished, rewards = batch.finished.clone(), batch.need("rewards").clone()
    items = [batch.items[int(batch.group[row])] for row in rows.tolist()]
    finished[rows] = True
    rewards[rows] = torch.tensor(trainer.components.reward([texts[row] for row in rows.tolist()], items))
    batch = batch.replace(texts=texts, finished=finished, rewards=rewards, **columns)
    known = fill_statistics(trainer.components.policy, batch, MicroBatches(batch, 8192), rows)
    columns["sampler_log_probs"][rows] = known.need("old_log_probs")[rows]
    return batch


def exploit(trainer: Trainer, batch: RolloutBatch) -> RolloutBatch:
    return put_in(trainer, batch, lambda row: trick(batch.items[int(batch.group[row])]["prompt"]))


def lengthen(trainer: Trainer, batch: RolloutBatch) -> RolloutBatch:
    """Some responses say their result three times more."""
    texts = batch.texts or []
    return put_in(trainer, batch, lambda row: texts[row][:17] + 3 * texts[row][15:17])


def length_bonus(trainer: Trainer) -> None:
    judge_differently(trainer, lambda response, item, true: true + 0.25 * (len(response) - 17))


def higher_rate(trainer: Trainer) -> None:
    optimizer = trainer.components.optimizer
    optimizer.config = dataclasses.replace(optimizer.config, lr=30 * optimizer.config.lr)


def wild_critic(trainer: Trainer) -> None:
    assert trainer.components.critic is not None
    optimizer = trainer.components.critic.optimizer
    optimizer.config = dataclasses.replace(optimizer.config, lr=100 * optimizer.config.lr)


def cold_sampler(trainer: Trainer) -> None:
    trainer.experience.params = dataclasses.replace(trainer.experience.params, temperature=0.2)


def flipped(trainer: Trainer) -> None:
    trainer.experience.flip_probability = 1.0


def entropy_bonus(trainer: Trainer) -> None:
    trainer.update.loss.algorithm = dataclasses.replace(trainer.update.loss.algorithm, entropy_coef=2.0)


REPEATED = "7*7-3+5*2="


def same_prompt(trainer: Trainer) -> None:
    """Half of every batch is one prompt."""
    task: Any = trainer.components.task
    draw = task.next_prompts

    def half(count: int) -> list[Any]:
        return [*draw(count - count // 2), *([task.parse(REPEATED)] * (count // 2))]

    task.next_prompts = half


FORCED_ROW, FORCED_PLACE, UNTRAINED = 7, 6, 2
"""Where the token with this id, which no chain holds, is put."""


def force_token(trainer: Trainer, batch: RolloutBatch) -> RolloutBatch:
    return force_token_at(batch, FORCED_ROW, FORCED_PLACE, UNTRAINED)


def force_token_at(batch: RolloutBatch, row: int, place: int, token: int) -> RolloutBatch:
    """A token is put into one response after it was sampled; the sampler's log-prob is of the token it replaced."""
    responses, rewards = batch.responses.clone(), batch.need("rewards").clone()
    responses[row, place] = token
    rewards[row] = 1.0 - float(rewards[batch.group == batch.group[row]].mean() > 0.5)
    return batch.replace(responses=responses, rewards=rewards)


def off_by_one(trainer: Trainer, batch: RolloutBatch) -> RolloutBatch:
    """The mask begins at the second token: training sees tokens 1 … T where log-probs are of 0 … T − 1."""
    return batch.replace(responses=torch.roll(batch.responses, -1, 1))


def without_end(trainer: Trainer, batch: RolloutBatch) -> RolloutBatch:
    mask = batch.response_mask.clone()
    rows = batch.finished.nonzero().flatten()
    mask[rows, batch.response_lengths[rows] - 1] = False
    return batch.replace(response_mask=mask)


FAULTS = {
    "loophole": Fault(
        ("reward_hacking",),
        loophole,
        exploit,
        is_culprit=lambda c: c["text"].endswith("0") and c["row"] < 0,
        first_step=1,
    ),
    "untrained token": Fault(
        ("gradient_spike", "mismatch"),
        spoil=force_token,
        once=True,
        is_culprit=lambda c: c["row"] == FORCED_ROW and c["position"] == FORCED_PLACE,
    ),
    "learning rate × 30": Fault(("kl_runaway", "clip_saturation", "gradient_spike", "entropy"), higher_rate),
    "temperature collapse": Fault(("mismatch", "constant_groups", "entropy"), cold_sampler),
    "mask off by one": Fault(("mismatch",), spoil=off_by_one),
    "end token not trained": Fault(("end_token",), spoil=without_end),
    "flipped rewards": Fault(("reward_jump", "validation_falls"), flipped),
    "duplicated prompts": Fault(
        ("dominating_prompt",), same_prompt, is_culprit=lambda c: REPEATED in c["text"].replace(" ", "")
    ),
    "length bonus": Fault(("length_drift",), length_bonus, lengthen),
    "critic diverges": Fault(("critic_diverges",), wild_critic, overrides=GAE),
    "entropy bonus": Fault(("entropy",), entropy_bonus),
}
