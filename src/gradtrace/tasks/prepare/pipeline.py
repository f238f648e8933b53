"""From rows to clean, split examples, with an account of what went and why."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare.base import Example, Preparation
from gradtrace.tasks.rewards import shorten
from gradtrace.tasks.sources import Row

Length = Callable[[Example], int]
"""Length of an example's whole prompt."""
Choice = tuple[str, Callable[[Example], bool]]
"""Which examples are wanted at all, in words and as a rule."""


@dataclass
class Cleaned:
    """Splits, and the way to them: (what happened, examples that were left)."""

    funnel: list[tuple[str, int]] = field(default_factory=list)
    train: list[Example] = field(default_factory=list)
    validation: list[Example] = field(default_factory=list)
    test: list[Example] = field(default_factory=list)
    overlap: list[str] = field(default_factory=list)
    """Questions that were in training and test data both, and were dropped from training."""


def read_examples(preparation: Preparation, rows: Sequence[Row], source: str) -> list[Example]:
    examples = []
    for number, row in enumerate(rows):
        try:
            found = preparation.example(row)
        except GradtraceError as error:
            raise GradtraceError(f"{source}, row {number}: {error}") from None
        except (KeyError, TypeError) as error:
            raise GradtraceError(
                f"{source}, row {number} is not a row of {preparation.name}: {type(error).__name__} {error}; "
                f"its columns are {', '.join(row)}."
            ) from None
        if found is not None:
            examples.append(found)
    if not examples:
        raise GradtraceError(f"{source} holds no row of {preparation.name}.")
    return examples


def clean(
    examples: Sequence[Example],
    test: Sequence[Example],
    length: Length,
    longest: int,
    validation: int,
    drop_overlap: bool,
    choices: Sequence[Choice] = (),
) -> Cleaned:
    """`test`: what may not be trained on. `validation`: how many of the rest are set aside."""
    result = Cleaned(test=unique(test, lambda example: example.loose_key))
    result.funnel.append(("rows read", len(examples)))
    left = list(examples)
    for words, is_wanted in choices:
        left = [example for example in left if is_wanted(example)]
        result.funnel.append((words, len(left)))
    left = unique(left, lambda example: example.question)
    result.funnel.append(("unique prompts", len(left)))
    contradictory = contradictions(examples)
    left = unique(left, lambda example: example.loose_key)
    result.funnel.append(("without those that differ in white space only", len(left)))
    left = [example for example in left if example.loose_key not in contradictory]
    result.funnel.append(("without those with contradictory answers", len(left)))
    left = [example for example in left if length(example) <= longest]
    result.funnel.append((f"at most {longest} long", len(left)))
    held_out = {example.overlap_key for example in result.test}
    shared = [example for example in left if example.overlap_key in held_out]
    if shared and not drop_overlap:
        raise GradtraceError(
            f"{len(shared)} problems are in the training and in the test data, e.g. "
            f"{shorten(shared[0].question, 100)!r}. A test on them would measure memory. "
            "Drop them from the training data with --drop-overlap."
        )
    result.overlap = [example.question for example in shared]
    left = [example for example in left if example.overlap_key not in held_out]
    result.funnel.append(("not in the test data", len(left)))
    if validation >= len(left):
        raise GradtraceError(
            f"--validation {validation} would take all of the {len(left)} problems that are left; nothing to train on."
        )
    result.validation, result.train = split_off(left, validation)
    return result


def unique(examples: Sequence[Example], key: Callable[[Example], str]) -> list[Example]:
    """The first of each."""
    return list({key(example): example for example in reversed(examples)}.values())[::-1]


def contradictions(examples: Sequence[Example]) -> set[str]:
    """Loose keys of prompts that occur with different answers: at least one of them is wrong."""
    answers: dict[str, set[str]] = defaultdict(set)
    for example in examples:
        answers[example.loose_key].add(str(example.ground_truth))
    return {key for key, found in answers.items() if len(found) > 1}


def split_off(examples: Sequence[Example], count: int) -> tuple[list[Example], list[Example]]:
    """(`count` examples, the rest), both in order. Near-copies (same words and numbers) stay on one side.

    By a hash of the text: the same problems are chosen however the rows are ordered or filtered elsewhere.
    """
    by_key: dict[str, int] = defaultdict(int)
    for example in examples:
        by_key[example.overlap_key] += 1
    ranked = sorted(by_key, key=lambda key: hashlib.sha256(key.encode()).digest())
    chosen: set[str] = set()
    taken = 0
    for key in ranked:
        if taken + by_key[key] > count:
            continue
        chosen.add(key)
        taken += by_key[key]
        if taken == count:
            break
    first = [example for example in examples if example.overlap_key in chosen]
    return first, [example for example in examples if example.overlap_key not in chosen]
