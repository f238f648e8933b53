"""`gradtrace.verify(model, optimizer, …)`: the check of `gradtrace verify` inside a training loop of your own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.algorithms import AdvantageInputs, advantage
from gradtrace.attribution import InfluenceConfig
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.own_loop import batch_of_lists
from gradtrace.instruments.verify.measure import Size
from gradtrace.instruments.verify.trial import Trial, working_copy
from gradtrace.instruments.verify.verification import (
    Verification,
    Verifier,
    asked_of,
    scoring,
    silent,
    usual_scores,
)
from gradtrace.rollout.sampler import evaluation_mode
from gradtrace.terminal import StageProgress
from gradtrace.trace.results import ResultStore

GIVEN = "given scores"


def verify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rewards: Sequence[float],
    loss_mask: Sequence[Sequence[bool]] | None = None,
    advantages: Sequence[float] | None = None,
    scores: Sequence[Tensor] | Mapping[str, Sequence[Tensor]] | None = None,
    config: InfluenceConfig | None = None,
    temperature: float = 1.0,
    grad_clip: float = 0.0,
    weights: Sequence[float] | None = None,
    groups: int = 8,
    tokens: int = 24,
    halves: int = 12,
    budget: float = math.inf,
    precision: str = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    progress: StageProgress = silent,
) -> Verification:
    """Take real optimizer steps of one mini-batch in which single tokens, single responses and halves of groups weigh
    more or less, and say how well scores predicted what they did to its objective. Model, optimizer and gradients are
    the same afterwards, bit by bit.

    Lists have one entry per response of the mini-batch that the next step is taken on; responses with one prompt are a
    group. `advantages`: GRPO's where left out. `loss_mask`: for each token of each response whether the policy wrote
    it; left out: all of them. T_r counts these. `scores`: your own, one tensor [T_r] per response, by name if there are
    several; the verdict is about the first. `config`: settings of the score that is judged where none is given; left
    out: influence. `grad_clip`: as your loop clips. `weights`: what your loss multiplies the terms of each response by;
    left out: one over the tokens of all responses. `budget`: seconds. `folder`: keep what was measured there, and go on
    from it. `precision`: float32, float64, or auto."""
    batch = mini_batch(prompt_ids, response_ids, rewards, loss_mask, advantages)
    own, steps, original = working_copy(model, optimizer, precision)
    with evaluation_mode(own):
        trial = Trial(
            own,
            steps,
            batch,
            temperature=temperature,
            grad_clip=grad_clip,
            weights=None if weights is None else torch.as_tensor(weights, dtype=torch.float64),
            original=original,
        )
        named = scores if isinstance(scores, Mapping) else {} if scores is None else {GIVEN: scores}
        given = {name: checked(name, some, trial.counts) for name, some in named.items()}
        wanted = {"this score": scoring(trial, config, groups)} if config is not None else {}
        store = None if folder is None else ResultStore(Path(folder), "verification", identity(trial, seed, config))
        question = "token" if given or config is None else asked_of(config)
        size = Size(groups, tokens, halves)
        verifier = Verifier(trial, wanted | usual_scores(trial, groups), given, size, seed, store, question)
        return verifier.run(budget, progress)


def mini_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rewards: Sequence[float],
    loss_mask: Sequence[Sequence[bool]] | None,
    advantages: Sequence[float] | None,
) -> RolloutBatch:
    """The lists, checked; GRPO's advantages where none are given."""
    check_lists(prompts, responses, rewards)
    keys: dict[tuple[int, ...], int] = {}
    group = torch.tensor([keys.setdefault(tuple(map(int, ids)), len(keys)) for ids in prompts])
    judged = torch.as_tensor(rewards, dtype=torch.float64)
    own = grpo(judged, group) if advantages is None else torch.as_tensor(advantages, dtype=torch.float64)
    return batch_of_lists(list(keys), responses, judged, group, written_tokens(responses, loss_mask), advantages=own)


def check_lists(prompts: Sequence[Any], responses: Sequence[Any], rewards: Sequence[float]) -> None:
    """One of each for every response, and no response without a token."""
    if not len(prompts) == len(responses) == len(rewards):
        raise GradtraceError(
            f"{len(prompts)} prompts, {len(responses)} responses and {len(rewards)} rewards: one of each is "
            "needed per response"
        )
    if empty := [r for r, ids in enumerate(responses) if not len(ids)]:
        raise GradtraceError(f"response {empty[0]} has no tokens ({len(empty)} such): leave it out")


def written_tokens(
    responses: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[bool]] | None
) -> list[Tensor] | None:
    """Of each response which tokens the policy wrote; None: all."""
    if loss_mask is None:
        return None
    masks = [torch.as_tensor(mask).bool() for mask in loss_mask]
    if [len(mask) for mask in masks] != [len(ids) for ids in responses]:
        raise GradtraceError("loss_mask must have one value for each token of each response")
    if silent := [r for r, mask in enumerate(masks) if not bool(mask.any())]:
        raise GradtraceError(f"loss_mask: the policy wrote no token of response {silent[0]}; leave it out")
    return masks


def checked(name: str, scores: Sequence[Tensor], lengths: list[int]) -> dict[int, Tensor]:
    """Response → its scores, one for each of its tokens."""
    found = {r: torch.as_tensor(values).detach().double().cpu() for r, values in enumerate(scores)}
    wrong = next((r for r, v in found.items() if r >= len(lengths) or v.shape != (lengths[r],)), None)
    if wrong is not None or len(found) != len(lengths):
        where = f"those of response {wrong} are {tuple(found[wrong].shape)}" if wrong is not None else ""
        raise GradtraceError(
            f"{name}: one tensor with a score per token is needed for each of the {len(lengths)} responses; there are "
            f"{len(found)}{where and ', ' + where}"
        )
    return found


def grpo(rewards: Tensor, group: Tensor) -> Tensor:
    """float[R]: GRPO's advantages."""
    one = torch.ones(len(rewards), 1, dtype=torch.bool)
    return advantage("grpo")(AdvantageInputs(rewards, group, one)).advantages[:, 0]


def identity(trial: Trial, seed: int, config: InfluenceConfig | None) -> dict[str, Any]:
    """What a folder of results is about: these tokens at these weights."""
    assert trial.weights is not None
    batch, weights = trial.batch, sum(float(p.detach().double().abs().sum()) for p in trial.model.parameters())
    return {
        "prompts": batch.prompts,
        "responses": batch.response_ids,
        "advantages": batch.need("advantages").sum(1).tolist(),
        "written": batch.response_mask.tolist(),
        "loss_weights": trial.weights.tolist(),
        "weights": weights,
        "seed": seed,
        "config": repr(config),
    }
