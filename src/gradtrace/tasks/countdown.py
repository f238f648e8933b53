"""Countdown: combine the given numbers, each exactly once, with + − * / into an expression equal to the target.

Problems are generated so that they have a solution. The judge reads the last `<answer>…</answer>` of a response and
computes the expression itself, in exact fractions: it never hands a model's text to `eval`.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gradtrace.tasks.rewards import register_reward

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
CALCULATION = re.compile(r"[\d\s()+*/×÷−–-]+")
BEGINNING, END, OPERATOR = re.compile(r"[\d(]"), re.compile(r"[\d)]"), re.compile(r"[-+*/×÷−–]")
LONGEST_EXPRESSION = 200
"""Most characters of an answer; an honest one to a handful of numbers is far shorter."""
TYPOGRAPHY = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-"})


class NotAnExpressionError(ValueError):
    """Text that is no arithmetic of whole numbers with + − * / and parentheses."""


@dataclass(frozen=True)
class Exercise:
    numbers: tuple[int, ...]
    target: int
    solution: str

    @staticmethod
    def draw(rng: random.Random, count: int, largest: int, operators: str = "+-*/") -> Exercise:
        """`count` numbers up to `largest` whose target, at most 10·largest, is a whole number ≥ 1 by construction."""
        while True:
            numbers = [rng.randint(1, largest) for _ in range(count)]
            solution = str(numbers[0])
            for number in numbers[1:]:
                symbol = rng.choice(operators)
                if symbol in "*/" and not solution.isdigit():
                    solution = f"({solution})"
                solution = f"{solution} {symbol} {number}"
            value = compute(solution)
            if value.denominator == 1 and 1 <= value <= 10 * largest:
                return Exercise(tuple(rng.sample(numbers, count)), int(value), solution)


def compute(expression: str) -> Fraction:
    """The value of an expression, exactly."""
    return _value(_parse(expression))


def numbers_in(expression: str) -> list[int]:
    """Every number that the expression uses, in order."""
    return [node.value for node in ast.walk(_parse(expression)) if isinstance(node, ast.Constant)]  # type: ignore[misc]


def _parse(expression: str) -> ast.expr:
    text = expression.translate(TYPOGRAPHY).strip()
    if len(text) > LONGEST_EXPRESSION or not re.fullmatch(r"[\d\s+\-*/()]+", text) or "**" in text or "//" in text:
        raise NotAnExpressionError(f"not an arithmetic expression: {expression[:80]!r}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotAnExpressionError(f"not an arithmetic expression: {expression[:80]!r}") from None
    return tree


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise NotAnExpressionError("division by zero")
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise NotAnExpressionError(f"{type(node).__name__} is not arithmetic")


def answer_of(response: str) -> str | None:
    """The expression in the last `<answer>…</answer>`; of an equation `1 + 2 = 3` the left side."""
    before, closed, _ = response.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.split("=")[0].strip() if closed and opened else None


def last_expression(response: str) -> str | None:
    """The last expression with an operator, left of any `=`, whether or not it is marked as the answer."""
    for line in reversed(response.replace("<answer>", "\n").replace("</answer>", "\n").splitlines()):
        found = [expression_in(run) for run in CALCULATION.findall(line.split("=")[0])]
        if with_operator := [text for text in found if OPERATOR.search(text)]:
            return with_operator[-1]
    return None


def expression_in(run: str) -> str:
    """The text from the first number or parenthesis to the last; a pattern that looked for both would do so again and
    again from every place of `( ( ( (`."""
    first, last = BEGINNING.search(run), END.search(run[::-1])
    return run[first.start() : len(run) - last.start()] if first and last else ""


def is_solution(expression: str, numbers: Sequence[int], target: int) -> bool:
    """The expression uses exactly these numbers, each once, and equals the target."""
    try:
        return Counter(numbers_in(expression)) == Counter(numbers) and compute(expression) == target
    except NotAnExpressionError:
        return False


def problem_of(item: dict[str, Any]) -> tuple[list[int], int]:
    """(numbers, target) of a row, from `answer` or verl's `reward_model.ground_truth`."""
    truth = item["answer"] if isinstance(item.get("answer"), dict) else item["reward_model"]["ground_truth"]
    return [int(number) for number in truth["numbers"]], int(truth["target"])


@register_reward("countdown")
def countdown(response: str, item: dict[str, Any]) -> float:
    """1 if the last `<answer>` is a right expression, else 0."""
    expression = answer_of(response)
    return float(expression is not None and is_solution(expression, *problem_of(item)))


@register_reward("countdown_plain")
def countdown_plain(response: str, item: dict[str, Any]) -> float:
    """1 if the last expression of the response is right, with or without `<answer>`: for models too small for marks."""
    expression = last_expression(response)
    return float(expression is not None and is_solution(expression, *problem_of(item)))
