"""Known data sets: how a row of each is read, and what is asked with it.

GSM8K: grade-school word problems; the answer is the number after `####`. Competition mathematics: DAPO-Math-17k to
train on (its published rows hold many prompts more than once), MATH-500 and AIME for evaluation only; a file may hold
several of the benchmarks, told apart by `data_source`. MBPP: short Python problems with asserts as tests, which the
prompt shows, since they name the function. Countdown: numbers and a target, read from a data set, or generated when
there is no source.
"""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.countdown import Exercise
from gradtrace.tasks.rewards.code import texts
from gradtrace.tasks.sources import Row


@dataclass(frozen=True)
class Example:
    """One problem: its text, the answer, and columns of its own that the judge needs."""

    question: str
    ground_truth: Any
    """A string, or a struct (countdown: numbers and target)."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Kept beside verl's columns, e.g. `test_list` of a programming problem."""
    split: str = ""
    """`train` or `test` where the row says so itself."""
    start: str = ""
    """What the answer begins with: the model is to go on from there."""

    @cached_property
    def loose_key(self) -> str:
        """A text that is the same for texts which differ in white space only."""
        return " ".join(unicodedata.normalize("NFC", self.question).split())

    @cached_property
    def overlap_key(self) -> str:
        """Words and numbers alone: what counts as seen already, when training and test data are compared."""
        return " ".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", self.question).lower()))


@dataclass(frozen=True)
class Preparation:
    name: str
    default_source: str
    licence: str
    homepage: str
    reward: str
    """Name of the reward that judges answers to it."""
    example: Callable[[Row], Example | None]
    """Read a row; None leaves it out (it belongs to another data set of the same file)."""
    ability: str = "math"
    """The value of verl's column `ability`: math or code."""
    test_source: str = ""
    """Name of the test split on the hub; empty where there is none."""
    instruction: str = ""
    """Appended to the question: how to mark the answer."""
    system_prompt: str = ""
    solved: tuple[tuple[str, str], ...] = ()
    """(question, answer) pairs that `--shots` puts before every question, as earlier turns of the conversation."""
    shots: int = 0
    """How many of them."""

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The conversation up to the question, instruction included, and the start of its answer."""
        turns = [("system", self.system_prompt)] if self.system_prompt else []
        for question, answer in self.solved[: self.shots]:
            turns += [("user", question + self.instruction), ("assistant", answer)]
        turns.append(("user", example.question.strip() + self.instruction))
        if example.start:
            turns.append(("assistant", example.start))
        return [{"role": role, "content": content} for role, content in turns]

    def row(self, example: Example, split: str, index: int) -> Row:
        """The example in verl's column format."""
        return {
            "data_source": self.name,
            "prompt": self.messages(example),
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
            "extra_info": {"split": split, "index": index, "question": example.question.strip()},
            **example.columns,
        }


def question_of(row: Row, *names: str) -> str:
    """The text of the first of these columns that a row has; of a conversation, what the user says."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "\n".join(message["content"] for message in value if message.get("role") == "user")
    raise GradtraceError(f"a row has none of the columns {', '.join(names)}; it has {', '.join(row)}.")


def answer_of(row: Row, *names: str) -> Any:
    """The first of these columns that a row has, or verl's ground truth."""
    verl = row.get("reward_model")
    if isinstance(verl, dict) and "ground_truth" in verl:
        return verl["ground_truth"]
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise GradtraceError(f"a row has no answer ({', '.join(names)}, reward_model); it has {', '.join(row)}.")


def split_of(row: Row) -> str:
    extra = row.get("extra_info")
    return str(extra.get("split", "")) if isinstance(extra, dict) else ""


ANNOTATION = re.compile(r"<<.*?>>")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
FRACTION = re.compile(r"\d\s*/\s*\d|%|percent")
CALCULATION_AT_END = re.compile(r"(?<![\w.,$])[\d.$(][\d.,$\s()+*/x-]*[-+*/x][\d.,$\s()+*/x-]*=\s*\$?$")
ANSWER = re.compile(r"(?:^|####)\s*\$?(-?[\d,]+(?:\.\d+)?)\s*$")


