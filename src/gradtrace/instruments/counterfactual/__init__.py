"""What a token was worth: ΔV, the change of the expected reward when it was written, by sampled continuations."""

from __future__ import annotations

from gradtrace.trace.columns import EVERY_KIND, RUN_META, Column, InstrumentRecord, register_instrument

COUNTERFACTUAL = "counterfactual"

_REWARD = "reward"
# fmt: off
_COLUMNS = (
    Column("prompt_value", "float32", "group", "V(prompt): reward that the policy gets on average", unit=_REWARD),
    Column("prompt_value_stderr", "float32", "group", "standard error of prompt_value", unit=_REWARD),
    Column("delta_v", "float32", "token",
           "ΔV: V of the prefix with this token minus V of the prefix before it; NaN = not measured; "
           "positive = the token made a high reward likelier", unit=_REWARD, is_signed=True, heading="ΔV",
           adds_up=True),
    Column("delta_v_stderr", "float32", "token", "standard error of delta_v", unit=_REWARD, heading="ΔV s.e."),
    Column("value", "float32", "token", "V after this token: reward that the policy gets on average from here on",
           unit=_REWARD, heading="V"),
    Column("value_stderr", "float32", "token", "standard error of value", unit=_REWARD, heading="V s.e."),
    Column("sampling_log_prob", "float32", "token",
           "its log-prob in the distribution that continuations were drawn from (the checkpoint's)", unit="nats",
           heading="log-prob (cf)"),
    Column("continuation_response", "int32", "continuation", "the response that it leaves", points_at="response"),
    Column("continuation_start", "int32", "continuation", "how many tokens of that response stand before it",
           unit="tokens"),
    Column("continuation_reward", "float32", "continuation", "reward of the whole text, its beginning included"),
    Column("continuation_finished", "bool", "continuation", "ended with a stop token, not at the length limit"),
    Column("continuation_offsets", "int64", "continuation", "where each continuation begins in continuation_ids",
           is_offsets=True),
    Column("continuation_ids", "int32", "continuation", "token ids of the continuations",
           ragged_by="continuation_offsets"),
)
# fmt: on

RECORD = register_instrument(
    InstrumentRecord(
        name=COUNTERFACTUAL,
        label="Counterfactual",
        meaning="what each token changed about the expected reward, by sampled continuations",
        switch="gradtrace counterfactual RUN",
        required=(*EVERY_KIND, *(column.name for column in _COLUMNS)),
        optional=("accepted", "advantage", "entropy", "log_prob"),
        brings=_COLUMNS,
        meta={
            **RUN_META,
            "measured": "list, one per group: group_id, checkpoint and its step, reward, sampling, seed, samples",
        },
    )
)
