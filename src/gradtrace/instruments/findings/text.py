"""Detectors of what goes wrong in the responses themselves, and the statistics of a batch that detectors follow over
steps. These are metrics: a resumed run reads them again.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from gradtrace.algorithms import count_groups
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.reporter import StepBlame
from gradtrace.instruments.findings.base import Finding, Moment, named, sure
from gradtrace.instruments.mismatch.share import sampler_gap

LENGTH, PAYS = "response_length/mean", "batch/reward_length_correlation"
REPEATED, CUT = "batch/repetition", "response_length/clip_ratio"
ENDS = "batch/ends_like_a_middle"


def length_drift(moment: Moment) -> Finding | None:
    """Responses that grow or shrink steadily, and whether the reward pays for their length."""
    if (found := moment.compared(LENGTH)) is None:
        return None
    length, _ = found
    first = float(moment.before(LENGTH)[: moment.knobs.warmup_steps].mean())
    change, pays = length / max(first, 1e-9) - 1.0, moment.now(PAYS)
    earlier = moment.before(PAYS)
    paid = pays is not None and len(earlier) >= 2 and min(pays, *earlier[-2:]) > moment.knobs.length_pays
    was_paid = len(earlier) >= moment.knobs.warmup_steps and float(earlier[: moment.knobs.warmup_steps].mean()) > 0.3
    drifts = abs(change) > moment.knobs.length_drift
    if not drifts and not (paid and not was_paid):
        return None
    culprits = moment.responses_by(moment.batch.response_lengths, descending=change > 0)
    why = f" The reward pays for length (correlation within groups {pays:.2f})." if paid else ""
    value, threshold = (change, moment.knobs.length_drift) if drifts else (pays or 0.0, moment.knobs.length_pays)
    return Finding(
        f"Responses {'grow' if change > 0 else 'shrink'}: {length:.1f} tokens, {first:.1f} at first "
        f"({change:+.0%}).{why} The {'longest' if change > 0 else 'shortest'}: {named(culprits)}.",
        sure(abs(value), threshold),
        {"length": length, "at_first": first, "reward_length_correlation": pays if pays is not None else 0.0},
        culprits,
    )


def repetition(moment: Moment) -> Finding | None:
    """Responses that repeat themselves, or are cut at the length limit."""
    for name, limit in ((REPEATED, moment.knobs.repeated), (CUT, moment.knobs.cut)):
        value, usual = moment.compared(name) or (-math.inf, 0.0)
        if value < usual + limit:
            continue
        if name == CUT:
            culprits = [moment.response(row) for row in (~moment.batch.finished).nonzero().flatten()[:3].tolist()]
            sentence = f"{value:.0%} of the responses are cut at the length limit ({usual:.0%} before)"
        else:
            culprits = moment.responses_by(repeated_share(moment.batch))
            sentence = f"Responses repeat themselves: {value:.0%} of their tokens are in loops ({usual:.0%} before)"
        evidence = {"share": value, "usual": usual}
        return Finding(f"{sentence}: {named(culprits)}.", sure(value - usual, limit), evidence, culprits)
    return None


def end_token(moment: Moment) -> Finding | None:
    """Finished responses whose end token is not among the trained tokens: the policy never learns to stop."""
    share = moment.now(ENDS)
    if share is None or share < moment.knobs.end_untrained:
        return None
    rows = moment.batch.finished.nonzero().flatten()[:3].tolist()
    lengths = moment.batch.response_lengths
    culprits = [moment.token(row, int(lengths[row]) - 1) for row in rows]
    shown = ", ".join(repr(culprit.text) for culprit in culprits)
    return Finding(
        f"{share:.0%} of the finished responses end, as far as training sees them, with a token that also "
        f"stands in the middle of responses ({shown}): their end token is masked, so the policy never learns to stop.",
        sure(share, moment.knobs.end_untrained),
        {"share": share},
        culprits,
    )


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
        seen = seen if len(seen) else torch.zeros(1)
        found["mismatch/mean_gap"] = float(seen.abs().mean())
        found["mismatch/max_gap"] = float(seen.abs().max())
        found["mismatch/kl"] = float(-seen.mean())
        found["mismatch/max_ratio"] = float(seen.max().exp())
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


def repeated_share(batch: RolloutBatch) -> Tensor:
    """float[R]: the largest share of a response's tokens that repeat what stood p tokens before for at least 3p tokens
    running, over periods p up to 6: "abababab", or one token again and again."""
    ids, mask = batch.responses, batch.response_mask
    best = torch.zeros(len(batch))
    for period in range(1, min(6, ids.shape[1] - 1) + 1):
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
