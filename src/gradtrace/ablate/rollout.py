"""The rollout that all cells share: made once, stored, and the same to the last bit when the ablation goes on."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted, advantage, constant_groups
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.metrics import Timer
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.rollouts import add_advantages
from gradtrace.rollout import SamplingParams
from gradtrace.training.experience import Experience
from gradtrace.training.parts import Parts


def make_rollout(parts: Parts) -> tuple[RolloutBatch, Tensor]:
    """A batch as a training step would learn from it, and long[R]: the first wrong token, −1 = none or unknown."""
    config = parts.config
    estimator = advantage(config.algorithm.advantage, **config.algorithm.advantage_options)
    if "values" in estimator.needs:
        raise GradtraceError(
            f"algorithm.advantage={config.algorithm.advantage} needs a critic: ablate with grpo, rloo or dr_grpo."
        )
    params = SamplingParams.of(config.rollout, parts.task.stop_token_ids)
    experience = Experience(
        parts.task, parts.reward, parts.sampler, params, config.algorithm, config.data.train_batch_size
    )
    batch, _ = experience.collect(parts.generators["rollout"], Timer())
    micro_batches = MicroBatches(batch, config.actor.token_budget)
    everything = torch.arange(len(batch))
    if parts.reference is not None:
        batch = parts.reference.add_log_probs(batch, micro_batches(everything))
    with_statistics = fill_statistics(parts.policy, batch, micro_batches, everything)
    batch = batch.replace(advantages=add_advantages(with_statistics, estimator).advantages)
    if bool(constant_groups(batch.need("rewards"), batch.group).all()):
        raise GradtraceError(
            f"No prompt of the rollout has responses with different rewards (all {len(batch.prompts)} groups are "
            "constant): nothing to score. Use another checkpoint, or more prompts (data.train_batch_size)."
        )
    return batch, first_wrong(parts, batch)


def first_wrong(parts: Parts, batch: RolloutBatch) -> Tensor:
    found = []
    for response, group in zip(batch.response_ids, batch.group.tolist(), strict=True):
        index = parts.task.truth(batch.items[group], response)[1] if batch.items else None
        found.append(-1 if index is None else index)
    return torch.tensor(found)


def dump_rollout(batch: RolloutBatch, wrong: Tensor) -> bytes:
    columns: dict[str, Any] = {name: column.numpy() for name, column in batch.to_tensors().items()}
    buffer = io.BytesIO()
    np.savez(buffer, first_wrong=wrong.numpy(), **columns)
    return buffer.getvalue()


def parse_rollout(data: bytes) -> tuple[RolloutBatch, Tensor]:
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        tensors = {name: torch.from_numpy(columns[name]) for name in columns}
    return RolloutBatch.from_tensors(tensors), tensors["first_wrong"]


def describe_rollout(batch: RolloutBatch, wrong: Tensor, data: bytes) -> dict[str, Any]:
    constant = constant_groups(batch.need("rewards"), batch.group)
    good = accepted(batch.need("rewards"), batch.group)
    return {
        "prompts": len(batch.prompts),
        "responses": len(batch),
        "tokens": int(batch.response_lengths.sum()),
        "groups_mixed": len(batch.group[~constant].unique()),
        "accepted": int(good.sum()),
        "rejected": int((~good & ~constant).sum()),
        "first_wrong_known": int(((wrong >= 0) & ~good & ~constant).sum()),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def weights_digest(parts: Parts) -> str:
    """A digest of every parameter's name and bits: two runs with this in common have the same θ."""
    digest = hashlib.sha256()
    for name, value in sorted(parts.policy.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
