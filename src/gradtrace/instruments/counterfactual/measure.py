"""What a token was worth: which tokens to measure, the estimates, and `gradtrace.counterfactual` for one's own loop."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual.tree import Measurement

if TYPE_CHECKING:
    from gradtrace.batch import Environment
    from gradtrace.terminal import Progress

ALL_UP_TO = 512
"""Prefixes of a group up to which `auto` means all tokens."""
MOST = 12
"""Tokens of a response that a ranking chooses where it names no number."""
RANKINGS = ("interesting", "entropy", "influence", "difference")
FORMS = f"auto, all, {', '.join(RANKINGS)} (each with :N), or positions such as 0,4-9"


@dataclass(frozen=True)
class Clues:
    """What is known of a group's tokens before anything is sampled; None where it is not."""

    entropy: list[np.ndarray] | None = None
    influence: list[np.ndarray] | None = None


def choose(words: str, group: Measurement, clues: Clues, only: list[int] | None = None) -> np.ndarray:
    """bool[N]: the nodes to measure, so that the chosen tokens (of the responses `only`) have a ΔV. The prompt and the
    ends of responses are always among them."""
    tree = group.tree
    nodes = np.zeros(len(tree), bool)
    nodes[[0, *group.ends]] = True
    for r in range(len(group.responses)) if only is None else only:
        for position in _positions(words, group, clues, r):
            if group.written is not None and not group.written[r][position]:
                continue
            node = tree.paths[r][position]
            nodes[[node, tree.parent[node]]] = True
    return nodes


def _positions(words: str, group: Measurement, clues: Clues, r: int) -> list[int]:
    length = len(group.responses[r])
    name, colon, number = words.partition(":")
    if words == "all" or (words == "auto" and len(group.tree) <= ALL_UP_TO):
        return list(range(length))
    if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", words):
        ranges = [[int(end) for end in part.split("-")] for part in words.split(",")]
        return [p for ends in ranges for p in range(ends[0], ends[-1] + 1) if p < length]
    name = "interesting" if name == "auto" else name
    if name not in RANKINGS or (colon and not re.fullmatch(r"[1-9]\d{0,5}", number)):
        raise GradtraceError(f"--tokens {words!r}: it is one of {FORMS}")
    ranked = _ranked(name, group, clues, r)
    return ranked[: int(number) if colon else MOST]


def _ranked(name: str, group: Measurement, clues: Clues, r: int) -> list[int]:
    """Positions of a response, the most interesting first."""
    if name == "difference":
        return first_difference(group, r)
    if name in ("entropy", "influence"):
        known = clues.entropy if name == "entropy" else clues.influence
        if known is None:
            raise GradtraceError(f"--tokens {name}: the run has no {name} of this group; take another ranking")
        return np.argsort(-np.abs(np.nan_to_num(known[r])), kind="stable").tolist()
    columns = [first_difference(group, r)]
    columns += [_ranked(clue, group, clues, r) for clue in ("entropy", "influence") if getattr(clues, clue)]
    mixed = [position for row in zip_longest(*columns) for position in row if position is not None]
    return list(dict.fromkeys(mixed))


def first_difference(group: Measurement, r: int) -> list[int]:
    """Where response r parts from the sibling with another reward that it shares the longest beginning with."""
    own = group.tree.paths[r]
    shared = [
        sum(1 for a, b in zip(own, path, strict=False) if a == b)
        for other, path in enumerate(group.tree.paths)
        if group.rewards[other] != group.rewards[r]
    ]
    return [max(shared)] if shared and max(shared) < len(own) else []


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """One response: the expected reward V along it, and what each token changed. NaN where nothing was measured."""

    value: np.ndarray
    """float64[T + 1]: V after the prompt, and after each token."""
    value_stderr: np.ndarray
    delta_v: np.ndarray
    """float64[T]: V after the token minus V before it."""
    stderr: np.ndarray
    """float64[T]: standard errors of `delta_v`."""
    reward: float
    """What the response itself got."""


def results(group: Measurement) -> list[Counterfactual]:
    """The estimates of a group's responses."""
    values = group.values()
    found = []
    for r, (path, reward) in enumerate(zip(group.tree.paths, group.rewards, strict=True)):
        delta, stderr = values.delta[path], values.delta_stderr[path]
        if group.written is not None:
            delta[~group.written[r]] = stderr[~group.written[r]] = np.nan
        along = [0, *path]
        found.append(
            Counterfactual(
                value=values.value[along],
                value_stderr=np.sqrt(values.variance[along]),
                delta_v=delta,
                stderr=stderr,
                reward=float(reward),
            )
        )
    return found


