"""The critic's loss or gradient runs away, or its values explain nothing."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, named, sure


def detect(moment: Moment) -> Finding | None:
    for name in ("critic/vf_loss", "critic/grad_norm"):
        value, usual = moment.now(name), moment.usual(name)
        if value is None or usual is None:
            continue
        ratio = value / max(usual[0], 1e-9)
        if ratio < moment.knobs.critic_ratio or value < 1.5 * float(moment.before(name).max()):
            continue
        batch, culprits = moment.batch, []
        if batch.values is not None and batch.returns is not None:
            culprits = moment.tokens_by((batch.values - batch.returns).abs())
        return Finding(
            f"The critic diverges: {name} is {value:.3g}, {ratio:.0f} times its usual {usual[0]:.3g}, and "
            f"advantages are noise. Lower critic.optim.lr. Furthest from its returns: {named(culprits)}.",
            sure(ratio, moment.knobs.critic_ratio),
            {"value": value, "usual": usual[0]},
            culprits,
        )
    return None
