"""Blame: the squared norm of a step's gradient, shared out exactly to responses and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace.attribution.config import number
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.registry import later, register
from gradtrace.instruments.settings import TraceConfig
from gradtrace.trace.columns import EVERY_KIND, RUN_META, Column, InstrumentRecord

BLAME = "blame"


@dataclass
class BlameConfig(TraceConfig):
    enable: bool = False
    """Share the squared norm of a step's gradient out to responses and tokens; `trainer.traces` turns it on."""
    write_every: int = number(5, minimum=1)
    """Steps between those whose ‖g‖² is decomposed, which takes about as long as the update itself."""
    unusual_ratio: float = 3.0
    """And in whatever step the gradient's norm is so many times its median of late (0 = not)."""
    sketch_dim: int = number(16, minimum=1)
    """Either side of the sketch that is kept of a layer's gradient for each response, to tell who opposes whom."""

    def check_run(self, path: str, responses: int, dropout: float) -> None:
        if dropout:
            raise GradtraceError(
                f"{path} runs the model once more, and with model.lora.dropout that would be another model than the "
                f"one whose gradient it explains: set model.lora.dropout=0 or {path}.enable=false."
            )


# fmt: off
_COLUMNS = (
    Column("grad_share", "float32", "response",
           "its share of ‖g‖² of its optimizer step, ⟨g_r, g⟩/‖g‖², over all weights; shares add up to 1; negative = "
           "it pulled against the rest", is_signed=True, heading="share"),
    Column("grad_norm", "float32", "response",
           "‖g_r‖, the norm of its own gradient in the linear layers", heading="‖g_r‖"),
    Column("product_self", "float32", "response",
           "⟨g_r, g_r⟩/‖g‖² by sketched gradients of the linear layers", heading="self"),
    Column("product_siblings", "float32", "response",
           "Σ⟨g_r, g_s⟩/‖g‖² over the other responses to its prompt (sketched); negative = they undo its step",
           is_signed=True, heading="siblings"),
    Column("product_others", "float32", "response",
           "the same over responses to other prompts in its optimizer step", is_signed=True, heading="others"),
    Column("opponent", "int32", "response",
           "the response in this file whose gradient opposes its own most, -1 = none does"),
    Column("opponent_product", "float32", "response",
           "⟨g_r, g_s⟩/‖g‖² with that opponent s (sketched)", is_signed=True, heading="opponent's"),
    Column("token_grad_share", "float32", "token",
           "its own loss term's share of ‖g‖² of its optimizer step; sums to the response's share", is_signed=True,
           heading="share", channel="Gradient share", adds_up=True),
    Column("push", "float32", "token",
           "change of its log-prob, to first order and per unit of learning rate, by one plain gradient step on the "
           "whole mini-batch; against the sign of its advantage = other tokens outweighed it", unit="nats",
           is_signed=True),
    Column("reference_gap", "float32", "token", "its log-prob under the policy minus that under the reference",
           unit="nats", is_signed=True, heading="to reference", channel="KL"),
)
# fmt: on

RECORD = InstrumentRecord(
    name=BLAME,
    label="Blame",
    meaning="who made the step's gradient: each response's and token's share of its squared norm",
    switch="trainer.blame.enable=true",
    required=(
        *EVERY_KIND,
        *("accepted", "optimizer_step", "grad_share", "grad_norm", "token_grad_share", "push"),
    ),
    optional=(
        *("advantage", "product_self", "product_siblings", "product_others"),
        *("opponent", "opponent_product", "reference_gap"),
    ),
    brings=_COLUMNS,
    meta={
        **RUN_META,
        "updates": "list, one for each optimizer step: number, grad_norm before clipping, clip_factor, residual (1 "
        "minus the sum of shares), norm_coverage (share of ‖g‖² in the layers of grad_norm), and what the "
        "optimizer's move is made of: from_batch, from_momentum, from_decay, adding up to 1",
        "skipped": "optimizer steps whose gradient was not finite, so that none was made; there are norms only",
    },
)

INSTRUMENT = register(
    Instrument(
        BlameConfig,
        later("gradtrace.instruments.blame.reporter:BlameReporter"),
        later("gradtrace.instruments.blame.observer:BlameObserver"),
        RECORD,
        needs=("hooks", "token_terms", "next_gradient", "derivative"),
        with_traces=True,
    )
)
