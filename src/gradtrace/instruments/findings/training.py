"""Detectors of what goes wrong in the update: gradients, entropy, KL, clipping, the sampler's log-probs, the critic."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from gradtrace.instruments.findings.base import Finding, Moment, named, sure
from gradtrace.instruments.findings.text import later_gap
from gradtrace.instruments.mismatch.share import sampler_gap

GRADIENT_NORMS = ("blame/largest_grad_norm", "actor/grad_norm")
ENTROPY = "actor/entropy"
COPIES, GRADIENT = "batch/prompt_copies", "batch/prompt_gradient"
CLIPPED = "actor/pg_clipfrac"
PREDICTED_OVER_MEASURED = "influence_trace/predicted_over_measured"
LESS_LIKELY = "influence_trace/accepted_less_likely"
RUNNING = 3
"""Measured steps in a row that say the same."""
MEAN_GAP, LARGEST_GAP, LATER_GAP = "mismatch/mean_gap", "mismatch/max_gap", "mismatch/later_gap"


def gradient_spike(moment: Moment) -> Finding | None:
    """A gradient far larger than usual, or one that is not finite: which tokens made it."""
    if moment.metrics.get("actor/skipped_updates", 0.0) > 0:
        culprits = moment.blamed()
        sentence = f"A gradient was not finite and its update was skipped; by {named(culprits)}."
        return Finding(sentence, 1.0, {"skipped": moment.metrics["actor/skipped_updates"]}, culprits)
    if (found := moment.compared(*GRADIENT_NORMS)) is None:
        return None
    (norm, typical), largest = found, float(moment.before(*GRADIENT_NORMS).max())
    ratio = norm / max(typical, 1e-12)
    if math.isfinite(norm) and (ratio < moment.knobs.spike_ratio or norm < 1.5 * largest):
        return None
    culprits = moment.blamed()
    return Finding(
        f"The gradient norm jumped to {norm:.3g}, {ratio:.0f} times its usual {typical:.3g}; most of it by "
        f"{named(culprits)}.",
        sure(ratio, moment.knobs.spike_ratio),
        {"grad_norm": norm, "usual": typical},
        culprits,
    )


def entropy(moment: Moment) -> Finding | None:
    """Entropy that collapses at once or without the reward to show for it, or explodes: which tokens, since when."""
    entropy = moment.now(ENTROPY)
    series = np.array([*moment.before(ENTROPY), entropy if entropy is not None else np.nan])
    first = series[: moment.knobs.warmup_steps]
    if entropy is None or len(series) <= moment.knobs.warmup_steps:
        return None
    begin, recent = float(np.median(first)), float(np.median(series[-2:]))
    evidence = {"entropy": entropy, "at_first": begin}
    predicted = moment.now("entropy_probe/delta_h_predicted")
    if predicted is not None:
        evidence["predicted_change"] = predicted
    if recent > moment.knobs.entropy_explosion * max(begin, 1e-3):
        culprits = moment.tokens_by(moment.batch.entropies) if moment.batch.entropies is not None else []
        since = _since(moment, series, begin * moment.knobs.entropy_explosion**0.5, above=True)
        return Finding(
            f"Entropy explodes: {entropy:.3f} nats per token, {begin:.3f} at first, since step {since}; the "
            f"policy becomes noise. Least sure: {named(culprits)}.",
            sure(recent, moment.knobs.entropy_explosion * begin),
            evidence,
            culprits,
        )
    falls = recent < moment.knobs.entropy_collapse * begin
    soon = predicted is not None and predicted < 0 and entropy + 5 * predicted < moment.knobs.entropy_collapse * begin
    if not (falls or (soon and recent < 0.7 * begin)):
        return None
    plunges = recent < moment.knobs.entropy_plunge * float(np.median(series[-6:-2]))
    if _is_learning(moment) and not plunges:
        return None
    culprits = moment.vocabulary(moment.blame.of_the_step().share) if moment.blame is not None else []
    what = "collapsed" if falls else "is about to collapse, says the probe"
    but = (
        "within a few steps, faster than anything is learnt: is the learning rate too high?"
        if plunges
        else "and the reward has not risen with it: the policy stops exploring."
    )
    return Finding(
        f"Entropy {what}: {entropy:.3f} nats per token, {begin:.3f} at first, since step "
        f"{_since(moment, series, 0.5 * (begin + recent), above=False)}, {but}"
        + (f" The update is mostly about {named(culprits)}." if culprits else ""),
        sure(moment.knobs.entropy_collapse * begin, max(recent, 1e-6)),
        evidence,
        culprits,
    )


def _is_learning(moment: Moment) -> bool:
    """Entropy that falls while the reward rises is what learning looks like."""
    rewards = [*moment.before("critic/rewards/mean"), moment.now("critic/rewards/mean") or 0.0]
    third = max(2, len(rewards) // 3)
    return float(np.mean(rewards[-third:])) > float(np.mean(rewards[:third])) + moment.knobs.reward_gain


def _since(moment: Moment, series: np.ndarray, level: float, above: bool) -> int:
    """The first step of the latest stretch beyond the level."""
    beyond = series > level if above else series < level
    stretch = len(beyond) - (np.flatnonzero(~beyond)[-1] + 1 if not beyond.all() else 0)
    return moment.step - max(int(stretch), 1) + 1


def kl_runaway(moment: Moment) -> Finding | None:
    """The policy runs away from its reference, or from the policy that sampled."""
    for name, what in (("actor/kl_loss", "the reference"), ("actor/ppo_kl", "the policy that sampled")):
        if (found := moment.compared(name)) is None:
            continue
        value, usual = found
        floor = moment.knobs.kl_floor if name == "actor/kl_loss" else moment.knobs.kl_floor / 2
        limit = max(floor, moment.knobs.kl_ratio * max(abs(usual), 1e-6))
        if abs(value) < limit:
            continue
        batch, culprits = moment.batch, moment.blamed()
        if name == "actor/kl_loss" and batch.ref_log_probs is not None and batch.old_log_probs is not None:
            culprits = moment.tokens_by(batch.old_log_probs - batch.ref_log_probs)
        return Finding(
            f"The policy runs away from {what}: KL {value:.3g} nats per token, usually {usual:.3g}; most at "
            f"{named(culprits)}.",
            sure(abs(value), limit),
            {"kl": value, "usual": usual},
            culprits,
        )
    return None


def dominating_prompt(moment: Moment) -> Finding | None:
    """One prompt that fills the batch, or whose responses make most of the gradient step after step."""
    batch, knobs = moment.batch, moment.knobs
    copies = moment.metrics.get(COPIES, 0.0)
    counts = Counter(map(tuple, batch.prompts))
    if len(batch.prompts) >= 4 and copies > knobs.prompt_copies:
        text, count = counts.most_common(1)[0]
        culprits = [moment.prompt(batch.prompts.index(list(text)), count / len(batch.prompts))]
        return Finding(
            f"{count} of the {len(batch.prompts)} prompts of this step are one and the same ({copies:.0%} of "
            f"all are copies): {named(culprits)}.",
            sure(copies, knobs.prompt_copies),
            {"copies": copies},
            culprits,
        )
    share = moment.metrics.get(GRADIENT, 0.0)
    recent = [*moment.before(GRADIENT)[-2:], share]
    if moment.blame is None or len(recent) < 3 or min(recent) < knobs.prompt_gradient:
        return None
    of_groups = moment.blame.of_the_step().group_share(batch)
    culprits = [moment.prompt(int(g), float(of_groups[g])) for g in of_groups.argsort(descending=True)[:3]]
    return Finding(
        f"A single prompt makes {share:.0%} of the gradient, in the third step running: {named(culprits)}.",
        sure(share, knobs.prompt_gradient),
        {"share": share},
        culprits,
    )


def clip_saturation(moment: Moment) -> Finding | None:
    """So many tokens are clipped that the update hardly uses the batch."""
    share, usual = moment.compared(CLIPPED) or (-math.inf, 0.0)
    limit = max(moment.knobs.clipped, 3 * usual)
    if share < limit:
        return None
    culprits = moment.blamed()
    return Finding(
        f"{share:.0%} of the tokens are clipped (usually {usual:.1%}): the policy moves too far within one "
        "rollout. Lower the learning rate, or make fewer optimizer steps per rollout. Most of the gradient: "
        f"{named(culprits)}.",
        sure(share, limit),
        {"clipped": share, "usual": usual},
        culprits,
    )


def mismatch(moment: Moment) -> Finding | None:
    """The trainer's log-probs are not those of the sampler: temperature, mask, precision, or a token nobody sampled."""
    mean, largest = moment.now(MEAN_GAP), moment.now(LARGEST_GAP)
    if mean is None or largest is None:
        return None
    later = (moment.now(LATER_GAP) or 0.0) / 2  # optimizer steps within a rollout move tokens, too
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