@dataclass(frozen=True)
class ContinuationValue:
    """A way in which the policy goes on from a prefix."""

    share: float
    """Its probability, as far as the samples know."""
    ids: tuple[int, ...]
    """The whole response, the prefix included."""
    reward: float
    response: int | None
    """The response of the group that this is; None: a sampled continuation."""


def outcomes(group: Measurement, node: int) -> list[ContinuationValue] | None:
    """What follows a prefix, the likeliest first; None where it is not measured. Shares add up to 1, except for what
    was never sampled."""
    if not group.measured[node]:
        return None
    stretches, tree = group.stretches(), group.tree
    coming = np.zeros(len(tree))
    coming[node] = 1.0
    for later in np.flatnonzero(group.measured):
        if stretches.before[later] >= 0:
            coming[later] += coming[stretches.before[later]] * stretches.entry[later]
    found: dict[tuple[tuple[int, ...], float, int | None], float] = defaultdict(float)
    for index, path in enumerate(tree.paths):
        end = path[-1] if path else 0
        if end in group.ends and group.responses.index(group.responses[index]) == index and stretches.head[end] >= 0:
            share = coming[stretches.head[end]] * stretches.reach[end]
            found[tuple(group.responses[index]), float(group.rewards[index]), index] += share
    for sample in group.samples:
        stretch = stretches.head[sample.node]
        if stretch >= 0 and coming[stretch] > 0:
            prefix = group.responses[tree.owner[sample.node]][: tree.depth[sample.node]]
            share = coming[stretch] * stretches.leaving[stretch] / stretches.count[stretch]
            found[(*prefix, *sample.ids), sample.reward, None] += share
    ranked = sorted(found.items(), key=lambda item: -item[1])
    return [ContinuationValue(float(share), ids, reward, own) for (ids, reward, own), share in ranked if share > 0]


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
    """Measure what each token of a response was worth: ΔV, its change of the expected reward.

    Several responses to one prompt share the samples of their common beginnings.

    `reward_fn` judges the text of a whole response. `k` continuations are drawn for each prefix on average, more where
    the interval is wide; `tokens` chooses as `gradtrace counterfactual --tokens` does. Sample as you do in training:
    with its temperature, top-p, top-k and its limit on the length of a response. A `Counterfactual`, or a list of them.

    Responses of several turns: `loss_mask` says which of their tokens the policy wrote, `environment` answers the calls
    of continuations (docs/multi_turn.md), up to `max_turns` turns.
    """
    from gradtrace.instruments.counterfactual.sampling import Continuations
    from gradtrace.rollout import Sampler, SamplingParams
    from gradtrace.tasks.datasets import stop_token_ids

    several = len(response_ids) > 0 and not isinstance(response_ids[0], int | np.integer)
    masks = loss_mask if several or loss_mask is None else [loss_mask]
    responses, written = _given_responses(response_ids if several else [response_ids], masks, environment)
    params = SamplingParams(
        max_new_tokens=max(max_new_tokens, *map(len, responses)),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=stop_token_ids(tokenizer),
    )
    sampler = Sampler(model, tokenizer.pad_token_id or 0, environment=environment, max_turns=max_turns)
    continuations = Continuations(
        sampler, tokenizer, params, lambda texts: [float(reward_fn(text)) for text in texts], seed
    )
    group = continuations.begin([int(i) for i in prompt_ids], responses, written)
    group.measure(choose(tokens, group, Clues()))
    continuations.run(group, k, budget=budget, progress=progress)
    found = results(group)
    return found if several else found[0]


def _given_responses(
    response_ids: Any, loss_masks: Any, environment: Environment | None
) -> tuple[list[list[int]], list[np.ndarray] | None]:
    """Responses as lists of ids, and which of their tokens the policy wrote (None: all)."""
    from gradtrace.instruments.verify.function import written_tokens

    responses = [[int(token) for token in ids] for ids in response_ids]
    if not responses or not all(responses):
        raise GradtraceError("counterfactual: a response has no tokens, so there is nothing to ask about")
    masks = written_tokens(responses, loss_masks)
    if masks is not None and environment is None and not all(bool(mask.all()) for mask in masks):
        raise GradtraceError(
            "counterfactual: the responses hold tokens that the policy did not write: give environment=, which "
            "answers the calls of continuations"
        )
    return responses, None if masks is None else [mask.numpy() for mask in masks]
