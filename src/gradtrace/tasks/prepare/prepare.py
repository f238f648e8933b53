"""A data set on its way to disk, as `gradtrace data prepare` makes it: rows read, cleaned and split, with an account of
what went and why; parquet files, report.json, and README.md, its data card.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from gradtrace import __version__
from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare.recipes import (
    GENERATED,
    PREPARATIONS,
    Example,
    Preparation,
    beginning,
    generate,
    largest_number,
    up_to_calculation,
)
from gradtrace.tasks.rewards import named_reward, shorten
from gradtrace.tasks.sources import HUB, Row, read_source
from gradtrace.trace.files import atomic_write

Length = Callable[[Example], int]
"""Length of an example's whole prompt."""
Choice = tuple[str, Callable[[Example], bool]]
"""Which examples are wanted at all, in words and as a rule."""
CHARACTERS = 4096
TOKENS = 1024


@dataclass(frozen=True)
class Request:
    """The options of `gradtrace data prepare`; their meaning is in its help."""

    name: str
    output: Path
    source: str = ""
    test: Sequence[str] = ()
    validation: float = 0.02
    tokenizer: Any = None
    max_prompt_length: int = 0
    drop_overlap: bool = False
    instruction: str | None = None
    system_prompt: str | None = None
    shots: int = 0
    max_operations: int | None = None
    max_number: int | None = None
    steps_left: int = 0
    calculation_left: bool = False
    numbers: Sequence[int] = (3, 4)
    count: int = 10_000
    largest: int = 100
    operators: str = "+-*/"
    seed: int = 0
    command: str = ""


def prepare(request: Request) -> dict[str, Any]:
    """Write the data set to `request.output`; returns the report."""
    preparation = with_prompts(PREPARATIONS[request.name], request.instruction, request.system_prompt)
    preparation = with_shots(preparation, request.shots)
    source = request.source or preparation.default_source
    examples = with_beginnings(read_examples(preparation, read(source, request), source), request)
    tests = list(request.test)
    if not tests and source.startswith(HUB) and not request.source and preparation.test_source:
        tests = [preparation.test_source]
    test = [example for name in tests for example in with_beginnings(read_tests(preparation, name), request)]
    test += [example for example in examples if example.split == "test"]
    examples = [example for example in examples if example.split != "test"]
    length, unit = length_of(preparation, request.tokenizer)
    longest = request.max_prompt_length or (TOKENS if request.tokenizer is not None else CHARACTERS)
    choices = easy_problems(request)
    if examples:
        wanted = [example for example in examples if all(is_wanted(example) for _, is_wanted in choices)]
        share = request.validation  # or how many, from 1 on
        held_out = round(share * len(wanted)) if share < 1 else int(share)
        cleaned = clean(examples, test, length, longest, held_out, request.drop_overlap, choices)
    else:  # a benchmark: nothing to train on
        cleaned = Cleaned([("rows read", len(test))], test=test)
    asked = {
        "source": source,
        "test_source": ", ".join(tests),
        "command": request.command,
        "length_unit": unit,
    }
    return write(request.output, preparation, cleaned, asked)


def with_prompts(preparation: Preparation, instruction: str | None, system_prompt: str | None) -> Preparation:
    given: dict[str, Any] = {"instruction": instruction, "system_prompt": system_prompt}
    return dataclasses.replace(preparation, **{name: text for name, text in given.items() if text is not None})


def with_shots(preparation: Preparation, shots: int) -> Preparation:
    if not 0 <= shots <= len(preparation.solved):
        raise GradtraceError(
            f"--shots {shots}: {preparation.name} has {len(preparation.solved)} solved examples to show."
        )
    return dataclasses.replace(preparation, shots=shots)


def read(source: str, request: Request) -> list[Row]:
    if source == GENERATED:
        known = request.operators and set(request.operators) <= set("+-*/")
        if not known or min(request.numbers) < 2 or request.largest < 1 or request.count < 1:
            raise GradtraceError(
                "countdown: --operators must be some of +-*/, --numbers at least 2, --largest and --count at least 1."
            )
        sizes = list(request.numbers)
        return generate(request.count, sizes, request.largest, request.operators, request.seed)
    return read_source(source, "--source")


def read_tests(preparation: Preparation, source: str) -> list[Example]:
    """Test data, read as the data set's own rows are: columns of verl's format are the same everywhere."""
    examples = read_examples(preparation, read_source(source, "--test"), source)
    return [dataclasses.replace(example, split="test") for example in examples]


def with_beginnings(examples: list[Example], request: Request) -> list[Example]:
    """Answers that begin with the reference solution, --steps-left calculations before its end."""
    if request.calculation_left and (request.name != "gsm8k" or request.steps_left):
        raise GradtraceError(
            f"--calculation-left cuts GSM8K solutions before their last calculation; leave it out with {request.name}"
            " and with --steps-left."
        )
    if not request.calculation_left and not request.steps_left:
        return examples
    if not request.calculation_left and (request.name != "gsm8k" or request.steps_left < 0):
        raise GradtraceError(
            f"--steps-left {request.steps_left}: a number of calculations of GSM8K solutions, not of {request.name}'s."
        )

    def start(solution: str) -> str:
        return up_to_calculation(solution) if request.calculation_left else beginning(solution, request.steps_left)

    return [dataclasses.replace(each, start=start(each.columns["solution"])) for each in examples]


