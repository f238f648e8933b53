"""Is B better than A? Two evaluations of the same problems, prompt by prompt."""

from __future__ import annotations

import dataclasses

from gradtrace.errors import GradtraceError
from gradtrace.evaluation.run import Result
from gradtrace.evaluation.statistics import Paired, mean_rewards, paired, pass_rates


def compare(first: Result, second: Result, ks: list[int]) -> dict[str, Paired]:
    """{`mean@n`: B − A, `pass@k`: …}; refuses evaluations that differ in more than the model."""
    check_comparable(first, second)
    a, b = first.rewards(), second.rewards()
    keys = list(a)
    rewards_a, rewards_b = [a[key] for key in keys], [b[key] for key in keys]
    found = {f"mean@{first.settings.n}": paired(mean_rewards(rewards_a), mean_rewards(rewards_b))}
    for k in ks:
        found[f"pass@{k}"] = paired(pass_rates(rewards_a, k), pass_rates(rewards_b, k))
    return found


def check_comparable(first: Result, second: Result) -> None:
    a, b = dataclasses.asdict(first.settings), dataclasses.asdict(second.settings)
    different = [f"{name} is {a[name]} in one and {b[name]} in the other" for name in a if a[name] != b[name]]
    if different:
        raise GradtraceError(
            "the two evaluations cannot be compared: "
            + "; ".join(different)
            + ". Evaluate both the same way."
        )
    only_a, only_b = (
        first.rewards().keys() - second.rewards().keys(),
        second.rewards().keys() - first.rewards().keys(),
    )
    if only_a or only_b:
        raise GradtraceError(
            f"the two evaluations have different problems: {len(only_a)} are in the first only, {len(only_b)} in the "
            "second only. Evaluate both with the same --source and --limit."
        )
