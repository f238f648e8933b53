"""Influence trace: which tokens pushed towards the accepted answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradtrace.attribution.config import InfluenceConfig, number
from gradtrace.attribution.errors import AttributionError
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.registry import later, register
from gradtrace.instruments.settings import TraceConfig
from gradtrace.trace.columns import (
    EVERY_KIND,
    EXPECTED,
    INFLUENCE_SCORES,
    PAIRWISE,
    REWARD_PARTS,
    RUN_META,
    SIGN_OF_PARTS,
    SIGN_STATEMENT,
    Column,
    InstrumentRecord,
)

if TYPE_CHECKING:
    from gradtrace.trace.step import Step
    from gradtrace.trace.table import StepTable

INFLUENCE_TRACE = "influence_trace"


def captured(step: Step) -> np.ndarray:
    """bool[N]: the tokens that have a score."""
    found: np.ndarray = step["captured"]
    return found


def log_prob_change(table: StepTable) -> np.ndarray | None:
    """[N]: what the real optimizer step did to every token's log-prob, where it was measured."""
    before, after = table.column("log_prob_before"), table.column("log_prob_after")
    return None if before is None or after is None else after - before


@dataclass
class InfluenceTraceConfig(InfluenceConfig, TraceConfig):
    """The tracer's knobs, and what a run adds to them."""

    enable: bool = False
    """Score every token: how much does training on it raise the objective of its mini-batch, in nats?"""
    accepted_threshold: float | None = None
    """A response is accepted if its reward is at least this; unset: if it is the best of a group with mixed rewards."""
    scope_pass: bool = False
    """Score the whole batch of a step at its first weights, in passes of the trace's own: then `all_selected` means all
    mini-batches. Otherwise every mini-batch is scored by itself, on its training pass, at the weights it meets."""
    verify_every: int = number(0, minimum=0)
    """Steps between checks of the scores, which take real optimizer steps on a few random halves of one group and put
    everything back: influence_trace/validity, and validity_baseline of |A|(1−p) beside it; 0 is never."""
    max_prompts_per_step: int = number(0, minimum=0)
    """Trace at most this many prompts with mixed rewards; 0 is no cap."""
    pairwise_max_mb: float = number(64.0, minimum=0)
    """Store the effect of each token on each sibling response while a step's file stays below this; 0 is never."""

    def __post_init__(self) -> None:
        """Values are checked by `validate`, which names a key by its whole path."""
        self.pairwise = self.pairwise and self.pairwise_max_mb > 0

    def validate(self, path: str) -> None:
        try:
            self.check()
        except AttributionError as error:
            raise GradtraceError(f"{path.rstrip('.')}: {error}.") from None
        if self.is_parts and (self.scope_pass or self.max_prompts_per_step):
            key = "scope_pass" if self.scope_pass else "max_prompts_per_step"
            raise GradtraceError(
                f"{path}{key} belongs to scores from captured factors. The default scores every token of every "
                "mini-batch by one forward pass, so there is nothing to limit: leave it out, or set "
                f"{path}hessian_mode=inverse or {path}credit=position."
            )
        if self.verify_every and not self.is_parts:
            raise GradtraceError(
                f"{path}verify_every={self.verify_every} holds the default score against real optimizer steps, and "
                "these settings ask for scores from captured factors: leave it out, or run `gradtrace verify` on a "
                "checkpoint."
            )
        if self.verify_every % self.write_every:
            raise GradtraceError(
                f"{path}verify_every={self.verify_every}: scores are made every {self.write_every} steps "
                "(write_every), so it must be a multiple of that."
            )

    def check_run(self, path: str, responses: int, dropout: float) -> None:
        if responses < 2 and not self.is_parts:
            raise GradtraceError(
                "rollout.n=1 gives every prompt one response, and these scores compare accepted with rejected "
                f"responses to the same prompt: there would be none. Set rollout.n=8, or {path}.enable=false."
            )


def _needs(settings: InfluenceTraceConfig) -> dict[str, str]:
    found = {"trials": "verify_every"} if settings.verify_every else {}
    if settings.is_parts:
        return {"terms": "", "derivative": "", "next_gradient": ""} | found
    found |= {"hooks": ""}
    if settings.wants_loss_term:
        found["derivative"] = f"credit={settings.credit}"
    if settings.scope_pass:
        found["scope_pass"] = "scope_pass=true"
    return found