def easy_problems(request: Request) -> list[Choice]:
    """The rows that --max-operations and --max-number leave."""
    operations, number = request.max_operations, request.max_number
    if (operations, number) != (None, None) and request.name != "gsm8k":
        raise GradtraceError(f"--max-operations and --max-number look into GSM8K solutions; {request.name} has none.")
    choices: list[Choice] = []
    if operations is not None:
        few = f"solved in at most {operations} calculations"
        choices.append((few, lambda example: 1 <= example.columns["operations"] <= operations))
    if request.calculation_left:
        choices.append(("with words before a last calculation", lambda example: bool(example.start)))
    if number is not None:
        small = f"of whole numbers up to {number}"
        choices.append((small, lambda example: largest_number(example) <= number))
    return choices


def length_of(preparation: Preparation, tokenizer: Any) -> tuple[Length, str]:
    if tokenizer is None:
        return (lambda example: sum(len(m["content"]) for m in preparation.messages(example))), "characters"
    from gradtrace.tasks.datasets import encode

    return (lambda example: len(encode(tokenizer, preparation.messages(example)))), "tokens"


# ---------------------------------------------------------------- cleaned and split


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
    reward = named_reward(preparation.reward)
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
            item = {**found.columns, "prompt": found.question, "answer": found.ground_truth}
            reward.check([{**item, "row": f"{source}, row {number}"}])
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


# ---------------------------------------------------------------- on disk


def write(folder: Path, preparation: Preparation, cleaned: Cleaned, origin: dict[str, str]) -> dict[str, Any]:
    """Write the data set; returns its report. `origin`: what was asked for, enough to make it again."""
    folder.mkdir(parents=True, exist_ok=True)
    report = make_report(preparation, cleaned, origin)
    for split in ("train", "validation", "test"):
        examples: list[Example] = getattr(cleaned, split)
        file = folder / f"{split}.parquet"
        if examples:
            atomic_write(file, parquet(preparation, examples, split))
        else:
            file.unlink(missing_ok=True)  # of an earlier preparation: it would not belong to this report
    atomic_write(folder / "report.json", json.dumps(report, indent=2, ensure_ascii=False).encode())
    atomic_write(folder / "README.md", data_card(preparation, cleaned, report).encode())
    return report


def parquet(preparation: Preparation, examples: list[Example], split: str) -> bytes:
    rows = [preparation.row(example, split, index) for index, example in enumerate(examples)]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, compression="zstd")
    return buffer.getvalue()


def make_report(preparation: Preparation, cleaned: Cleaned, origin: dict[str, str]) -> dict[str, Any]:
    return {
        "data_set": preparation.name,
        "gradtrace": __version__,
        **origin,
        "funnel": [{"step": step, "left": left} for step, left in cleaned.funnel],
        "splits": {split: len(getattr(cleaned, split)) for split in ("train", "validation", "test")},
        "reward": preparation.reward,
        "licence": preparation.licence,
        "homepage": preparation.homepage,
        "dropped_because_in_test": cleaned.overlap,
    }


def data_card(preparation: Preparation, cleaned: Cleaned, report: dict[str, Any]) -> str:
    """Markdown with the header that the Hugging Face hub reads."""
    first = preparation.messages(cleaned.train[0] if cleaned.train else cleaned.test[0])
    files = "\n".join(
        f"  - split: {split}\n    path: {split}.parquet" for split, count in report["splits"].items() if count
    )
    funnel = "\n".join(f"| {entry['step']} | {entry['left']:,} |" for entry in report["funnel"])
    splits = "\n".join(f"| {split} | {count:,} |" for split, count in report["splits"].items())
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in first)
    return f"""---
configs:
- config_name: default
  data_files:
{files}
---
# {preparation.name}, prepared by gradtrace {report["gradtrace"]}

Made with `{report["command"]}` from `{report["source"]}`.
Original: {preparation.homepage}, licence {preparation.licence}.

| split | problems |
|---|---|
{splits}

| step of the preparation | left |
|---|---|
{funnel}

Lengths are of the whole prompt, in {report["length_unit"]}. Problems with contradictory answers are left out.
Training and test data are compared by words and numbers alone, so that a change of punctuation does not hide a copy;
{len(report["dropped_because_in_test"])} problems were dropped from training for being in the test data.

Columns are verl's: `data_source`, `prompt` (messages, instruction included), `ability`, `reward_model.ground_truth`,
`extra_info`. Answers are judged with `reward.name={preparation.reward}`. The first prompt:

```
{conversation}
```
"""
