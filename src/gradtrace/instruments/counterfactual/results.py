"""Estimates of a measured group as people read them: along each response, and what follows a prefix."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from gradtrace.instruments.counterfactual.tree import Measurement


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
class Outcome:
    """A way in which the policy goes on from a prefix."""

    share: float
    """Its probability, as far as the samples know."""
    ids: tuple[int, ...]
    """The whole response, the prefix included."""
    reward: float
    response: int | None
    """The response of the group that this is; None: a sampled continuation."""


def outcomes(group: Measurement, node: int) -> list[Outcome] | None:
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
    return [Outcome(float(share), ids, reward, own) for (ids, reward, own), share in ranked if share > 0]
