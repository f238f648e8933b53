"""From numbers per token to entropy changes with their standard errors.

Every estimate here is a function of sums over sequences, so that the jackknife (leave one prompt out, all its
sequences with it) costs nothing and speaks of exactly the number that is reported. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtrace.intervals import t_quantile

LOG_WEIGHT_LIMIT = 10.0


@dataclass(frozen=True)
class Estimate:
    """An entropy change in nats per token, positive = entropy rises, and its standard error over prompts."""

    value: float
    stderr: float
    prompts: int

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval, by Student's t: a standard error from few prompts is itself unsure."""
        return t_quantile(self.prompts - 1) * self.stderr if self.prompts > 1 else float("nan")


Statistic = Callable[[dict[str, Tensor]], Tensor]
"""Sums over sequences by name (each [...]) → the estimate [...]."""


def jackknife(columns: dict[str, Tensor], group: Tensor, statistic: Statistic) -> Estimate:
    """`columns`: one number per sequence, [R]; `group`: long[R], sequences of one number are left out together."""
    _, member = group.unique(return_inverse=True)
    count = int(member.max()) + 1
    totals = {name: values.double().sum() for name, values in columns.items()}
    value = float(statistic(totals))
    if count < 2:
        return Estimate(value, float("nan"), count)
    without = {
        name: totals[name] - torch.zeros(count, dtype=torch.float64).index_add_(0, member, values.double())
        for name, values in columns.items()
    }
    left_out = statistic(without)
    spread = (count - 1) / count * (left_out - left_out.mean()).square().sum()
    return Estimate(value, float(spread.sqrt()), count)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Numbers per token of R sequences, one after the other: N tokens."""

    lengths: Tensor
    """long[R]."""
    group: Tensor
    """long[R]: the prompt of each sequence."""
    log_probs: Tensor
    """float64[N]."""
    entropies: Tensor
    """float64[N]: of the full distribution that each token was drawn from."""

    def per_sequence(self, values: Tensor) -> Tensor:
        """[N] → [R]: sums over the tokens of each sequence."""
        owner = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return torch.zeros(len(self.lengths), dtype=torch.float64).index_add_(0, owner, values.double())

    def after_each_token(self, values: Tensor) -> Tensor:
        """[N] → [N]: the sum over the later tokens of the same sequence."""
        running = values.double().cumsum(0)
        ends = running[self.lengths.cumsum(0) - 1]
        return ends.repeat_interleave(self.lengths) - running

    @property
    def sums(self) -> dict[str, Tensor]:
        """T, h and S of every sequence."""
        return {
            "T": self.lengths.double(),
            "h": self.per_sequence(self.entropies),
            "S": self.per_sequence(self.log_probs),
        }

    @property
    def mean_entropy(self) -> float:
        return float(self.entropies.sum() / self.lengths.sum())


# ---------------------------------------------------------------- predicted


def _predicted(s: dict[str, Tensor]) -> Tensor:
    """[Σ∂h + Σ(h − H̄T)∂S] / ΣT."""
    return (s["dh"] + s["h·dS"] - s["h"] / s["T"] * s["T·dS"]) / s["T"]


def _predicted_columns(base: Tokens, d_log_probs: Tensor, d_entropies: Tensor) -> dict[str, Tensor]:
    sums = base.sums
    dh, ds = base.per_sequence(d_entropies), base.per_sequence(d_log_probs)
    return {**sums, "dh": dh, "dS": ds, "h·dS": sums["h"] * ds, "T·dS": sums["T"] * ds}


@dataclass(frozen=True, eq=False)
class Prediction:
    base: Tokens
    """E at the weights as they are."""
    d_log_probs: Tensor
    """float64[N]: change of each E token's log-prob to first order, for the whole update."""
    d_entropies: Tensor
    """float64[N]: change of the entropy at each E token to first order."""

    @property
    def change(self) -> Estimate:
        """δH1, the derivative of the importance-weighted mean entropy of this very batch."""
        columns = _predicted_columns(self.base, self.d_log_probs, self.d_entropies)
        return jackknife(columns, self.base.group, _predicted)

    @property
    def reward_to_go(self) -> Estimate:
        """The same as `change` in expectation, with less noise: a token is credited with later entropies only."""
        base, later = self.base, self.base.after_each_token
        columns = {
            **base.sums,
            "dh": base.per_sequence(self.d_entropies),
            "h·dS": base.per_sequence(later(base.entropies) * self.d_log_probs),
            "T·dS": base.per_sequence(later(torch.ones_like(base.entropies)) * self.d_log_probs),
        }
        return jackknife(columns, base.group, _predicted)

    @property
    def score_function(self) -> Estimate:
        """The same as `change` in expectation, from log-probs of the sampled tokens alone: the textbook estimate, with
        the most noise."""
        surprisals = replace(self.base, entropies=-self.base.log_probs)
        return Prediction(surprisals, self.d_log_probs, torch.zeros_like(self.d_log_probs)).change

    def against(self, after: Tokens, scale: float = 1.0) -> Measured:
        """The change found on the same sequences at weights that were moved by `scale` updates, by self-normalised
        importance weights."""
        raw = after.sums["S"] - self.base.sums["S"]  # log of the importance weight of each sequence, before it is cut
        weights = raw.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
        columns = _predicted_columns(self.base, self.d_log_probs, self.d_entropies)
        columns["w·h'"] = weights * after.sums["h"]
        columns["w·T"] = weights * columns["T"]
        return Measured(
            change=jackknife(columns, self.base.group, _measured),
            ess=float(weights.sum() ** 2 / weights.square().sum()),
            clipped=int((raw.abs() > LOG_WEIGHT_LIMIT).sum()),
            difference=jackknife(columns, self.base.group, lambda s: scale * _predicted(s) - _measured(s)),
        )


# ---------------------------------------------------------------- measured


@dataclass(frozen=True)
class Measured:
    change: Estimate
    ess: float
    """Effective sample size of the importance weights, in sequences."""
    clipped: int
    """Sequences whose log-weight was cut at ±10."""
    difference: Estimate
    """Predicted minus measured, on the same sequences: their noise is mostly shared, so this error is not the root of
    the sum of the squares of the two."""


def _measured(s: dict[str, Tensor]) -> Tensor:
    return s["w·h'"] / s["w·T"] - s["h"] / s["T"]


def fresh_change(base: Tokens, fresh: Tokens) -> Estimate:
    """New sequences from the moved weights against the old ones. Both have the same prompts and, if they were drawn
    with the same random numbers, most of their noise in common: the jackknife leaves a prompt out of both."""
    totals = [tokens.sums for tokens in (base, fresh)]
    columns = {"T": totals[0]["T"], "h": totals[0]["h"], "w·T": totals[1]["T"], "w·h'": totals[1]["h"]}
    return jackknife(columns, base.group, _measured)


def covariance_change(log_probs: Tensor, advantages: Tensor, rate: float) -> float:
    """−η·Cov(log π, A) over the tokens [N] of the update batch: the entropy change of a tabular softmax policy under a
    natural policy gradient step of size η. Right in sign at best for a network under Adam; no scale of its own."""
    centred = log_probs.double() - log_probs.double().mean()
    return -rate * float((centred * advantages.double()).mean())
