"""Programs, judged by their tests, in a sandbox."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from gradtrace.errors import GradtraceError
from gradtrace.tasks.answers import code_of
from gradtrace.tasks.rewards.function import batched
from gradtrace.tasks.rewards.registry import register_reward
from gradtrace.tasks.rewards.unit_tests import unit_tests
from gradtrace.tasks.sandbox import PATIENCE, SERVICE
from gradtrace.tasks.verification.channel import Message
from gradtrace.tasks.verification.pool import shared_pool

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

logger = logging.getLogger(__name__)

LEAST_MEMORY = 128


@register_reward("code")
@batched
def code(
    responses: list[str],
    items: list[Item],
    *,
    partial: bool = False,
    timeout: float = 10.0,
    memory_mb: int = 512,
    workers: int = 0,
    allow_unsafe: bool = False,
) -> list[float]:
    """1 if the response's Python code passes all tests of the item; with `partial`, the share that it passes.

    Every response runs in a sandbox, with at most `timeout` seconds of computing (a script: for each input) and
    `memory_mb` megabytes, `workers` at once; 0 is one per core. Where Linux grants no namespaces nothing is run, unless
    `allow_unsafe` says so.
    """
    if memory_mb < LEAST_MEMORY:
        raise GradtraceError(
            f"reward.options.memory_mb={memory_mb} is too small: at least {LEAST_MEMORY}, of which the sandbox's own "
            "processes need a part."
        )
    requests = [
        request(response, item, partial, timeout, memory_mb, allow_unsafe)
        for response, item in zip(responses, items, strict=True)
    ]
    replies = shared_pool(SERVICE, workers).map(requests)
    for reply in replies:
        if reply.get("failed") == "refused":
            raise GradtraceError(
                f"reward.name=code runs programs that a model wrote, and this machine allows no isolation: "
                f"{reply['reason']}. Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 and "
                "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined), or, "
                "where nothing on the machine needs protection, reward.options.allow_unsafe=true: then programs run as "
                "your user, with all your files, under limits of time and memory alone."
            )
        if reply.get("failed") == "setup":
            raise GradtraceError(f"The sandbox could not start a program:\n{reply['reason']}")
    lost = sum("failed" in reply for reply in replies)
    if lost:
        logger.warning("%d of %d programs took their worker process down twice and score 0", lost, len(replies))
    ended = Counter(reply["why"] for reply in replies if reply.get("why"))
    if ended:
        logger.info("of %d programs some were ended early: %s", len(replies), dict(ended))
    return [
        score(reply.get("passed", []), len(request["tests"]), partial)
        for reply, request in zip(replies, requests, strict=True)
    ]


def request(response: str, item: Item, partial: bool, timeout: float, memory_mb: int, allow_unsafe: bool) -> Message:
    tests = unit_tests(item)
    return {
        "kind": tests.kind,
        "code": code_of(response),
        "setup": tests.setup,
        "tests": tests.tests,
        "entry_points": tests.entry_points,
        "stop": not partial,
        "seconds": timeout,
        # Until when the pool waits: a script runs once for each input.
        "timeout": PATIENCE * timeout * (len(tests.tests) if tests.kind == "script" else 1),
        "memory": memory_mb << 20,
        "unsafe": allow_unsafe,
    }


def score(passed: list[bool], total: int, partial: bool) -> float:
    return sum(passed) / total if partial else float(sum(passed) == total)