def influence_gap(moment: Moment) -> Finding | None:
    """The influence of measured groups does not add up to what the optimizer steps changed."""
    if (ratio := moment.now(PREDICTED_OVER_MEASURED)) is None:
        return None
    apart = np.array([*moment.before(PREDICTED_OVER_MEASURED), ratio])[-RUNNING:] - 1.0
    least = float(np.abs(apart).min())
    if len(apart) < RUNNING or least < moment.knobs.influence_gap or len(set(np.sign(apart))) > 1:
        return None
    typical = float(np.median(apart)) + 1.0
    return Finding(
        f"The influence of measured groups is {typical:.2g} times what the optimizer steps changed, for the third "
        "measured step running, so do not trust the scores of these steps. Is the learning rate so high that a step is "
        "far from linear, or does something besides the optimizer move the weights?",
        sure(least, moment.knobs.influence_gap),
        {"predicted_over_measured": ratio, "median_of_three": typical},
    )


def likelihood_displacement(moment: Moment) -> Finding | None:
    """Steps that make accepted responses less likely (arXiv 2505.18830), by the log-probs of measured groups."""
    if (share := moment.now(LESS_LIKELY)) is None:
        return None
    recent = [*moment.before(LESS_LIKELY), share][-RUNNING:]
    if len(recent) < RUNNING or min(recent) <= moment.knobs.less_likely:
        return None
    return Finding(
        f"{share:.0%} of the measured responses with a positive advantage became less likely by the step, more than "
        f"{moment.knobs.less_likely:.0%} for the third measured step running: what the step takes from rejected "
        "responses, it takes from accepted ones that resemble them. Lower the learning rate, or weigh negative "
        "advantages less.",
        sure(min(recent), moment.knobs.less_likely),
        {"share": share, "least_of_three": min(recent)},
    )


def critic_diverges(moment: Moment) -> Finding | None:
    """The critic's loss or gradient runs away, or its values explain nothing."""
    for name in ("critic/vf_loss", "critic/grad_norm"):
        if (found := moment.compared(name)) is None:
            continue
        value, usual = found
        ratio = value / max(usual, 1e-9)
        if ratio < moment.knobs.critic_ratio or value < 1.5 * float(moment.before(name).max()):
            continue
        batch, culprits = moment.batch, []
        if batch.values is not None and batch.returns is not None:
            culprits = moment.tokens_by((batch.values - batch.returns).abs())
        return Finding(
            f"The critic diverges: {name} is {value:.3g}, {ratio:.0f} times its usual {usual:.3g}, and "
            f"advantages are noise. Lower critic.optim.lr. Furthest from its returns: {named(culprits)}.",
            sure(ratio, moment.knobs.critic_ratio),
            {"value": value, "usual": usual},
            culprits,
        )
    return None
