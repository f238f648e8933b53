"""E of the entropy probe on verl: responses to held-out prompts, from the replicas that have just sampled.

Between the rollout and the update the replicas hold the weights that the update starts from. When all responses of
the training batch have arrived, E is drawn from the full distribution at `rollout.temperature`, whatever
`rollout.top_p` is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.ray_utils import auto_await
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from gradtrace.batch import RolloutBatch
from gradtrace.config import EntropyProbeConfig
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.rank.losses import knows_token_terms

SINGLE_TURN = "single_turn_agent"


class EvaluationSampler:
    def __init__(
        self,
        config: Any,
        client: Any,
        settings: EntropyProbeConfig,
        stop_token_ids: tuple[int, ...],
        report: Callable[[str], None],
    ) -> None:
        """`config`: verl's; `client`: its `LLMServerClient`. Prompts are the first of `data.val_files`."""
        self.rollout = config.actor_rollout_ref.rollout
        self.client = client
        self.n = settings.n
        self.stop_token_ids = stop_token_ids
        self.response_length = config.data.max_response_length
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        # Prompts become tokens as in verl's agent loop.
        builder = create_continuous_token_builder(
            model.tokenizer,
            hf_model_type=getattr(model.hf_config, "model_type", None),
            chat_template_kwargs=config.data.get("apply_chat_template_kwargs", {}),
            processor=model.processor,
        )
        if builder.supports_multimodal():
            raise GradtraceError("gradtrace.entropy_probe: prompts with images or sound are not probed yet")
        dataset = create_rl_dataset(
            config.data.val_files, config.data, model.tokenizer, model.processor, is_train=False
        )
        count = min(settings.prompts, len(dataset))
        if count < 2:
            raise GradtraceError(
                f"gradtrace.entropy_probe needs at least 2 held-out prompts, data.val_files has {count}"
            )
        if count < settings.prompts:
            report(f"gradtrace.entropy_probe.prompts={settings.prompts}: data.val_files has {count}, and all are used.")
        longest = config.data.max_prompt_length
        self.prompts = [
            list(builder.build_initial_tokens(list(dataset[index]["raw_prompt"])))[-longest:] for index in range(count)
        ]

    def sample(self, step: int) -> RolloutBatch:
        """E, from the weights as they are in the replicas. Its log-probs are left to the probe."""
        outputs: list[list[int]] = self._generate(step)
        lengths = torch.tensor([len(ids) for ids in outputs])
        mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
        responses = torch.zeros(mask.shape, dtype=torch.long)
        responses[mask] = torch.tensor([token for ids in outputs for token in ids], dtype=torch.long)
        stopped = [bool(ids) and ids[-1] in self.stop_token_ids for ids in outputs]
        return RolloutBatch(
            prompts=self.prompts,
            group=torch.arange(len(self.prompts)).repeat_interleave(self.n),
            responses=responses,
            response_mask=mask,
            finished=torch.tensor(stopped) | (lengths < self.response_length),
            sampler_log_probs=torch.zeros(mask.shape),
        )

    @auto_await
    async def _generate(self, step: int) -> list[list[int]]:
        async def one(number: int) -> list[int]:
            output = await self.client.generate(
                uuid4().hex,
                prompt_ids=self.prompts[number // self.n],
                sampling_params=self._params(step, number),
            )
            return [int(token) for token in output.token_ids][: self.response_length]

        return await asyncio.gather(*(one(number) for number in range(len(self.prompts) * self.n)))

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
            # Random numbers of its own: the engine's go on as they would without E.
            seed = int(self.rollout.get("seed", 0) or 0)
            params["seed"] = (1_000_003 * seed + 100_003 * step + number) % 2**31
        return params


def check_token_terms(config: Any, section: str) -> None:
    """Refuse a loss of which nobody knows what a single token adds to it."""
    mode = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if not knows_token_terms(mode):
        raise GradtraceError(
            f"gradtrace.{section} does not know the token terms of actor.policy_loss.loss_mode={mode}, which "
            "shares are about; use vanilla or one of gradtrace's losses"
        )


def check_probe_job(config: Any) -> None:
    """Refuse, before any worker starts, a job whose probe would be wrong."""
    check_token_terms(config, "entropy_probe")
    agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if agent != SINGLE_TURN:
        raise GradtraceError(
            f"gradtrace.entropy_probe: rollout.agent.default_agent_loop={agent}; only {SINGLE_TURN} is probed, "
            "since E is sampled in one turn. Leave the probe out (every=0); the traces work with other agent loops"
        )
