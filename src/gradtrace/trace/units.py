"""Sentences, lines and turns of a response: long answers are read in them, so numbers can be shown for them as well."""

from __future__ import annotations

import re

import numpy as np

UNITS = ("token", "sentence", "line", "turn")
SUMMED = ("influence", "delta_v", "share")
"""Columns whose names contain one of these add up over a unit; of the others the mean is taken."""
_ENDS = {
    "sentence": re.compile(r"""[.!?…。！？]+["'”’)\]]*(?=\s|$)|\n+"""),
    "line": re.compile(r"\n+"),
}


def units_of(texts: list[str], by: str) -> np.ndarray:
    """int[T]: the number of the sentence or line that each token is in. A sentence ends with its mark, before a space
    (as in viewer/static/js/group/units.js); a line with its break."""
    if by == "token":
        return np.arange(len(texts))
    ends = [match.end() for match in _ENDS[by].finditer("".join(texts))]
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    return np.searchsorted(ends, starts, side="right")


def turns_of(starts: list[int], length: int) -> np.ndarray:
    """int[T]: the number of the segment that each token is in: what the policy wrote in a turn, or what it was told."""
    return np.searchsorted(np.array(starts), np.arange(length), side="right") - 1


def aggregate(column: str, values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """float64[units]: sum or mean of each unit's finite values; NaN where it has none."""
    size = int(units.max()) + 1 if len(units) else 0
    known = np.isfinite(values)
    count = np.bincount(units[known], minlength=size)
    total = np.bincount(units[known], weights=values[known], minlength=size)
    adds_up = any(name in column for name in SUMMED)
    return np.where(count > 0, total / (1 if adds_up else np.maximum(count, 1)), np.nan)
