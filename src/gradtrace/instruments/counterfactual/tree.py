"""The responses of a group as one tree of prefixes, and the expected reward V at the prefixes that are measured.

At a prefix the policy either goes on as one of the responses did, with a probability p that one forward pass knows
exactly, or it *leaves* them there. Where a response ends its reward is known. So only what happens after leaving has to
be sampled, and

    V(prefix) = Σ over responses' next tokens of p · V(prefix + token)  +  (1 − Σ p) · mean reward after leaving.

A plain mean of k continuations from the prefix has the same expectation; most of them would write the response again
and tell nothing new. Standard errors shrink with 1 − p here, and ΔV of a token that was certain is exactly 0.

Not every prefix needs to be measured. A *stretch* is a measured prefix with all prefixes after it up to the next
measured ones. One mean is kept for leaving the responses anywhere in a stretch; samples leave at a prefix of it in
proportion to the probability of leaving there, so they stay valid samples when more prefixes are measured later and
stretches become shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

NEGLIGIBLE = 1e-6
"""A stretch that is left with less probability than this is not sampled."""


class PrefixTree:
    """Node 0 is the prompt; every other node is a prefix of a response, made by its last token. Parents come first."""

    def __init__(self, responses: list[list[int]]) -> None:
        self.parent: list[int] = [-1]
        self.token: list[int] = [-1]
        self.depth: list[int] = [0]
        self.children: list[dict[int, int]] = [{}]
        self.owner: list[int] = [0]
        """A response that the prefix belongs to."""
        self.paths = [self._add(index, response) for index, response in enumerate(responses)]
        """Of each response: the node after each of its tokens."""

    def _add(self, index: int, response: list[int]) -> list[int]:
        node, path = 0, []
        for token in response:
            if token not in self.children[node]:
                self.children[node][token] = len(self.parent)
                self.parent.append(node)
                self.token.append(token)
                self.depth.append(self.depth[node] + 1)
                self.children.append({})
                self.owner.append(index)
            node = self.children[node][token]
            path.append(node)
        return path

    def __len__(self) -> int:
        return len(self.parent)

    def node(self, response: int, length: int) -> int:
        """The prefix that has the first `length` tokens of a response."""
        return self.paths[response][length - 1] if length else 0

    def leaves_at(self, node: int, continuation: list[int]) -> tuple[int, int]:
        """Where a continuation of `node` leaves the responses: that node, and how many tokens it followed them."""
        for followed, token in enumerate(continuation):
            if token not in self.children[node]:
                return node, followed
            node = self.children[node][token]
        return node, len(continuation)


@dataclass(frozen=True, eq=False)
class Values:
    """What is known at each node of a tree; NaN where it is not measured."""

    value: np.ndarray
    """float64[N]: V of the prefix."""
    variance: np.ndarray
    """float64[N]: the square of V's standard error."""
    delta: np.ndarray
    """float64[N]: V minus V of the prefix without its last token."""
    delta_stderr: np.ndarray


