"""The record of the influence trace."""

from __future__ import annotations

import enum

from gradtrace.trace.kinds.shared import EVERY_KIND, EXPECTED, REWARD_PARTS, RUN_META, SIGN_STATEMENT
from gradtrace.trace.record import Column, InstrumentRecord, register_instrument

INFLUENCE_TRACE = "influence_trace"


class Credit(enum.IntEnum):
    """What a response's score of a token counts."""

    LOSS_TERM = 0
    """The token's own term of the loss, in all traced weights."""
    TAIL = 1
    """The same, in the last block's weights, where a position feeds no later one: it costs no extra pass."""
    POSITION = 2
    """All that flows through the token's position, later tokens' terms included."""


SCORE_OF_CREDIT = {
    Credit.LOSS_TERM: "influence_loss_term",
    Credit.TAIL: "influence_tail",
    Credit.POSITION: "influence_position",
}
"""Where a response's scores of each credit stand. Where it has none of that credit, the column holds zeros."""
SCORES = tuple(SCORE_OF_CREDIT.values())

PAIRWISE = ("pairwise_member_offsets", "pairwise_member", "pairwise_offsets", "pairwise")
"""The effect of tokens on single responses: these columns come together."""

# fmt: off
_COLUMNS = (
    Column("credit", "uint8", "response", "the best credit that its scores have; files without it have one credit",
           values=Credit),
    Column("prompt_influence", "float32", "response",
           "sum of the position-credit scores at its prompt positions", unit="influence"),
    Column("influence_position", "float32", "token",
           "score by position credit: all that flows through its position; " + SIGN_STATEMENT, unit="influence",
           is_signed=True, heading="infl. (pos.)"),
    Column("influence_loss_term", "float32", "token",
           "score by loss-term credit: its own term of the objective only; " + SIGN_STATEMENT, unit="influence",
           is_signed=True, heading="infl. (term)"),
    Column("influence_tail", "float32", "token",
           "score by its own term in the last block's weights; " + SIGN_STATEMENT, unit="influence", is_signed=True,
           heading="infl. (tail)"),
    Column("influence_likelier", "float32", "token",
           "score of a step that makes the token likelier, whatever training does with it; " + SIGN_STATEMENT,
           unit="influence", is_signed=True, heading="infl. (likelier)"),
    Column("no_step", "bool", "token", "its step is zero, as that of a clipped token is: training passes over it"),
    Column("captured", "bool", "token", "its gradient was captured; where False, influence means nothing"),
    Column("pairwise_member_offsets", "int64", "response",
           "where each response's list begins in pairwise_member", is_offsets=True),
    Column("pairwise_member", "int32", "pairwise", "responses that the columns of a block stand for",
           ragged_by="pairwise_member_offsets", points_at="response"),
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
            *REWARD_PARTS,
            *("advantage", "prompt_influence", "first_wrong"),
            *("entropy", "log_prob", "sampler_log_prob", "ratio", "credit", "influence_likelier", "no_step"),
            *SCORES,
            *PAIRWISE,
        ),
        one_of=SCORES,
        brings=_COLUMNS,
        meta={
            **RUN_META,
            "credit": "list of the credits in this file: loss_term, tail, position",
            "pairwise_credit": "which credit the pairwise blocks hold",
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
)
