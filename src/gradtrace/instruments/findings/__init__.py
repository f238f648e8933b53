"""Findings: what is wrong with a run while it runs, in a sentence, with evidence, culprits and how sure we are.

A detector is a function of the step that has just ended and of the metrics before it, in `training`, `reward` or
`text`; `watch` lists them and runs them after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradtrace.attribution.config import number


@dataclass
class FindingsConfig:
    enable: bool = True
    """Watch the run and say what is wrong with it, in words; docs/findings.md."""
    off: list[str] = field(default_factory=list)
    """Detectors that stay silent, by name."""
    warmup_steps: int = number(5, minimum=2)
    """Steps that say what is usual; nothing is compared with less."""
    window: int = number(40, minimum=5)
    """Steps that are looked back on."""
    quiet_steps: int = number(10, minimum=1)
    """A finding that goes on is told once, and again when it was gone for this many steps."""
    spike_ratio: float = number(12.0, minimum=1)
    """gradient_spike: times the usual norm."""
    entropy_collapse: float = number(0.3, minimum=0, maximum=1)
    """entropy: below this share of the first steps', while the reward does not rise."""
    entropy_explosion: float = number(2.5, minimum=1)
    """entropy: above this many times the first steps'."""
    reward_gain: float = 0.05
    """entropy: a reward that rose by this excuses a fall …"""
    entropy_plunge: float = number(0.4, minimum=0, maximum=1)
    """entropy: … but not one to below this share of what it was two to five steps ago."""
    length_drift: float = number(0.25, minimum=0)
    """length_drift: relative change of the mean length."""
    length_pays: float = number(0.6, minimum=0, maximum=1)
    """length_drift: correlation of reward and length within groups, three steps running."""
    part_rise: float = number(0.1, minimum=0)
    """reward_parts: one part rose by this."""
    part_fall: float = number(0.05, minimum=0)
    """reward_parts: while another fell by this."""
    constant_groups: float = number(0.9, minimum=0, maximum=1)
    """constant_groups: share of groups, three steps running."""
    repeated: float = number(0.15, minimum=0, maximum=1)
    """repetition: more of the tokens in loops than usual, by this."""
    cut: float = number(0.25, minimum=0, maximum=1)
    """repetition: more of the responses cut at the length limit than usual, by this."""
    kl_ratio: float = number(10.0, minimum=1)
    """kl_runaway: times the usual KL …"""
    kl_floor: float = number(0.05, minimum=0)
    """kl_runaway: … and at least this many nats per token from the reference (half of it from the sampling policy)."""
    prompt_copies: float = number(0.2, minimum=0, maximum=1)
    """dominating_prompt: share of a step's prompts that are copies of others."""
    prompt_gradient: float = number(0.8, minimum=0, maximum=1)
    """dominating_prompt: share of the gradient by one prompt, three steps running."""
    clipped: float = number(0.2, minimum=0, maximum=1)
    """clip_saturation: share of clipped tokens."""
    mismatch_mean: float = number(0.05, minimum=0)
    """mismatch: mean difference of the sampler's and the trainer's log-probs, nats."""
    mismatch_token: float = number(4.0, minimum=0)
    """mismatch: the same of a single token; twice as much where optimizer steps lie in between."""
    validation_fall: float = number(0.15, minimum=0)
    """validation_falls: below its best, while the training reward did not fall."""
    reward_jump: float = number(0.25, minimum=0)
    """reward_jump: change of the mean reward in one step, as a share of its span …"""
    jump_noise: float = number(3.5, minimum=0)
    """reward_jump: … and standard errors of the change, as Student's t counts them where few prompts or steps tell the
    error."""
    end_untrained: float = number(0.5, minimum=0, maximum=1)
    """end_token: share of finished responses without a trained end token."""
    influence_gap: float = number(0.5, minimum=0)
    """influence_gap: predicted over measured change of measured groups is this far from 1, three times running."""
    less_likely: float = number(0.5, minimum=0, maximum=1)
    """likelihood_displacement: share of the measured accepted responses that a step made less likely, three times
    running."""
    critic_ratio: float = number(8.0, minimum=1)
    """critic_diverges: times its usual loss or gradient norm."""
    hacking_likeness: float = number(0.28, minimum=0, maximum=1)
    """reward_hacking: mean cosine of the cluster's gradients across prompts …"""
    hacking_growth: float = number(1.4, minimum=1)
    """reward_hacking: … grown by this factor …"""
    hacking_separation: float = number(0.11, minimum=0, maximum=1)
    """reward_hacking: … along a component that explains this share of the accepted gradients' variance."""
