r"""Mathematical answers, compared as mathematics: 1/2 is 0.5 is \frac{1}{2}."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from typing import TYPE_CHECKING

from gradtrace.errors import GradtraceError, install
from gradtrace.tasks.rewards.function import batched, shorten
from gradtrace.tasks.rewards.registry import register_reward
from gradtrace.tasks.verification.channel import Message
from gradtrace.tasks.verification.pool import shared_pool

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

logger = logging.getLogger(__name__)

JUDGE = "gradtrace.tasks.verification.math_judge:create"
REQUIRE = ("any", "boxed", "marker", "line", "plain")


@register_reward("math")
@batched
def math(
    responses: list[str], items: list[Item], *, require: str = "any", timeout: float = 5.0, workers: int = 0
) -> list[float]:
    r"""1 if the response's answer equals `item["answer"]`, by math-verify, in a process that can be killed.

    The answer is the last `\boxed{…}` or `#### …`, else the last line `Answer: …`, else what math-verify finds at the
    end of the text; `require` boxed, marker or line accepts that form alone. An answer that takes longer than
    `timeout` seconds to judge scores 0. `workers` processes judge at once; 0 is one per core.
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
