"""The policy runs away from its reference, or from the policy that sampled."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, named, sure


def detect(moment: Moment) -> Finding | None:
    for name, what in (("actor/kl_loss", "the reference"), ("actor/ppo_kl", "the policy that sampled")):
        value, usual = moment.now(name), moment.usual(name)
        if value is None or usual is None:
            continue
        typical = max(abs(usual[0]), 1e-6)
        floor = moment.knobs.kl_floor if name == "actor/kl_loss" else moment.knobs.kl_floor / 2
        if abs(value) < max(floor, moment.knobs.kl_ratio * typical):
            continue
        batch, culprits = moment.batch, moment.blamed()
        if name == "actor/kl_loss" and batch.ref_log_probs is not None and batch.old_log_probs is not None:
            culprits = moment.tokens_by(batch.old_log_probs - batch.ref_log_probs)
        return Finding(
            f"The policy runs away from {what}: KL {value:.3g} nats per token, usually {usual[0]:.3g}; most at "
            f"{named(culprits)}.",
            sure(abs(value), max(floor, moment.knobs.kl_ratio * typical)),
            {"kl": value, "usual": usual[0]},
            culprits,
        )
    return None