# fmt: off
_COLUMNS = (
    Column("influence", "float32", "token",
           "change of the token's own term of the objective by what this mini-batch's gradient contributes to the "
           "optimizer step; " + SIGN_OF_PARTS, unit="nats", is_signed=True,
           channel="Influence", adds_up=True, valid=captured),
    Column("influence_own", "float32", "token",
           "the same by what the gradient of the token's own group contributes: its influence on its own prompt; NaN "
           "where the group was not measured", unit="nats", is_signed=True, heading="own prompt",
           channel="Influence on own prompt", adds_up=True, valid=captured),
    Column("log_prob_before", "float32", "token",
           "its log-prob before the optimizer step; NaN where the group was not measured", unit="nats",
           heading="before"),
    Column("log_prob_after", "float32", "token", "its log-prob after the optimizer step", unit="nats",
           heading="after"),
    Column("log_prob_change", "float32", "token",
           "change of its log-prob by the whole optimizer step, measured", unit="nats", is_signed=True,
           channel="Log-prob change", adds_up=True, derived=log_prob_change),
    Column("influence_position", "float32", "token",
           "score from captured factors by position credit: all that flows through its position; " + SIGN_STATEMENT,
           unit="influence", is_signed=True, heading="infl. (pos.)",
           channel="Influence", adds_up=True, valid=captured),
    Column("influence_loss_term", "float32", "token",
           "score from captured factors by loss-term credit: its own term of the objective only; " + SIGN_STATEMENT,
           unit="influence", is_signed=True, heading="infl. (term)",
           channel="Influence", adds_up=True, valid=captured),
    Column("no_step", "bool", "token", "its step is zero, as that of a clipped token is: training passes over it",
           channel="Clip mask"),
    Column("captured", "bool", "token", "it has a score; where False, influence means nothing"),
    Column("loss_weight", "float64", "response",
           "what the loss multiplies the response's terms by: the normaliser of the mini-batch", heading="weight"),
    Column("prompt_influence", "float32", "response",
           "sum of the position-credit scores at its prompt positions", unit="influence"),
    Column("objective_change", "float32", "group",
           "measured change of the group's objective by the optimizer step; NaN where the group was not measured",
           unit="nats", is_signed=True),
    Column("change_by_batch", "float32", "group", "the part of it by this mini-batch's gradient: the sum of the "
           "influence of its tokens", unit="nats", is_signed=True),
    Column("change_by_own", "float32", "group", "the part of that by the group's own tokens", unit="nats",
           is_signed=True),
    Column("change_by_momentum", "float32", "group",
           "the part by momentum and weight decay, without this mini-batch's gradient", unit="nats", is_signed=True),
)
# fmt: on

RECORD = InstrumentRecord(
    name=INFLUENCE_TRACE,
    label="Influence trace",
    meaning="influence of every token of the traced responses, and why the other groups were skipped",
    switch="trainer.influence_trace.enable=true",
    required=(*EVERY_KIND, "group_status", "accepted", "selection", "optimizer_step", "captured"),
    optional=(
        *EXPECTED,
        *REWARD_PARTS,
        *("advantage", "prompt_influence", "first_wrong"),
        *("entropy", "log_prob", "sampler_log_prob", "ratio"),
        *PAIRWISE,
    ),
    one_of=INFLUENCE_SCORES,
    brings=_COLUMNS,
    meta={
        **RUN_META,
        "unit": "of the scores: nats; influence in files from captured factors",
        "updates": "each optimizer step: optimizer_step (its number), part (change of the objective by the gradient of "
        "its mini-batch), learning_rate, second_moment (state_with_batch, batch_gradient where Adam's state was empty, "
        "none)",
        "own_gradients": "how many directions for influence_own came from gradients that training's passes left (kept) "
        "and from passes of their own (recomputed)",
        "alternatives": "strongest tokens of measured groups: row, token (its index), gained (the tokens that gained "
        "most at its place: id, probability before and after the step)",
        "credit": "list of the credits of scores from captured factors: loss_term, position",
        "pairwise_credit": "which credit the pairwise blocks hold, in files from captured factors",
        "target": "what the score is about: the contrast of mean log-probs, or of the output function",
        "geometry": "what lies between the two gradients: the optimizer's preconditioner, nothing, a Hessian",
        "second_moment_loss_term": "where the optimizer's second moment came from, for loss-term scores",
        "second_moment_backward": "where it came from, for scores of the backward pass",
        "hessian_mode": "optimizer, identity or inverse",
        "hessian_source": "response or token",
        "contrastive_agg": "sum, mean or advantage",
        "accepted_rejected_scope": "per_prompt or all_selected",
        "mini_batches": "scored one by one, each at its own weights; all_selected compares within each",
        "scope_pass": "the whole step was scored at its first weights, in passes of its own",
        "output_function": "the objective whose gradients are traced",
        "exclude_self_response": "a token's own response is left out of its score",
        "attributed": "digest of model and settings, where `gradtrace attribute` made the scores",
        "model": "the model that it scored with",
        "optimizer_state": "where it had the optimizer's second moment from",
        "captures": "module → how often its hooks captured, forward and backward, in the last mini-batch",
        "empty": "why the file has no responses, where it has none",
        "sign": SIGN_STATEMENT,
    },
    page=None,
)

INSTRUMENT = register(
    Instrument(
        InfluenceTraceConfig,
        later("gradtrace.instruments.influence.reporter:InfluenceReporter"),
        later("gradtrace.instruments.influence.observer:influence_observer"),
        RECORD,
        needs=_needs,
        with_traces=True,
    )
)
