"""One call that prepares a data set as `gradtrace data prepare` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare import PREPARATIONS
from gradtrace.tasks.prepare.base import Example, Preparation
from gradtrace.tasks.prepare.countdown import GENERATED, generate
from gradtrace.tasks.prepare.files import write
from gradtrace.tasks.prepare.gsm8k import beginning, largest_number, up_to_calculation
from gradtrace.tasks.prepare.pipeline import Choice, Cleaned, Length, clean, read_examples
from gradtrace.tasks.sources import HUB, Row, read_source

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
    tokenizer: str = ""
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
    longest = request.max_prompt_length or (TOKENS if request.tokenizer else CHARACTERS)
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
    if instruction is not None:
        preparation = dataclasses.replace(preparation, instruction=instruction)
    if system_prompt is not None:
        preparation = dataclasses.replace(preparation, system_prompt=system_prompt)
    return preparation


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


def length_of(preparation: Preparation, tokenizer_path: str) -> tuple[Length, str]:
    if not tokenizer_path:
        return (lambda example: sum(len(m["content"]) for m in preparation.messages(example))), "characters"
    from gradtrace.tasks.datasets import encode
    from gradtrace.tasks.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    return (lambda example: len(encode(tokenizer, preparation.messages(example)))), "tokens"
