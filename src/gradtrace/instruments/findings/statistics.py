"""Numbers of a batch that detectors follow over steps. They are metrics: a resumed run reads them again."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from gradtrace.algorithms import count_groups
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.shares import StepBlame
from gradtrace.instruments.mismatch import sampler_gap


def batch_statistics(batch: RolloutBatch, blame: StepBlame | None) -> dict[str, float]:
    counts = count_groups(batch.need("rewards"), batch.group)
    found = {
        "batch/constant_groups": counts.constant / max(1, counts.total),
        "batch/identical_siblings": identical_siblings(batch),
        "batch/repetition": float(repeated_share(batch).mean()),
        "batch/prompt_copies": 1.0 - len(set(map(tuple, batch.prompts))) / max(1, len(batch.prompts)),
        "batch/ends_like_a_middle": ends_like_a_middle(batch),
    }
    correlation = reward_length_correlation(batch)
    if correlation is not None:
        found["batch/reward_length_correlation"] = correlation
    gap = sampler_gap(batch)
    if gap is not None:
        differs = (gap != 0).any(1) & batch.response_mask.any(1)
        seen = gap[differs][batch.response_mask[differs]]
        found["mismatch/mean_gap"] = float(seen.abs().mean()) if len(seen) else 0.0
        found["mismatch/max_gap"] = float(seen.abs().max()) if len(seen) else 0.0
        found["mismatch/kl"] = float(-seen.mean()) if len(seen) else 0.0
        found["mismatch/max_ratio"] = float(seen.max().exp()) if len(seen) else 1.0
        later = later_gap(batch, blame)
        if later is not None:
            found["mismatch/later_gap"] = float(later.abs().max())
    if blame is not None and blame.updates:
        found["batch/prompt_gradient"] = largest_prompt_share(batch, blame)
    return found


def identical_siblings(batch: RolloutBatch) -> float:
    """Share of the responses that are word for word another response to the same prompt."""
    texts = [(group, *ids) for group, ids in zip(batch.group.tolist(), batch.response_ids, strict=True)]
    counts = Counter(texts)
    return sum(count for count in counts.values() if count > 1) / max(1, len(texts))


def repeated_share(batch: RolloutBatch, longest: int = 6) -> Tensor:
    """float[R]: the largest share of a response's tokens that repeat what stood p tokens before for at least 3p tokens
    running, over periods p up to `longest`: "abababab", or one token again and again."""
    ids, mask = batch.responses, batch.response_mask
    best = torch.zeros(len(batch))
    for period in range(1, min(longest, ids.shape[1] - 1) + 1):
        same = (ids[:, period:] == ids[:, :-period]) & mask[:, period:]
        run, loops = torch.zeros(len(batch), dtype=torch.long), torch.zeros(len(batch), dtype=torch.long)
        for column in same.T:
            run = torch.where(column, run + 1, 0)
            loops += (run >= 3 * period).long()
        best = torch.maximum(best, loops / batch.response_lengths.clamp(min=1))
    return best


def ends_like_a_middle(batch: RolloutBatch) -> float:
    """Share of the finished responses whose last token also stands inside of responses: then it is no end token."""
    lengths = batch.replace(lengths=None).response_lengths  # up to the last token that is trained
    chosen = (batch.finished & (lengths > 0)).nonzero().flatten()
    if not len(chosen):
        return 0.0
    last = batch.responses[chosen, lengths[chosen] - 1]
    # The last token of a turn may well end the response, too.
    inside = batch.response_mask[:, :-1] & batch.response_mask[:, 1:]
    return float(torch.isin(last, batch.responses[:, :-1][inside].unique()).float().mean())


def reward_length_correlation(batch: RolloutBatch) -> float | None:
    """Correlation of reward and length within groups; None where lengths or rewards hardly differ there."""
    groups = len(batch.prompts)

    def centred(values: Tensor) -> Tensor:
        counts = torch.bincount(batch.group, minlength=groups).clamp(min=1)
        means = torch.zeros(groups).index_add(0, batch.group, values) / counts
        return values - means[batch.group]

    lengths, rewards = centred(batch.response_lengths.float()), centred(batch.need("rewards").float())
    if float(lengths.std()) < 0.2 or float(rewards.std()) < 1e-6:
        return None
    return float((lengths * rewards).mean() / (lengths.square().mean() * rewards.square().mean()).sqrt())


def later_gap(batch: RolloutBatch, blame: StepBlame | None) -> Tensor | None:
    """The same of rows that were taken over from the sampler, as blame's pass found them after some optimizer steps:
    with what these steps have moved in it."""
    gap = sampler_gap(batch)
    if gap is None or blame is None or not blame.updates:
        return None
    taken_over = (gap == 0).all(1)[:, None] & batch.response_mask & (blame.log_probs != 0)
    return torch.where(taken_over, blame.log_probs.to(gap) - batch.sampler_log_probs, 0.0)


def largest_prompt_share(batch: RolloutBatch, blame: StepBlame) -> float:
    """The largest share of the step's gradient that the responses to one and the same prompt have."""
    shares = blame.of_the_step().group_share(batch)
    sums: Counter[tuple[int, ...]] = Counter()
    for prompt, share in zip(batch.prompts, shares.tolist(), strict=True):
        sums[tuple(prompt)] += share
    return float(max(sums.values()))
