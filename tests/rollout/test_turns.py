"""Sampling in turns: calls end a turn, replies follow them, and log-probs are those of the whole context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.segments import Segment
from tests.rollout.test_sampler import seed, teacher_forced_log_probs

CALLS, REPLY, STOP = (1, 2, 3, 4), [9, 8, 9], 0


class Echo:
    """Answers every call alike, but knows nothing to say to token 4."""

    stop_token_ids: tuple[int, ...] = CALLS

    def reply(self, ids: list[int]) -> tuple[list[int], str] | None:
        return None if ids[-1] == 4 else (REPLY, f"tool{ids[-1]}")


@pytest.fixture(scope="module")
def params() -> SamplingParams:
    return SamplingParams(n=6, max_new_tokens=16, stop_token_ids=(STOP,))


def test_replies_follow_calls_and_log_probs_are_teacher_forced(
    either: Any, prompts: list[list[int]], params: SamplingParams
) -> None:
    batch = Sampler(either, environment=Echo(), max_turns=3).generate(prompts, params, seed())
    assert batch.segments is not None
    seen = set()
    for row, ids in enumerate(batch.response_ids):
        parts = batch.segments[row]
        expected = teacher_forced_log_probs(either, prompts[int(batch.group[row])], ids, 1.0)
        mask = batch.response_mask[row, : len(ids)]
        found = batch.sampler_log_probs[row, : len(ids)]
        torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)
        assert not found[~mask].any() and len(ids) <= 16
        ends = [*(part.start for part in parts[1:]), len(ids)]
        for part, end in zip(parts, ends, strict=True):
            own, written = ids[part.start : end], mask[part.start : end]
            if part.role == "tool":
                assert own == REPLY[: len(own)] and not written.any()
                assert part.tool == f"tool{ids[part.start - 1]}" and ids[part.start - 1] in CALLS
                assert len(own) == 3 or end == 16, "a reply is cut at the length limit alone"
            else:
                assert written.all() and not set(own[:-1]) & {*CALLS, STOP}
        turns = sum(part.role == "assistant" for part in parts)
        assert turns <= 3 and parts[0].turn == 0
        assert bool(batch.finished[row]) == (ids[-1] == STOP)
        seen.add(turns)
    assert seen == {1, 2, 3}, "the test should see responses of one, two and three turns"


def test_one_turn_ends_at_the_first_call(model: Any, prompts: list[list[int]], params: SamplingParams) -> None:
    batch = Sampler(model, environment=Echo(), max_turns=1).generate(prompts, params, seed())
    assert bool(batch.response_mask[batch.present].all())
    assert batch.segments == [[Segment(0, 0, "assistant")]] * len(batch)
    called = [ids for ids in batch.response_ids if ids[-1] in CALLS]
    assert called and not {t for ids in batch.response_ids for t in ids[:-1]} & {*CALLS, STOP}


def test_the_same_seed_gives_the_same_turns(model: Any, prompts: list[list[int]], params: SamplingParams) -> None:
    one, other = (
        Sampler(model, environment=Echo(), max_turns=3, max_batch_tokens=size).generate(prompts, params, seed(5))
        for size in (32_768, 100)
    )
    assert one.response_ids == other.response_ids and one.segments == other.segments
