"""The record of the influence trace."""

from __future__ import annotations

from gradtrace.trace.kinds.shared import EVERY_KIND, EXPECTED, RUN_META, SIGN_STATEMENT
from gradtrace.trace.record import Column, InstrumentRecord, register_instrument

INFLUENCE_TRACE = "influence_trace"

PAIRWISE = ("pairwise_member_offsets", "pairwise_member", "pairwise_offsets", "pairwise")
"""The effect of tokens on single responses: these columns come together."""

# fmt: off
_COLUMNS = (
    Column("prompt_influence", "float32", "response",
           "sum of the position-credit scores at its prompt positions", unit="influence"),
    Column("influence_position", "float32", "token",
           "score by position credit: all that flows through its position; " + SIGN_STATEMENT,
           unit="influence", ragged_by="token_offsets", is_signed=True, heading="infl. (pos.)"),
    Column("influence_loss_term", "float32", "token",
           "score by loss-term credit: its own term of the objective only; " + SIGN_STATEMENT,
           unit="influence", ragged_by="token_offsets", is_signed=True, heading="infl. (term)"),
    Column("captured", "bool", "token", "its gradient was captured; where False, influence means nothing",
           ragged_by="token_offsets"),
    Column("pairwise_member_offsets", "int64", "response",
           "where each response's list begins in pairwise_member", is_offsets=True),
    Column("pairwise_member", "int32", "pairwise", "responses that the columns of a block stand for",
           ragged_by="pairwise_member_offsets"),
    Column("pairwise_offsets", "int64", "response", "where each response's block begins in pairwise",
           is_offsets=True),
    Column("pairwise", "float32", "pairwise",
           "effect of token t on response m, row-major [T_r, n_r]; meta has its pairwise_credit",
           unit="influence", ragged_by="pairwise_offsets"),
)
# fmt: on

register_instrument(
    InstrumentRecord(
        name=INFLUENCE_TRACE,
        label="Influence trace",
        meaning="influence of every token of the traced responses, and why the other groups were skipped",
        switch="trainer.influence_trace.enable=true",
        required=(*EVERY_KIND, "group_status", "accepted", "selection", "optimizer_step", "captured"),
        optional=(
            *EXPECTED,
            *("advantage", "prompt_influence", "first_wrong"),
            *("entropy", "log_prob", "influence_position", "influence_loss_term"),
            *PAIRWISE,
        ),
        one_of=("influence_position", "influence_loss_term"),
        brings=_COLUMNS,
        meta={
            **RUN_META,
            "credit": "list of the credits in this file: position, loss_term",
            "pairwise_credit": "which credit the pairwise blocks hold",
            "hessian_mode": "identity or inverse",
            "hessian_source": "response or token",
            "contrastive_agg": "sum, mean or advantage",
            "accepted_rejected_scope": "per_prompt or all_selected",
            "output_function": "the objective whose gradients are traced",
            "exclude_self_response": "a token's own response is left out of its score",
            "sign": SIGN_STATEMENT,
        },
        page=None,
    )
)