def gsm8k_example(row: Row) -> Example:
    question = question_of(row, "question", "prompt")
    solution = str(answer_of(row, "answer"))
    number = ANSWER.search(solution)
    if number is None:
        raise GradtraceError(f"an answer without `#### number` at its end: {solution[-80:]!r}.")
    columns = {"solution": solution, "operations": operations(solution)}
    return Example(question, number[1].replace(",", ""), columns, split_of(row))


def operations(solution: str) -> int:
    """Number of calculations in a solution. Most are annotated, `<<48/2=24>>`; some solutions leave out annotations,
    and those with none or one are mostly algebra: equations in the text count too."""
    return max(solution.count("<<"), ANNOTATION.sub("", solution).count("="))


def largest_number(example: Example) -> float:
    """The largest number in digits in question and solution; infinite where fractions or percentages occur."""
    text = example.question + "\n" + example.columns["solution"]
    numbers = [number.replace(",", "") for number in NUMBER.findall(text)]
    if FRACTION.search(example.question) or any("." in number for number in numbers):
        return math.inf
    return max(map(int, numbers), default=0)


def beginning(solution: str, steps_left: int) -> str:
    """The solution without its last `steps_left` lines of calculation and what follows them."""
    lines = ANNOTATION.sub("", solution).partition("####")[0].strip().splitlines()
    calculations = [i for i, line in enumerate(lines) if "=" in line]
    if len(calculations) <= steps_left:
        return ""
    return "".join(f"{line}\n" for line in lines[: calculations[-steps_left]])


def up_to_calculation(solution: str) -> str:
    """The solution up to its last calculation, with the words before it in its line: `Then Tom had `. Empty where
    nothing stands before it, or where words stand within the calculation."""
    before, _, after = solution.rpartition("<<")
    before = ANNOTATION.sub("", before)
    calculation = CALCULATION_AT_END.search(before)
    if calculation is None or "=" in after.partition(">>")[2]:
        return ""
    return before[: calculation.start()]


GSM8K = Preparation(
    name="gsm8k",
    default_source="hf:openai/gsm8k:main:train",
    test_source="hf:openai/gsm8k:main:test",
    licence="MIT",
    homepage="https://github.com/openai/grade-school-math",
    reward="gsm8k",
    example=gsm8k_example,
    instruction="\nLet's think step by step and write the final answer, a number, after ####.",
    solved=(
        (
            "Tom had $20 and spent $8. Then he found $3. How much has he?",
            "Tom had 20 - 8 = 12 dollars left.\nThen he had 12 + 3 = 15 dollars.\n#### 15",
        ),
        (
            "A box holds 6 eggs. Ana buys 3 boxes and uses 4 eggs. How many eggs are left?",
            "Ana buys 6 * 3 = 18 eggs.\nThere are 18 - 4 = 14 eggs left.\n#### 14",
        ),
        (
            "A farm has 5 cows and twice as many hens. How many animals are there?",
            "There are 5 * 2 = 10 hens.\nThere are 5 + 10 = 15 animals.\n#### 15",
        ),
    ),
)


INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# The text that DAPO's own release puts around every problem; the instruction takes its place.
WRAPPING = re.compile(
    r"^Solve the following math problem step by step\. The last line.*?\n\n|\n\nRemember to put your answer.*$",
    re.DOTALL,
)


def _math(name: str, hub: str, licence: str, example: Callable[[Row], Example | None]) -> Preparation:
    return Preparation(
        name=name,
        default_source=f"hf:{hub}",
        licence=licence,
        homepage=f"https://huggingface.co/datasets/{hub.split(':')[0]}",
        reward="math",
        example=example,
        instruction=INSTRUCTION,
    )


def _dapo_example(row: Row) -> Example:
    question = WRAPPING.sub("", question_of(row, "problem", "question", "prompt"))
    return Example(question, str(answer_of(row, "answer", "solution")).strip(), split=split_of(row))


def _benchmark(name: str, pattern: str, hub: str, licence: str) -> Preparation:
    def example(row: Row) -> Example | None:
        source = str(row.get("data_source", ""))
        if source and not re.search(pattern, source.lower()):
            return None
        question = question_of(row, "problem", "question", "prompt")
        return Example(question, str(answer_of(row, "answer")), split="test")

    return _math(name, hub, licence, example)


