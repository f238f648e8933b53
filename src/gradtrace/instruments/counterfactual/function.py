"""`gradtrace.counterfactual`: what the tokens of a response were worth, for people with a loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtrace.batch import Environment
from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual.choose import Clues, choose
from gradtrace.instruments.counterfactual.results import results
from gradtrace.instruments.counterfactual.sampling import Continuations, Progress
from gradtrace.instruments.verify.function import written_tokens
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.datasets import stop_token_ids


def counterfactual(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int] | Sequence[Sequence[int]],
    reward_fn: Callable[[str], float],
    *,
    k: int = 16,
    tokens: str = "all",
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    loss_mask: Sequence[bool] | Sequence[Sequence[bool]] | None = None,
    environment: Environment | None = None,
    max_turns: int = 1,
    budget: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Any:
    """ΔV of the tokens of a response, or of several to one prompt, whose shared beginnings are sampled once.

    `reward_fn` judges the text of a whole response. `k` continuations are drawn for each prefix on average, more where
    the interval is wide; `tokens` chooses as `gradtrace counterfactual --tokens` does. Sample as you do in training:
    with its temperature, top-p, top-k and its limit on the length of a response. A `Counterfactual`, or a list of them.

    Responses of several turns: `loss_mask` says which of their tokens the policy wrote, `environment` answers the calls
    of continuations (docs/multi_turn.md), up to `max_turns` turns.
    """
    several = len(response_ids) > 0 and not isinstance(response_ids[0], int | np.integer)
    given: Any = response_ids if several else [response_ids]
    responses = [[int(token) for token in ids] for ids in given]
    if not responses or not all(responses):
        raise GradtraceError("counterfactual: a response has no tokens, so there is nothing to ask about")
    given_masks: Any = loss_mask if several or loss_mask is None else [loss_mask]
    masks = written_tokens(responses, given_masks)
    if masks is not None and environment is None and not all(bool(mask.all()) for mask in masks):
        raise GradtraceError(
            "counterfactual: the responses hold tokens that the policy did not write: give environment=, which "
            "answers the calls of continuations"
        )
    params = SamplingParams(
        max_new_tokens=max(max_new_tokens, *map(len, responses)),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=stop_token_ids(tokenizer),
    )

    def judge(texts: list[str]) -> list[float]:
        return [float(reward_fn(text)) for text in texts]

    sampler = Sampler(model, tokenizer.pad_token_id or 0, environment=environment, max_turns=max_turns)
    continuations = Continuations(sampler, tokenizer, params, judge, seed)
    written = None if masks is None else [mask.numpy() for mask in masks]
    group = continuations.begin([int(i) for i in prompt_ids], responses, written)
    group.measure(choose(tokens, group, Clues()))
    continuations.run(group, k, budget=budget, progress=progress)
    found = results(group)
    return found if several else found[0]
