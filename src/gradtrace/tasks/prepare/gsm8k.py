"""GSM8K: grade-school word problems; the answer is the number after `####`."""

from __future__ import annotations

import math
import re

from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare.base import Example, Preparation, answer_of, question_of, split_of
from gradtrace.tasks.sources import Row

ANNOTATION = re.compile(r"<<.*?>>")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
FRACTION = re.compile(r"\d\s*/\s*\d|%|percent")
CALCULATION_AT_END = re.compile(r"(?<![\w.,$])[\d.$(][\d.,$\s()+*/x-]*[-+*/x][\d.,$\s()+*/x-]*=\s*\$?$")
ANSWER = re.compile(r"(?:^|####)\s*\$?(-?[\d,]+(?:\.\d+)?)\s*$")


def example(row: Row) -> Example:
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
    ability="math",
    default_source="hf:openai/gsm8k:main:train",
    test_source="hf:openai/gsm8k:main:test",
    licence="MIT",
    homepage="https://github.com/openai/grade-school-math",
    reward="gsm8k",
    example=example,
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