DAPO_MATH = _math("dapo_math", "BytedTsinghua-SIA/DAPO-Math-17k:train", "Apache-2.0", _dapo_example)
MATH500 = _benchmark("math500", r"math.?500", "HuggingFaceH4/MATH-500:test", "MIT")
AIME24 = _benchmark("aime24", r"aime.?(20)?24", "HuggingFaceH4/aime_2024:train", "not stated by its publisher")
AIME25 = _benchmark("aime25", r"aime.?(20)?25", "math-ai/aime25:test", "Apache-2.0")


def mbpp_example(row: Row) -> Example:
    tests, imports = texts({"test_list": row["test_list"]}, "test_list"), texts(row, "test_imports")
    question = f"{question_of(row, 'prompt', 'text').strip()}\nYour code must pass these tests:\n" + "\n".join(tests)
    return Example(
        question,
        json.dumps({"test_list": tests, "test_imports": imports}),
        {"test_list": tests, "test_imports": imports, "code": str(row.get("code", ""))},
        split_of(row),
    )


MBPP = Preparation(
    name="mbpp",
    ability="code",
    default_source="hf:google-research-datasets/mbpp:sanitized:train",
    test_source="hf:google-research-datasets/mbpp:sanitized:test",
    licence="CC-BY-4.0 (the text), Apache-2.0 (its repository)",
    homepage="https://github.com/google-research/google-research/tree/master/mbpp",
    reward="code",
    example=mbpp_example,
    instruction="\nAnswer with one Python code block.",
)


GENERATED = "generated"


def countdown_example(row: Row) -> Example:
    verl = row.get("reward_model")
    truth = verl["ground_truth"] if isinstance(verl, dict) else row
    numbers = truth.get("numbers") or truth.get("nums")
    if not numbers or truth.get("target") is None:
        raise GradtraceError(f"countdown: a row needs `nums` and `target`; it has {', '.join(row)}.")
    return from_numbers([int(number) for number in numbers], int(truth["target"]), split_of(row))


def from_numbers(numbers: list[int], target: int, split: str = "") -> Example:
    # Sorted, so that two orders of the same numbers are the same problem, and found as such.
    numbers = sorted(numbers)
    listed = ", ".join(str(number) for number in numbers)
    question = f"Use the numbers {listed} to get {target}."
    return Example(question, {"numbers": numbers, "target": target}, split=split)


def generate(count: int, sizes: list[int], largest: int, operators: str, seed: int) -> list[Row]:
    """`count` different problems with a solution, sizes in turn."""
    rng = random.Random(f"countdown/{seed}")
    rows: dict[tuple[tuple[int, ...], int], Row] = {}
    for attempt in range(100 * count):
        if len(rows) == count:
            break
        problem = Exercise.draw(rng, sizes[attempt % len(sizes)], largest, operators)
        key = (tuple(sorted(problem.numbers)), problem.target)
        rows.setdefault(key, {"nums": list(problem.numbers), "target": problem.target})
    if len(rows) < count:
        raise GradtraceError(
            f"countdown: only {len(rows)} different problems of these kinds were found, {count} were asked for. "
            "Lower --count, or raise --largest or --numbers."
        )
    return list(rows.values())


COUNTDOWN = Preparation(
    name="countdown",
    default_source=GENERATED,
    licence="Apache-2.0 (generated by gradtrace)",
    homepage="https://github.com/Jiayi-Pan/TinyZero",
    reward="countdown",
    example=countdown_example,
    instruction="\nUse each number exactly once, with + - * / and parentheses. Think step by step, then write the "
    "expression between <answer> and </answer>.",
    solved=(
        ("Use the numbers 3, 4 to get 7.", "<answer>3 + 4</answer>"),
        ("Use the numbers 5, 8 to get 3.", "<answer>8 - 5</answer>"),
        ("Use the numbers 2, 3, 9 to get 45.", "<answer>(2 + 3) * 9</answer>"),
    ),
)

PREPARATIONS = {
    preparation.name: preparation for preparation in (GSM8K, DAPO_MATH, COUNTDOWN, MBPP, MATH500, AIME24, AIME25)
}
