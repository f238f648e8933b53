"""Rewards by rule: answers that are numbers, calculations or formulas, and the form in which they are given.

Rewards of form are meant as a small extra beside the one for being right: `reward.extra={think_format: 0.1}`.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections import Counter
from typing import TYPE_CHECKING

from gradtrace.errors import GradtraceError, install
from gradtrace.tasks.answers import SPECIAL_TOKEN, boxed_answer, boxed_spans, fenced
from gradtrace.tasks.countdown import NotAnExpressionError, compute, last_expression
from gradtrace.tasks.hedges import NUMBER, named
from gradtrace.tasks.rewards import batched, register_reward, shorten
from gradtrace.tasks.verification.channel import Message
from gradtrace.tasks.verification.pool import shared_pool

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item


@register_reward("gsm8k")
def gsm8k(response: str, item: Item) -> float:
    """1 if the last number after `####` in the response equals the one in the answer."""
    return float(number_after_marker(response) == number_after_marker(str(item["answer"])) is not None)


@register_reward("last_number")
def last_number(response: str, item: Item) -> float:
    r"""1 if the number in the last \boxed{…}, else after the last `Answer:`, equals the answer's."""
    boxed = boxed_answer(response)
    found = [boxed[1]] if boxed else re.findall(r"(?i)answer:\s*(.*)", response)
    expected = as_number(str(item["answer"]))
    return float(bool(found) and as_number(found[-1]) == expected is not None)


def number_after_marker(text: str) -> float | None:
    """The number in the line after the last `####`, or of the whole text if that is nothing but a number."""
    _, marker, tail = text.rpartition("####")
    if not marker and not NUMBER.fullmatch(text.strip()):
        return None
    return as_number(tail.strip().partition("\n")[0])


def as_number(text: str) -> float | None:
    """The first number in the text, thousands separators and a currency sign removed.

    None if the text names several (`18 or 19`), denies or bounds it (`not 18`), or is an equation between numbers.
    """
    text = SPECIAL_TOKEN.sub(" ", text)
    numbers = named(text, NUMBER, last=False)
    if not numbers or len(numbers) > 1 or ("=" in text and len(NUMBER.findall(text)) > 1):
        return None
    return float(re.sub(r"[^\d.-]", "", numbers[0]))


TIMES = re.compile(r"(?<=[\d)])\s*[xX]\s*(?=[\d(])")


@register_reward("gsm8k_calculation")
def gsm8k_calculation(response: str, item: Item) -> float:
    """1 if the last calculation in the response, such as `12 + 3`, comes to the answer when it is computed exactly.

    Whatever the response claims that it comes to is not looked at: models that choose the right numbers and the right
    operator are often too small to compute. `$3 x 4` is `3 * 4`.
    """
    calculation = last_expression(TIMES.sub("*", response.replace("$", "")))
    if calculation is None:
        return 0.0
    try:
        return float(float(compute(calculation)) == number_after_marker(str(item["answer"])))
    except NotAnExpressionError:
        return 0.0


logger = logging.getLogger(__name__)

JUDGE = "gradtrace.tasks.verification.judge:create"
REQUIRE = ("any", "boxed", "marker", "answer", "line", "plain")


@register_reward("math")
@batched
def math(
    responses: list[str], items: list[Item], *, require: str = "any", timeout: float = 5.0, workers: int = 0
) -> list[float]:
    r"""1 if the response's answer equals `item["answer"]`, by math-verify, in a process that can be killed.

    The answer is the last of `\boxed{…}`, `#### …` and `<answer>…</answer>`, else the last line `Answer: …`, else what
    the end of the text says; `require` boxed, marker, answer or line accepts that form alone. An answer that takes
    longer than `timeout` seconds to judge scores 0. `workers` processes judge at once; 0 is one per core.
    """
    if require not in REQUIRE:
        raise GradtraceError(f"reward.options.require={require} is not possible. Valid: {', '.join(REQUIRE)}.")
    if importlib.util.find_spec("math_verify") is None:
        raise GradtraceError(f"reward.name=math needs math-verify: {install('math')}")
    requests: list[Message] = [
        {"response": response, "answer": str(item["answer"]), "require": require, "timeout": timeout}
        for response, item in zip(responses, items, strict=True)
    ]
    answers = shared_pool(JUDGE, workers).map(requests)
    unreadable = {
        request["answer"]
        for request, answer in zip(requests, answers, strict=True)
        if answer.get("failed") == "unreadable"
    }
    for answer in sorted(unreadable):
        logger.warning("math-verify cannot read the right answer %r: every response to it scores 0", shorten(answer))
    failures = Counter(answer["failed"] for answer in answers if "failed" in answer)
    del failures["unreadable"]
    if failures:
        logger.warning(
            "%d of %d answers could not be judged and score 0: %s",
            failures.total(),
            len(answers),
            dict(failures),
        )
    return [answer.get("score", 0.0) for answer in answers]


THINK = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
MARKER = re.compile(r"####[ \t]*\S")
TAGS = ("<think>", "</think>")


@register_reward("think_format")
def think_format(response: str, item: Item) -> float:
    """`<think>…</think>` once, with something in it, at the start, and an answer after it."""
    match = THINK.fullmatch(response)
    once = all(response.count(tag) == 1 for tag in TAGS)
    return float(bool(match and once and match["thought"].strip() and match["answer"].strip()))


@register_reward("answer_format")
def answer_format(response: str, item: Item) -> float:
    """The response ends with exactly one `<answer>…</answer>` that is not empty."""
    once = response.count("<answer>") == response.count("</answer>") == 1
    content, closed, rest = response.partition("<answer>")[2].partition("</answer>")
    return float(once and bool(closed and content.strip()) and not rest.strip())


@register_reward("boxed_format")
def boxed_format(response: str, item: Item) -> float:
    r"""Exactly one `\boxed{…}` with something in it."""
    spans = boxed_spans(response)
    return float(len(spans) == 1 and bool(response[slice(*spans[0])].strip()))


@register_reward("marker_format")
def marker_format(response: str, item: Item) -> float:
    """Exactly one `#### answer`, on the last line."""
    lines = response.strip().splitlines()
    return float(bool(lines) and response.count("####") == 1 and MARKER.search(lines[-1]) is not None)


@register_reward("code_format")
def code_format(response: str, item: Item) -> float:
    """Exactly one fenced code block, closed, with something in it."""
    return float(len(fenced(response)) == 1 and response.count("```") == 2)