@dataclass(eq=False)
class Measurement:
    """A group of responses with all that has been sampled from it; estimates follow from it alone."""

    prompt: list[int]
    responses: list[list[int]]
    rewards: np.ndarray
    """float64[R]: of the responses."""
    ended: np.ndarray
    """bool[R]: nothing can follow the response: it has a stop token, or is as long as one may be."""
    log_probs: list[np.ndarray]
    """Of each response's tokens, in the distribution that continuations are drawn from; NaN where the policy did not
    write them."""
    measured: np.ndarray
    """bool[N]: the nodes of the tree whose V is asked for."""
    samples: list[Sample]
    written: list[np.ndarray] | None = None
    """Of each response which tokens the policy wrote; None: all. The others follow for certain from what stands before
    them, as a calculator's results do: their probability is 1, and they have no ΔV."""

    @cached_property
    def tree(self) -> PrefixTree:
        return PrefixTree(self.responses)

    @cached_property
    def probability(self) -> np.ndarray:
        """float64[N]: of each node's token after its parent."""
        found = np.ones(len(self.tree))
        for path, log_probs in zip(self.tree.paths, self.log_probs, strict=True):
            found[path] = np.exp(np.nan_to_num(log_probs))
        return found

    @cached_property
    def leaving(self) -> np.ndarray:
        """float64[N]: the probability that the policy goes on as no response did; 0 where nothing can follow."""
        rest = np.ones(len(self.tree))
        np.subtract.at(rest, self.tree.parent[1:], self.probability[1:])
        rest = rest.clip(0.0)
        rest[list(self.ends)] = 0.0
        return rest

    @cached_property
    def ends(self) -> dict[int, float]:
        """The nodes where a response has come to its end, with its reward."""
        ended = zip(self.tree.paths, self.rewards, self.ended, strict=True)
        return {(path[-1] if path else 0): float(reward) for path, reward, end in ended if end}

    def measure(self, nodes: np.ndarray) -> None:
        """Ask for V at these nodes as well (bool[N])."""
        self.measured = self.measured | nodes

    def turn(self, node: int) -> int:
        """Turns of the policy that are over at a node: what others wrote stands after each."""
        if self.written is None:
            return 0
        own = self.written[self.tree.owner[node]][: self.tree.depth[node]]
        return int((own[:-1] & ~own[1:]).sum())

    def stretches(self) -> Stretches:
        return Stretches.of(self)

    def values(self) -> Values:
        return self.stretches().values()


@dataclass(frozen=True)
class Sample:
    """A continuation that leaves the responses at a node of their tree."""

    node: int
    ids: list[int]
    """Its tokens after that node; no response goes on with the first of them."""
    reward: float
    finished: bool


