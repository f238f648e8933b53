"""What instruments want to have sampled beside a step's rollout, from verl's replicas.

Responses that are judged run through the job's own agent loop and reward, beside the training batch. They lie in the
same partition of the TransferQueue; their prompts are not registered as prompts there, so no training batch takes them.
Other responses come from the replicas directly, when all training responses are there and no weight has moved yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.ray_utils import auto_await
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Samples
from gradtrace.integrations.verl.driver.batches import VALIDATION_FIELDS, group_of_key, read_batch
from gradtrace.tasks.base import Prompt
from gradtrace.tasks.datasets import stop_token_ids

PARTITION = "train"
POLL_SECONDS = 0.2
ENDED = ("finished", "failure")


class PromptFiles:
    """Prompts in files as verl reads them: each one's tokens, and its row of verl's data set as its item."""

    def __init__(self, trainer: Any) -> None:
        self.config = trainer.config
        self.tokenizer, self.processor = trainer.tokenizer, trainer.processor

    def read(self, files: Sequence[str], count: int) -> list[Prompt]:
        """The first `count` prompts; those of `data.val_files` where no files are named."""
        data = self.config.data
        found = create_rl_dataset(list(files) or data.val_files, data, self.tokenizer, self.processor, is_train=False)
        rows = [found[index] for index in range(min(count, len(found)))]
        return [Prompt(self._tokens(row), row) for row in rows]

    def _tokens(self, row: dict[str, Any]) -> list[int]:
        """As verl's agent loop makes them; none for prompts with images or sound."""
        if self._builder.supports_multimodal():
            return []
        longest = self.config.data.max_prompt_length
        return list(self._builder.build_initial_tokens(list(row["raw_prompt"])))[-longest:]

    @cached_property
    def _builder(self) -> Any:
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        return create_continuous_token_builder(
            model.tokenizer,
            hf_model_type=getattr(model.hf_config, "model_type", None),
            chat_template_kwargs=self.config.data.get("apply_chat_template_kwargs", {}),
            processor=model.processor,
        )


class JudgedSamples:
    """Responses to prompts of one instrument, on their way through the job's agent loop."""

    def __init__(self, trainer: Any, name: str, wanted: Samples, step: int) -> None:
        self.trainer = trainer
        self.name = name
        self.step = step
        self.n = wanted.n or trainer.config.actor_rollout_ref.rollout.n
        self.uids = [str(uuid4()) for _ in wanted.prompts]
        self.keys: list[str] = []
        batch = collate_fn([prompt.item for prompt in wanted.prompts])
        batch["uid"] = np.array(self.uids, dtype=object)
        batch["__rollout_n__"] = np.array([self.n] * len(self.uids), dtype=object)
        prompts = tu.get_tensordict(batch)
        tu.assign_non_tensor_data(prompts, "global_steps", step)
        trainer.agent_loop_manager.generate_sequences(prompts)

    def wait(self) -> int:
        """Until all have ended. Returns how many responses are missing."""
        place = {uid: index for index, uid in enumerate(self.uids)}
        while True:
            tags = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
            if all(tags.get(uid, {}).get("status") in ENDED for uid in self.uids):
                break
            time.sleep(POLL_SECONDS)
        found = [key for key in tags if "_" in key and group_of_key(key) in place]
        self.keys = sorted(found, key=lambda key: (place[group_of_key(key)], int(key.rsplit("_", 2)[1])))
        return len(self.uids) * self.n - len(self.keys)

    def take(self) -> RolloutBatch:
        """The judged responses; the queue forgets them."""
        trainer, keys = self.trainer, self.keys
        if not keys:
            raise GradtraceError(
                f"{self.name}: none of the {len(self.uids)} prompts that it needs in step {self.step} got a response; "
                "see the log of the agent loop"
            )
        if trainer.reward_loop_manager.reward_loop_worker_handles is None:
            tags: list[dict[str, Any]] = [{} for _ in keys]
            trainer._compute_reward_colocate(KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION))
        longest, stops = trainer.config.data.max_response_length, stop_token_ids(trainer.tokenizer)
        batch = read_batch(keys, PARTITION, longest, stops, VALIDATION_FIELDS)
        tq.kv_clear(keys=[*keys, *self.uids], partition_id=PARTITION)
        return batch


class ReplicaSampler:
    """Samples in one turn from the full distribution at `rollout.temperature`, whatever `rollout.top_p` is."""

    def __init__(self, trainer: Any) -> None:
        self.rollout = trainer.config.actor_rollout_ref.rollout
        self.response_length = trainer.config.data.max_response_length
        self.stop_token_ids = stop_token_ids(trainer.tokenizer)
        self.client = trainer.get_llm_client()

    def sample(self, wanted: Samples, step: int) -> RolloutBatch:
        """From the weights as they are in the replicas. Log-probs are left to whoever asks."""
        prompts, n = [prompt.ids for prompt in wanted.prompts], wanted.n or self.rollout.n
        if not all(prompts):
            raise GradtraceError("prompts with images or sound are not sampled here yet")
        outputs: list[list[int]] = self._generate([ids for ids in prompts for _ in range(n)], step)
        lengths = torch.tensor([len(ids) for ids in outputs])
        mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
        responses = torch.zeros(mask.shape, dtype=torch.long)
        responses[mask] = torch.tensor([token for ids in outputs for token in ids], dtype=torch.long)
        stopped = [bool(ids) and ids[-1] in self.stop_token_ids for ids in outputs]
        return RolloutBatch(
            prompts=prompts,
            group=torch.arange(len(prompts)).repeat_interleave(n),
            responses=responses,
            response_mask=mask,
            finished=torch.tensor(stopped) | (lengths < self.response_length),
            sampler_log_probs=torch.zeros(mask.shape),
        )

    @auto_await
    async def _generate(self, prompts: list[list[int]], step: int) -> list[list[int]]:
        async def one(number: int) -> list[int]:
            output = await self.client.generate(
                uuid4().hex, prompt_ids=prompts[number], sampling_params=self._params(step, number)
            )
            return [int(token) for token in output.token_ids][: self.response_length]

        return await asyncio.gather(*(one(number) for number in range(len(prompts))))

    def _params(self, step: int, number: int) -> dict[str, Any]:
        params = {
            "temperature": self.rollout.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "logprobs": False,
            "max_tokens": self.response_length,
        }
        if self.rollout.name == "vllm":
            # Random numbers of its own: the engine's go on as they would without these responses.
            seed = int(self.rollout.get("seed", 0) or 0)
            params["seed"] = (1_000_003 * seed + 100_003 * step + number) % 2**31
        return params
