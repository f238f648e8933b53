"""`Sampler`: batched generation with a key-value cache on any transformers causal model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import Environment, RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.rollout import llama_decoder
from gradtrace.rollout.decoder import CompiledDecoder, CompiledModel, Decoder, ModelDecoder, Prompts
from gradtrace.rollout.draw import draw
from gradtrace.rollout.llama_decoder import LlamaDecoder
from gradtrace.rollout.settings import SamplingParams
from gradtrace.rollout.turns import Responses, Start, in_turns
from gradtrace.terminal import Progress


class Sampler:
    """Samples n responses per prompt; a prompt is read once and its keys and values are shared out.

    A response depends on its prompt, the weights and its own random numbers, not on what else is in the batch:
    splitting into chunks and early leaving change nothing (beyond the rounding of a different matrix shape).
    The model is read at every call, so it may be trained in between.
    """

    def __init__(
        self,
        model: Any,
        pad_token_id: int = 0,
        max_batch_tokens: int = 32_768,
        environment: Environment | None = None,
        max_turns: int = 1,
        compiled: bool = False,
    ) -> None:
        """`model`: a transformers causal LM, or peft's wrapper around one.

        `pad_token_id` fills responses after their end; it is never shown to the model.
        `max_batch_tokens` bounds rows x (prompt + response) held in the cache at once; at least one row runs.
        `environment` answers calls, after which the policy goes on, up to `max_turns` turns.
        `compiled`: steps of decoding run as one compiled graph (see `CompiledDecoder`).
        """
        if max_batch_tokens < 1:
            raise GradtraceError(f"max_batch_tokens={max_batch_tokens}; it must be at least 1")
        adapter = getattr(model, "active_peft_config", None)
        if adapter is not None and adapter.is_prompt_learning:
            raise GradtraceError(
                f"the sampler cannot run {adapter.peft_type.value} adapters, which put virtual tokens before the "
                "prompt; use LoRA, or another adapter that changes the layers"
            )
        self.model = model
        self.pad_token_id = pad_token_id
        self.max_batch_tokens = max_batch_tokens
        self.environment = environment
        self.max_turns = max_turns
        self.compiled = CompiledModel(model) if compiled else None

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        generator: torch.Generator | None = None,
        items: list[dict[str, Any]] | None = None,
        progress: Progress | None = None,
    ) -> RolloutBatch:
        """Responses g·n … g·n+n−1 of the batch belong to prompt g.

        All randomness is drawn first, from `generator` (on the CPU; torch's global one if None), one number per
        response and step: the same generator state gives the same responses. `progress(ended, all)` is called
        whenever responses have ended.
        """
        if not prompts:
            raise GradtraceError("no prompts to sample from: the prompt list is empty")
        starts = [Start(list(prompt), params.n, params.max_new_tokens) for prompt in prompts]
        responses = self.respond(starts, params, generator, progress)
        longest = int(responses.lengths.max())
        mask = torch.arange(longest) < responses.lengths[:, None]
        return RolloutBatch(
            prompts=[list(prompt) for prompt in prompts],
            group=torch.arange(len(prompts)).repeat_interleave(params.n),
            responses=responses.tokens[:, :longest].clone(),
            response_mask=mask if responses.written is None else responses.written[:, :longest].clone(),
            lengths=None if responses.written is None else responses.lengths,
            segments=responses.segments,
            finished=responses.finished,
            sampler_log_probs=responses.log_probs[:, :longest].clone(),
            items=list(items or []),
        )

    def respond(
        self,
        starts: list[Start],
        params: SamplingParams,
        generator: torch.Generator | None = None,
        progress: Progress | None = None,
    ) -> Responses:
        """Responses to every start in order, each as many and as long as it says (`params.n` and
        `params.max_new_tokens` do not count), with all turns where there is an environment. Randomness and progress
        are as in `generate`, for each turn."""
        if self.environment is None:
            return self._one_turn(starts, params, generator, progress)
        stops = (*params.stop_token_ids, *self.environment.stop_token_ids)
        turn = replace(params, stop_token_ids=stops)
        return in_turns(
            lambda these: self._one_turn(these, turn, generator, progress),
            starts,
            self.environment,
            self.max_turns,
            self.pad_token_id,
        )

    def _one_turn(
        self,
        starts: list[Start],
        params: SamplingParams,
        generator: torch.Generator | None,
        progress: Progress | None,
    ) -> Responses:
        """Responses up to the first stop token."""
        self._check(starts)
        row_start = torch.tensor([index for index, start in enumerate(starts) for _ in range(start.n)])
        row_count, longest = len(row_start), max(start.limit for start in starts)
        uniforms = torch.rand(row_count, longest, dtype=torch.float64, generator=generator)
        # Made outside of inference mode: a loss may save these tensors for its backward pass.
        responses = Responses(
            tokens=torch.full((row_count, longest), self.pad_token_id),
            log_probs=torch.zeros(row_count, longest),
            lengths=torch.zeros(row_count, dtype=torch.long),
            finished=torch.zeros(row_count, dtype=torch.bool),
        )
        ended = 0

        def report(count: int) -> None:
            nonlocal ended
            ended += count
            if progress is not None:
                progress(ended, row_count)

        # Inference mode is faster, but a model that keeps a tensor made in it could not be trained afterwards;
        # of the family that LlamaDecoder supports we know that it keeps none.
        known = self.compiled is None and llama_decoder.supports(self.model)
        make_decoder: Callable[..., Decoder] = LlamaDecoder if known else ModelDecoder
        if self.compiled is not None:
            make_decoder = partial(CompiledDecoder, compiled=self.compiled)
        with evaluation_mode(self.model), torch.inference_mode() if known else torch.no_grad():
            for rows in self._chunks(starts, row_start):
                self._sample_chunk(make_decoder, starts, row_start[rows], rows, params, uniforms, responses, report)

        if not bool(responses.log_probs.isfinite().all()):
            raise GradtraceError(
                "the model's logits are not finite (NaN or infinite) while sampling: its weights are broken, "
                "most likely by a step with too large a learning rate; go back to an earlier checkpoint"
            )
        return responses

    def _check(self, starts: list[Start]) -> None:
        vocabulary = len(self.model.get_input_embeddings().weight)
        limit: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for index, start in enumerate(starts):
            prompt = start.ids
            if not prompt:
                raise GradtraceError(f"prompt {index} is empty; it needs at least one token to continue from")
            if limit is not None and len(prompt) + start.limit > limit:
                raise GradtraceError(
                    f"prompt {index} has {len(prompt)} tokens; with max_new_tokens={start.limit} that is "
                    f"more than the {limit} positions of the model: shorten or filter the prompts, or lower "
                    "max_new_tokens"
                )
            if not (min(prompt) >= 0 and max(prompt) < vocabulary):
                raise GradtraceError(
                    f"prompt {index} has token ids from {min(prompt)} to {max(prompt)}, the model knows 0 to "
                    f"{vocabulary - 1}: is this the model's own tokenizer?"
                )

    def _chunks(self, starts: list[Start], row_start: Tensor) -> Iterator[Tensor]:
        """Rows in chunks that fit `max_batch_tokens`; prompts of like length together, since a chunk pads."""
        lengths = [len(start.ids) for start in starts]
        first = torch.tensor([0, *(start.n for start in starts)]).cumsum(0).tolist()
        rows: list[int] = []
        longest = 0
        for index in sorted(range(len(starts)), key=lengths.__getitem__):
            longest = max(longest, starts[index].limit)
            for row in range(first[index], first[index + 1]):
                # This prompt is the longest of its chunk so far.
                if rows and (len(rows) + 1) * (lengths[index] + longest) > self.max_batch_tokens:
                    yield torch.tensor(rows)
                    rows, longest = [], starts[index].limit
                rows.append(row)
        yield torch.tensor(rows)

    def _sample_chunk(
        self,
        make_decoder: Callable[..., Decoder],
        starts: list[Start],
        row_start: Tensor,
        rows: Tensor,
        params: SamplingParams,
        uniforms: Tensor,
        responses: Responses,
        report: Callable[[int], None],
    ) -> None:
        device = self.model.get_input_embeddings().weight.device
        chunk_starts, row_prompts = row_start.unique_consecutive(return_inverse=True)
        here = [starts[index] for index in chunk_starts.tolist()]
        rectangle = Prompts([start.ids for start in here], device)
        limits = torch.tensor([start.limit for start in here])[row_prompts]
        longest = int(limits.max())
        decoder = make_decoder(self.model, rectangle, row_prompts.to(device), longest)

        alive = rows  # long[B]: the response that each row of the decoder holds
        soonest, limits = int(limits.min()), limits.to(device)
        stop_tokens = torch.tensor(params.stop_token_ids, device=device, dtype=torch.long)
        banned = _banned_pairs(here, row_prompts).to(device)
        logits, unwritten = decoder.first_logits, _Unwritten()
        for step in range(longest):
            own_uniforms = uniforms[:, step].index_select(0, alive).to(device)
            tokens, log_probs = draw(logits, params, own_uniforms, banned if step == 0 else None)
            unwritten.add(tokens, log_probs)
            if params.stop_token_ids or step + 1 >= soonest:  # else nobody can end here
                stopped = torch.isin(tokens, stop_tokens)
                ended = stopped if step + 1 < soonest else stopped | (limits == step + 1)
            else:
                ended = None
            if ended is not None and bool(ended.any()):
                unwritten.write(responses, alive, step + 1)
                leaving = alive[ended.cpu()]
                responses.finished[alive[stopped.cpu()]] = True
                responses.lengths[leaving] = step + 1
                report(len(leaving))
                kept = _fill_holes(~ended)
                if not len(kept):
                    return
                alive, tokens, limits = alive[kept.cpu()], tokens[kept], limits[kept]
                decoder.keep(kept)
            logits = decoder.step(tokens)


class _Unwritten:
    """Tokens and log-probs of the steps since rows last left. They are written all at once, when the next rows leave:
    for a small model, scattering them at every step takes about as long as drawing them."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Both [B], of one more step."""
        self.steps.append((tokens, log_probs))

    def write(self, responses: Responses, alive: Tensor, end: int) -> None:
        """Into the rows `alive` long[B] of the responses, which are now `end` tokens long."""
        tokens, log_probs = (torch.stack(columns, 1).cpu() for columns in zip(*self.steps, strict=True))
        columns = slice(end - len(self.steps), end)
        responses.tokens[:, columns].index_copy_(0, alive, tokens)
        responses.log_probs[:, columns].index_copy_(0, alive, log_probs)
        self.steps = []


def _banned_pairs(starts: list[Start], row_prompts: Tensor) -> Tensor:
    """long[2, K]: rows, and tokens that they may not begin with."""
    pairs = [(row, t) for row, index in enumerate(row_prompts.tolist()) for t in starts[index].banned]
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()


def _fill_holes(alive: Tensor) -> Tensor:
    """The rows that stay, in an order that moves as few as possible: the last ones fill the holes."""
    count = int(alive.sum())
    rows = torch.arange(count, device=alive.device)
    rows[~alive[:count]] = alive[count:].nonzero().squeeze(-1) + count
    return rows


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout while sampling; afterwards exactly those modules train that did before."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class HalfPrecisionSampler(Sampler):
    """Samples in bfloat16 from weights that are trained in float32: on a CPU what GPUs do with vLLM beside a trainer.

    The bfloat16 copy of the model is brought up to date before every call.
    """

    def __init__(self, model: Any, *settings: Any) -> None:
        super().__init__(copy.deepcopy(model).to(torch.bfloat16), *settings)
        self.trained = model

    @torch.no_grad()
    def respond(self, *starts: Any, **options: Any) -> Responses:
        for own, trained in zip(self.model.parameters(), self.trained.parameters(), strict=True):
            own.copy_(trained)
        return super().respond(*starts, **options)
