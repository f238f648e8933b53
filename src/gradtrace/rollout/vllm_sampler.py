"""`rollout.engine=vllm`: vLLM in this process writes the responses, on the GPU that trains.

Before every call it is handed the trained weights, tensor by tensor, as they lie in memory: `load_weights` copies them
into vLLM's own layout on the device, and nothing goes through files or other processes. It was never run with vLLM
itself, which wants other versions of transformers than ours: the tests hold it against a stand-in with the calls named
here (`LLM.generate`, `reset_prefix_cache`, `load_weights` of the model inside), as TRL's colocated mode makes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from gradtrace.errors import GradtraceError
from gradtrace.rollout.sampler import Sampler
from gradtrace.rollout.settings import SamplingParams
from gradtrace.rollout.turns import Responses, Start
from gradtrace.terminal import Progress


class VllmSampler(Sampler):
    """A `Sampler` whose turns are written by vLLM; turns with tools, checks and batches are the sampler's."""

    def __init__(
        self, model: Any, *settings: Any, engine: Any = None, make_params: Callable[..., Any] | None = None
    ) -> None:
        """`engine`: a vllm.LLM of the same architecture, by default one of its own; `make_params`:
        vllm.SamplingParams."""
        super().__init__(model, *settings)
        if hasattr(model, "get_base_model"):
            raise GradtraceError(
                "rollout.engine=vllm takes whole weights, and LoRA adapters are not merged into them. Use "
                "rollout.engine=embedded."
            )
        if engine is None or make_params is None:
            engine, make_params = start_engine(model)
        self.engine = engine
        self.make_params = make_params

    def _one_turn(
        self,
        starts: list[Start],
        params: SamplingParams,
        generator: torch.Generator | None,
        progress: Progress | None,
    ) -> Responses:
        self._check(starts)
        if any(start.banned for start in starts):
            raise GradtraceError(
                "rollout.engine=vllm cannot keep responses from beginning with given tokens. Use "
                "rollout.engine=embedded."
            )
        self._hand_over_weights()
        seeds = torch.randint(2**31, (len(starts),), generator=generator).tolist()
        requests = [self._request(start, params, seed) for start, seed in zip(starts, seeds, strict=True)]
        outputs = self.engine.generate([{"prompt_token_ids": start.ids} for start in starts], requests, use_tqdm=False)
        written = [completion for output in outputs for completion in output.outputs]
        responses = self._responses(written, max(start.limit for start in starts))
        if progress is not None:
            progress(len(written), len(written))
        return responses

    def _hand_over_weights(self) -> None:
        inside = self.engine.llm_engine.model_executor.driver_worker.model_runner.model
        inside.load_weights((name, weight.detach()) for name, weight in self.model.named_parameters())
        self.engine.reset_prefix_cache()  # keys and values of the weights before

    def _request(self, start: Start, params: SamplingParams, seed: int) -> Any:
        return self.make_params(
            n=start.n,
            max_tokens=start.limit,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # the task says which tokens end a response
            logprobs=0,  # of the token that was drawn alone
            seed=seed,
            detokenize=False,
        )

    def _responses(self, written: list[Any], longest: int) -> Responses:
        rows = len(written)
        responses = Responses(
            tokens=torch.full((rows, longest), self.pad_token_id),
            log_probs=torch.zeros(rows, longest),
            lengths=torch.tensor([len(completion.token_ids) for completion in written]),
            finished=torch.tensor([completion.finish_reason == "stop" for completion in written]),
        )
        for row, completion in enumerate(written):
            tokens = list(completion.token_ids)
            drawn = [known[token].logprob for token, known in zip(tokens, completion.logprobs, strict=True)]
            responses.tokens[row, : len(tokens)] = torch.tensor(tokens)
            responses.log_probs[row, : len(tokens)] = torch.tensor(drawn)
        return responses


def start_engine(model: Any, memory_share: float = 0.3) -> tuple[Any, Callable[..., Any]]:
    """vLLM on the model's GPU, with a share of its memory; and the class of its sampling parameters."""
    if next(model.parameters()).device.type != "cuda":
        raise GradtraceError("rollout.engine=vllm needs model.device=cuda. Use rollout.engine=embedded on a CPU.")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, where the weights are
    try:
        from vllm import LLM
        from vllm import SamplingParams as VllmParams
    except ImportError as error:
        raise GradtraceError(
            f"rollout.engine=vllm: vllm cannot be imported ({error}). Install it in an environment of its own with "
            "gradtrace, or use rollout.engine=embedded with rollout.compile=true."
        ) from error
    engine = LLM(
        model=model.name_or_path,
        dtype="bfloat16",
        gpu_memory_utilization=memory_share,
        logprobs_mode="processed_logprobs",  # those of the distribution that is sampled, temperature included
    )
    return engine, VllmParams
