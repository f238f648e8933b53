"""Validation rollouts of TracIn selection from verl's replicas, sampled beside the training batch.

They run through the job's own agent loop and reward, with the sampling settings of training, and lie in the same
partition of the TransferQueue; but their prompts are not registered as prompts there, so no training batch takes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import transfer_queue as tq
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from gradtrace.algorithms import AdvantageInputs, AdvantageOutputs, Algorithm
from gradtrace.config import TracinConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin.validation import ValidationSet, ValidationSource
from gradtrace.integrations.verl.driver.batches import VALIDATION_FIELDS, group_of_key, read_batch

PARTITION = "train"
POLL_SECONDS = 0.2
ENDED = ("finished", "failure")


class VerlValidation(ValidationSource):
    """`submit` when the step's prompts go out, `collect` before the replicas fall asleep, `at` before the update."""

    def __init__(
        self,
        settings: TracinConfig,
        pool: Any,
        n: int,
        estimator: Algorithm[AdvantageInputs, AdvantageOutputs],
        seed: int,
        response_length: int,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        """`pool`: verl's dataset of the prompts; `n`: responses to each."""
        super().__init__(settings, pool, estimator, seed)
        self.n = n
        self.response_length = response_length
        self.stop_token_ids = stop_token_ids
        self._waiting: dict[str, int] = {}  # uid of a prompt → its number in the pool
        self._sampled: tuple[ValidationSet, int] | None = None

    def submit(self, step: int, generate: Callable[[Any], None]) -> None:
        """Hand the prompts of this step to the agent loop, if it needs fresh ones."""
        if not self.is_due(step):
            return
        candidates, _ = self.draw(step)
        batch = collate_fn([self.pool[index] for index in candidates.tolist()])
        uids = [str(uuid4()) for _ in range(len(candidates))]
        batch["uid"] = np.array(uids, dtype=object)
        batch["__rollout_n__"] = np.array([self.n] * len(uids), dtype=object)
        prompts = tu.get_tensordict(batch)
        tu.assign_non_tensor_data(prompts, "global_steps", step)
        self._waiting = dict(zip(uids, candidates.tolist(), strict=True))
        generate(prompts)

    @property
    def expected(self) -> int:
        """Responses that were asked for and not yet taken."""
        return len(self._waiting) * self.n

    def collect(self) -> list[str]:
        """Wait for the responses; their keys in the queue."""
        while self._waiting:
            tags = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
            if all(tags.get(uid, {}).get("status") in ENDED for uid in self._waiting):
                return sorted(
                    (key for key in tags if "_" in key and group_of_key(key) in self._waiting),
                    key=lambda key: (group_of_key(key), int(key.rsplit("_", 2)[1])),
                )
            time.sleep(POLL_SECONDS)
        return []

    def take(self, keys: list[str], step: int) -> None:
        """Judged responses become the set of this step and of those until the next refresh; the queue forgets them."""
        if not self._waiting:
            return
        if not keys:
            raise GradtraceError(
                f"tracin: none of the {len(self._waiting)} validation prompts of step {step} got a response; see the "
                "log of the agent loop"
            )
        batch = read_batch(keys, PARTITION, self.response_length, self.stop_token_ids, VALIDATION_FIELDS)
        groups = list(dict.fromkeys(group_of_key(key) for key in keys))  # as `read_batch` numbers them
        candidates = torch.tensor([self._waiting[uid] for uid in groups])
        self._current = self.chosen(batch, candidates, step)
        self._sampled = self._current, len(batch)
        tq.kv_clear(keys=[*keys, *self._waiting], partition_id=PARTITION)
        self._waiting = {}

    def at(self, step: int) -> tuple[ValidationSet, int]:
        assert self._current is not None
        sampled, self._sampled = self._sampled, None
        return sampled or (self._current, 0)


def open_pool(config: Any, files: list[str], tokenizer: Any, processor: Any, report: Callable[[str], None]) -> Any:
    """The prompts that validation rollouts are drawn from: `files`, or those of `data.val_files`."""
    if not files and config.trainer.test_freq > 0:
        report(
            "tracin: validation prompts are those of data.val_files, which verl reports on as well: what it reports is "
            "then not held out from selection. Name other ones with +gradtrace.tracin.val_files=[FILE.parquet]."
        )
    pool = create_rl_dataset(files or config.data.val_files, config.data, tokenizer, processor, is_train=False)
    if not len(pool):
        raise GradtraceError(f"gradtrace.tracin.val_files={files}: no prompts, so there is no validation set.")
    return pool