@dataclass(frozen=True, eq=False)
class Stretches:
    """The stretches between measured prefixes, each under the number of the measured node that it begins with."""

    source: Measurement
    head: np.ndarray
    """int[N]: the stretch that a node is in; -1 where none is measured before it."""
    reach: np.ndarray
    """float64[N]: probability of coming to the node from the beginning of its stretch."""
    entry: np.ndarray
    """float64[N], of measured nodes: probability of coming there from the beginning of the stretch before."""
    before: np.ndarray
    """int[N], of measured nodes: the stretch before; -1 = none."""

    @staticmethod
    def of(source: Measurement) -> Stretches:
        size = len(source.tree)
        head, before = np.full(size, -1), np.full(size, -1)
        reach, entry = np.zeros(size), np.zeros(size)
        for node, parent in enumerate(source.tree.parent):
            known = node > 0 and head[parent] >= 0
            mass = reach[parent] * source.probability[node] if known else 0.0
            if source.measured[node]:
                head[node], reach[node], entry[node] = node, 1.0, mass
                before[node] = head[parent] if known else -1
            elif known:
                head[node], reach[node] = head[parent], mass
        return Stretches(source, head, reach, entry, before)

    @cached_property
    def leaving(self) -> np.ndarray:
        """float64[N], of measured nodes: probability of leaving the responses within the stretch."""
        total = np.zeros(len(self.head))
        inside = self.head >= 0
        np.add.at(total, self.head[inside], (self.reach * self.source.leaving)[inside])
        return total

    @cached_property
    def _sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number, sum and sum of squares of the samples' rewards by stretch."""
        count, total, squares = (np.zeros(len(self.head)) for _ in range(3))
        for sample in self.source.samples:
            stretch = self.head[sample.node]
            if stretch >= 0:
                count[stretch] += 1
                total[stretch] += sample.reward
                squares[stretch] += sample.reward**2
        return count, total, squares

    @property
    def count(self) -> np.ndarray:
        return self._sums[0]

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward seen; if all are the same, one more is thought possible."""
        seen = [*self.source.rewards.tolist(), *(sample.reward for sample in self.source.samples)]
        low, high = min(seen), max(seen)
        if low == high:
            return (low - 1, high) if high > 0 else (low, high + 1)
        return low, high

    @cached_property
    def spread(self) -> np.ndarray:
        """float64[N]: variance of the rewards after leaving. As if half a sample more had the lowest and half a one the
        highest reward (Jeffreys' prior, where rewards are 0 and 1): a few that agree do not prove that all would."""
        count, total, squares = self._sums
        low, high = self.bounds
        mean = (total + (low + high) / 2) / (count + 1)
        return ((squares + (low**2 + high**2) / 2) / (count + 1) - mean**2).clip(0.0)

    def values(self) -> Values:
        count, total, _ = self._sums
        mean = np.where(count > 0, total / np.maximum(count, 1), sum(self.bounds) / 2)
        measured = self.source.measured
        value = np.where(measured, self.leaving * mean, np.nan)
        variance = np.where(measured, self.leaving**2 * self.spread / np.maximum(count, 1), np.nan)
        for node, reward in self.source.ends.items():
            if self.head[node] >= 0:
                value[self.head[node]] += self.reach[node] * reward
        nodes = np.flatnonzero(measured)
        for node in nodes[::-1]:  # the ends first
            if self.before[node] >= 0:
                value[self.before[node]] += self.entry[node] * value[node]
                variance[self.before[node]] += self.entry[node] ** 2 * variance[node]
        delta, stderr = np.full(len(value), np.nan), np.full(len(value), np.nan)
        for node in nodes[self.is_token[nodes]]:
            before = self.before[node]
            delta[node] = value[node] - value[before]
            # V before holds p · V after: what both share counts once.
            shared = (1 - 2 * self.entry[node]) * variance[node]
            stderr[node] = np.sqrt(max(0.0, variance[before] + shared))
        return Values(value, variance, delta, stderr)

    @cached_property
    def is_token(self) -> np.ndarray:
        """bool[N]: the node and its parent are measured, so that its last token has a ΔV."""
        parent = np.array(self.source.tree.parent)
        return self.source.measured & (parent >= 0) & self.source.measured[parent]

    def plan(self, samples: int, at_least: int) -> np.ndarray:
        """int[N]: how many of `samples` further samples each stretch gets. First `at_least` for each; beyond that in
        proportion to what makes the sum of the squared standard errors of all ΔV smallest."""
        wanted = self.source.measured & (self.leaving > NEGLIGIBLE)
        missing = np.where(wanted, (at_least - self.count).clip(0), 0).astype(int)
        if missing.sum() >= samples:
            order = np.argsort(-self.leaving * (missing > 0), kind="stable")
            before = np.cumsum(missing[order]) - missing[order]
            missing[order] = np.minimum(missing[order], (samples - before).clip(0))
            return missing
        weight = np.where(wanted, self.leaving * np.sqrt(self._demand() * self.spread), 0.0)
        have, left = self.count + missing, samples - int(missing.sum())
        room = (weight / max(weight.sum(), 1e-300) * (have.sum() + left) - have).clip(0)
        return missing + _whole(room * left / max(room.sum(), 1e-300), left if room.any() else 0)

    def _demand(self) -> np.ndarray:
        """float64[N]: how often the variance of each measured V counts in the sum of all ΔV's variances."""
        demand = np.zeros(len(self.head))
        np.add.at(demand, self.before[self.is_token], 1.0)
        for node in np.flatnonzero(self.source.measured):
            if self.before[node] < 0:
                demand[node] += 1.0
            else:
                demand[node] += self.entry[node] ** 2 * demand[self.before[node]]
                demand[node] += (1 - 2 * self.entry[node]) * self.is_token[node]
        return demand.clip(0.0)

    def draw_nodes(self, plan: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """int[N]: how many samples leave at each node, for `plan` samples in each stretch."""
        mass = self.reach * self.source.leaving
        found = np.zeros(len(mass), int)
        order = np.argsort(self.head, kind="stable")
        first, last = (np.searchsorted(self.head[order], np.arange(len(mass)), side) for side in ("left", "right"))
        for stretch in np.flatnonzero(plan):
            inside = order[first[stretch] : last[stretch]]
            found[inside] += rng.multinomial(plan[stretch], mass[inside] / mass[inside].sum())
        return found


def _whole(parts: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers close to `parts` that sum to `total`, which is the sum of the parts."""
    whole = np.floor(parts).astype(int)
    order = np.argsort(whole - parts, kind="stable")
    whole[order[: max(0, total - int(whole.sum()))]] += 1
    return whole
