"""Our sampler as a verl rollout replica. Requests that are waiting are generated together, in one batch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from gradtrace.integrations.verl.cpu import ROLLOUT
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.datasets import stop_token_ids

GATHER_SECONDS = 0.02
"""How long the first request waits for others to join its batch."""


def server_name(replica: int) -> str:
    return f"gradtrace_cpu_server_{replica}"


class Server:
    """A Ray actor with a copy of the policy."""

    def __init__(self, path: str, response_length: int, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        safely = {"trust_remote_code": False}
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **safely).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, **safely)
        self.stop_token_ids = stop_token_ids(tokenizer)
        self.sampler = Sampler(self.model, tokenizer.pad_token_id or 0)
        self.response_length = response_length
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.global_steps: int | None = None
        self.waiting: list[tuple[list[int], SamplingParams, asyncio.Future[TokenOutput]]] = []
        self.worker: asyncio.Task[None] | None = None
        self.busy = asyncio.Lock()
        """Held while a batch is generated or weights are exchanged."""
        self.may_begin = asyncio.Event()
        self.may_begin.set()

    async def load(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """New weights. The random stream is a function of the step, so that a resumed run draws what it would have."""
        async with self.busy:
            missing, unexpected = self.model.load_state_dict(weights, strict=False)
            self.global_steps = global_steps
            self.generator.manual_seed(1_000_003 * self.seed + (global_steps or 0))
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        if unexpected or set(missing) - tied:
            raise RuntimeError(f"weights from the trainer do not fit: missing {missing[:3]}, unknown {unexpected[:3]}")

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **options: Any
    ) -> TokenOutput:
        params = SamplingParams(
            n=1,
            max_new_tokens=sampling_params.get("max_tokens") or self.response_length,
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            top_k=max(0, int(sampling_params.get("top_k", 0))),
            stop_token_ids=(*self.stop_token_ids, *(sampling_params.get("stop_token_ids") or ())),
        )
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self.waiting.append(([int(token) for token in prompt_ids], params, answer))
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        while self.waiting:
            await self.may_begin.wait()
            params = self.waiting[0][1]
            batch = [request for request in self.waiting if request[1] == params]
            self.waiting = [request for request in self.waiting if request[1] != params]
            # Another thread, so that requests can arrive meanwhile; they form the next batch.
            try:
                async with self.busy:
                    outputs = await asyncio.to_thread(self._generate, [prompt for prompt, _, _ in batch], params)
            except Exception as error:
                for _, _, answer in batch:
                    answer.set_exception(error)
                continue
            for (_, _, answer), output in zip(batch, outputs, strict=True):
                answer.set_result(output)

    def _generate(self, prompts: list[list[int]], params: SamplingParams) -> list[TokenOutput]:
        batch = self.sampler.generate(prompts, params, generator=self.generator)
        return [
            TokenOutput(
                token_ids=batch.responses[row, :length].tolist(),
                log_probs=batch.sampler_log_probs[row, :length].tolist(),
                stop_reason="completed",
                extra_fields={"global_steps": self.global_steps},
            )
            for row, length in enumerate(batch.response_lengths.tolist())
        ]

    async def _nothing(self, *args: Any, **options: Any) -> None:
        return None

    async def abort_all_requests(self, *args: Any, **options: Any) -> None:
        """Begin no batch until generation is resumed. The one under way is finished: it is short."""
        self.may_begin.clear()
        async with self.busy:
            pass

    async def resume_generation(self, *args: Any, **options: Any) -> None:
        self.may_begin.set()

    # There is no memory to hand back.
    wake_up = sleep = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        handle: Any = (
            ray.remote(Server)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                self.model_config.path,
                self.config.response_length,
                1000 * getattr(self.config, "seed", 0) + self.replica_rank,
            )
        )
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = name


class Adapter(BaseRollout):
    """The trainer's side: hands weights to the replica of its rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica = rank // ranks if replica_rank == -1 else replica_rank
        self.is_sender = rank % ranks == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **options: Any,
    ) -> None:
        # Every rank runs through the weights: gathering a sharded tensor is collective.
        state = {name: tensor.detach().to("cpu", torch.float32).clone() for name, tensor in weights}
        if self.is_sender:
            await ray.get_actor(server_name(self.replica)).load.remote(state, global_steps)


def register() -> None:
    RolloutReplicaRegistry.register(ROLLOUT, lambda: Replica)
    _ROLLOUT_REGISTRY[ROLLOUT, "async"] = f"{Adapter.__module__}.{Adapter.__name__}"
