"""`gradtrace.verify(model, optimizer, …)`: the check of `gradtrace verify` inside a training loop of your own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.algorithms import AdvantageInputs, accepted, advantage
from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.measure import Size
from gradtrace.instruments.verify.trial import Trial, working_copy
from gradtrace.instruments.verify.verification import (
    Verification,
    Verifier,
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
    batch_tokens: int = 0,
    groups: int = 8,
    tokens: int = 24,
    halves: int = 12,
    budget: float = math.inf,
    precision: str = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    progress: StageProgress = silent,
) -> Verification:
    """Take real optimizer steps on single tokens, single responses and random halves of groups of a rollout, and say
    how well scores predicted them. Model, optimizer and gradients are the same afterwards, bit by bit.

    Lists have one entry per response; responses with one prompt are a group. `advantages`: GRPO's where left out.
    `loss_mask`: for each token of each response whether the policy wrote it; left out: all of them. T_r counts these.
    `scores`: your own, one tensor [T_r] per response, by name if there are several; the verdict is about the first.
    `config`: settings of the score that is judged where none is given. `grad_clip`: as your loop clips. `batch_tokens`:
    over how many tokens your loss averages (0: those of these responses). `budget`: seconds. `folder`: keep what was
    measured there, and go on from it. `precision`: float32, float64, or auto."""
    check_lists(prompt_ids, response_ids, rewards)
    keys: dict[tuple[int, ...], int] = {}
    group = torch.tensor([keys.setdefault(tuple(map(int, ids)), len(keys)) for ids in prompt_ids])
    judged = torch.as_tensor(rewards, dtype=torch.float64)
    own, steps, original = working_copy(model, optimizer, precision)
    trial = Trial(
        own,
        steps,
        [torch.tensor([*p, *r]) for p, r in zip(prompt_ids, response_ids, strict=True)],
        [len(ids) for ids in prompt_ids],
        group,
        accepted(judged, group),
        grpo(judged, group) if advantages is None else torch.as_tensor(advantages, dtype=torch.float64),
        temperature=temperature,
        grad_clip=grad_clip,
        tokens=batch_tokens,
        original=original,
        written=written_tokens(response_ids, loss_mask),
    )
    named = scores if isinstance(scores, Mapping) else {} if scores is None else {GIVEN: scores}
    given = {name: checked(name, some, trial.lengths) for name, some in named.items()}
    wanted = ({} if config is None else {"this score": config}) | usual_scores()
    store = None if folder is None else ResultStore(Path(folder), "verification", identity(trial, seed, config))
    with evaluation_mode(own):
        verifier = Verifier(trial, wanted, given, Size(groups, tokens, halves), seed, store)
        return verifier.run(budget, progress)


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
    weights = sum(float(p.detach().double().abs().sum()) for p in trial.model.parameters())
    return {
        "sequences": [ids.tolist() for ids in trial.sequences],
        "advantages": trial.advantages.tolist(),
        "written": [mask.tolist() for mask in trial.masks],
        "weights": weights,
        "seed": seed,
        "config": repr(config),
    }
