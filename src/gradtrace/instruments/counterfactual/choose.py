"""Which tokens to measure: all, some positions, or those that look most interesting."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual.tree import Measurement

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
