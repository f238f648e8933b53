"""Responses that begin with their own number, length and forbidden first tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.decoder import Prompts
from gradtrace.rollout.draw import distribution
from gradtrace.rollout.sampler import Start


def test_each_start_has_its_own_number_and_limit(either: Any, prompts: list[list[int]]) -> None:
    starts = [Start(prompt, n=2 + i, limit=3 + 2 * i) for i, prompt in enumerate(prompts)]
    found = Sampler(either, max_batch_tokens=60).respond(starts, SamplingParams(), torch.Generator().manual_seed(0))
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


def test_beginnings_that_prompts_share_are_read_once_and_change_nothing(either: Any) -> None:
    whole = [3, 7, 4, 9, 2, 2, 8, 5]
    prompts = [whole[:3], whole, [6, 1], whole[:5], whole[:5], [6, 1, 1], [3, 7, 9]]
    readers, reader = Prompts(prompts, torch.device("cpu")).readers()
    assert len(readers.lengths) == 3 and reader[0] == reader[1] == reader[3] == reader[4] and reader[2] == reader[5]
    starts = [Start(prompt, 2, 6) for prompt in prompts]
    together = Sampler(either).respond(starts, SamplingParams(), torch.Generator().manual_seed(2))
    uniforms = torch.Generator().manual_seed(2)
    alone = Sampler(either, max_batch_tokens=1).respond(starts, SamplingParams(), uniforms)  # a row at a time
    assert torch.equal(together.tokens, alone.tokens)
    torch.testing.assert_close(together.log_probs, alone.log_probs, atol=1e-5, rtol=1e-5)
