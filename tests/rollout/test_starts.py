"""Responses that begin with their own number, length and forbidden first tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.draw import distribution
from gradtrace.rollout.sampler import Start


def test_each_start_has_its_own_number_and_limit(either: Any, prompts: list[list[int]]) -> None:
    starts = [Start(prompt, n=2 + i, limit=3 + 2 * i) for i, prompt in enumerate(prompts)]
    found = Sampler(either, max_batch_tokens=60).respond(
        starts, SamplingParams(), torch.Generator().manual_seed(0)
    )
    expected = [start.limit for start in starts for _ in range(start.n)]
    assert found.lengths.tolist() == expected and not found.finished.any()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9, temperature=0.8)])
def test_banned_tokens_leave_their_probability_to_the_others(either: Any, params: SamplingParams) -> None:
    prompt, count = [3, 7, 4], 4000
    with torch.no_grad():
        chances = distribution(either(torch.tensor([prompt])).logits[:, -1].double(), params)[0].exp()
    banned = tuple(chances.topk(2).indices.tolist())
    starts = [Start(prompt, count, 1, banned), Start(prompt, 50, 1)]
    found = Sampler(either).respond(starts, params, torch.Generator().manual_seed(1))
    chances[list(banned)] = 0.0
    chances /= chances.sum()
    observed = torch.bincount(found.tokens[:count, 0], minlength=len(chances)).double() / count
    assert not observed[list(banned)].any() and not observed[chances == 0].any()
    assert ((observed - chances).abs() <= 4.5 * (chances * (1 - chances) / count).sqrt() + 1e-12).all()
    assert torch.isin(found.tokens[count:, 0], torch.tensor(banned)).any(), "another start has no such ban"
