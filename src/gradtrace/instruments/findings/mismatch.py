"""The trainer's log-probs are not those of the sampler: temperature, mask, precision, or a token nobody sampled."""

from __future__ import annotations

import torch

from gradtrace.instruments.findings.base import Finding, Moment, named, sure
from gradtrace.instruments.findings.statistics import later_gap
from gradtrace.instruments.mismatch import sampler_gap

MEAN, LARGEST, LATER = "mismatch/mean_gap", "mismatch/max_gap", "mismatch/later_gap"


def detect(moment: Moment) -> Finding | None:
    mean, largest = moment.now(MEAN), moment.now(LARGEST)
    if mean is None or largest is None:
        return None
    later = (moment.now(LATER) or 0.0) / 2  # optimizer steps within a rollout move tokens, too
    if mean < moment.knobs.mismatch_mean and max(largest, later) < moment.knobs.mismatch_token:
        return None
    gap, moved = sampler_gap(moment.batch), later_gap(moment.batch, moment.blame)
    assert gap is not None
    culprits = moment.tokens_by(gap.abs() if moved is None else torch.maximum(gap.abs(), moved.abs() / 2))
    largest = max(largest, 2 * later)
    few = mean < moment.knobs.mismatch_mean
    off_by_one = not few and _better_shifted(moment)
    why = "Do both use the same temperature, weights and precision?"
    if few:
        why = "Single tokens are not what the policy would sample: was something forced into the response?"
    elif off_by_one:
        why = "Shifted by one token they agree: a mask or a target is off by one."
    return Finding(
        f"Sampler and trainer disagree about the sampled tokens, by {mean:.3g} nats on average and "
        f"{largest:.3g} at most. {why} Most: {named(culprits)}.",
        sure(largest, moment.knobs.mismatch_token) if few else sure(mean, moment.knobs.mismatch_mean),
        {"mean_gap": mean, "max_gap": largest, "off_by_one": float(off_by_one)},
        culprits,
    )


def _better_shifted(moment: Moment) -> bool:
    """Whether the trainer's log-probs fit the sampler's of the token before or after much better."""
    batch = moment.batch
    old, sampled, mask = batch.need("old_log_probs"), batch.sampler_log_probs, batch.response_mask
    differs = ((old - sampled).abs() * mask).sum(1) > 0
    both = mask[:, 1:] & differs[:, None]
    straight = float((old - sampled)[:, 1:][both].abs().mean())
    shifted = [(old[:, 1:] - sampled[:, :-1])[both], (old[:, :-1] - sampled[:, 1:])[both]]
    return min(float(torch.nan_to_num(gap.abs().mean(), nan=torch.inf)) for gap in shifted) < 0.3 * straight
