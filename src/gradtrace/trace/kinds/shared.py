"""Columns and numbers that several instruments share."""

from __future__ import annotations

import enum

from gradtrace.trace.record import Column, register_columns

SIGN_STATEMENT = "positive = a step along this token's gradient helps the accepted responses against the rejected ones"


class GroupStatus(enum.IntEnum):
    """Why a group was or was not scored."""

    SCORED = 0
    CONSTANT_REWARD = 1
    """All responses got the same reward: there is no contrast."""
    OVER_PROMPT_CAP = 2
    """The rewards differ, but `max_prompts_per_step` was reached."""
    NON_FINITE = 3
    """Gradients or scores of the group were not finite."""
    NOT_CAPTURED = 4
    """The hooks saw none of its tokens."""
    NOT_ASKED = 5
    """Scores of other groups were asked for (`gradtrace attribute --group`)."""


class Selection(enum.IntEnum):
    """Why a response was or was not selected for the trace."""

    SELECTED = 0
    CONSTANT_REWARD = 1
    OVER_PROMPT_CAP = 2
    NON_FINITE = 3
    NOT_CAPTURED = 4
    CUT_AT_TOKEN_CAP = 5
    """Traced up to `max_tokens_per_response`; later tokens have `captured` = False."""


class SegmentRole(enum.IntEnum):
    """Who wrote a segment of a response."""

    ASSISTANT = 0
    """The policy."""
    TOOL = 1
    USER = 2
    ENVIRONMENT = 3
    """Not the policy, and no more is known: a tool's result, a template."""


# fmt: off
register_columns((
    Column("format_version", "int32", "meta", "version of this layout, one number"),
    Column("meta_json", "uint8", "meta", "a JSON object as UTF-8 bytes; the record of the kind explains its keys"),

    Column("group_id", "int64", "group", "index of the group in the rollout batch"),
    Column("prompt_offsets", "int64", "group", "where each prompt begins in prompt_ids", is_offsets=True),
    Column("prompt_ids", "int32", "group", "token ids of the prompts", ragged_by="prompt_offsets"),
    Column("group_status", "uint8", "group", "scored, or why not", values=GroupStatus),
    Column("expected_offsets", "int64", "group", "where each right answer begins in expected_ids", is_offsets=True),
    Column("expected_ids", "int32", "group", "token ids of the right answer, empty where it is not known",
           ragged_by="expected_offsets"),

    Column("group", "int32", "response", "index of its group in this file", points_at="group"),
    Column("row", "int32", "response", "its row in the rollout batch, -1 = unknown"),
    Column("reward", "float32", "response", "reward of the task"),
    Column("advantage", "float32", "response", "advantage (token-level ones averaged over the response)"),
    Column("accepted", "bool", "response", "its reward is the maximum of a group whose rewards differ"),
    Column("length", "int32", "response", "number of tokens", unit="tokens"),
    Column("finished", "bool", "response", "ended with a stop token, not at the length limit"),
    Column("selection", "uint8", "response", "selected for the trace, or why not", values=Selection),
    Column("optimizer_step", "int64", "response", "optimizer steps taken before it was captured: which θ"),
    Column("first_wrong", "int32", "response", "index of its first wrong token, -1 = none or unknown"),
    Column("policy_version", "int32", "response", "training steps behind the weights that its first token was sampled "
           "with: the step's number minus 1 = on policy", heading="version"),
    Column("last_policy_version", "int32", "response", "the same of its last token", heading="last version"),
    Column("token_offsets", "int64", "response", "where each response begins in the token columns", is_offsets=True),

    Column("token_id", "int32", "token", "vocabulary id"),
    Column("entropy", "float32", "token", "entropy of the full next-token distribution it was drawn from",
           unit="nats"),
    Column("log_prob", "float32", "token", "its log-prob under the policy before this step's first update",
           unit="nats"),
    Column("sampler_log_prob", "float32", "token", "its log-prob as the sampler reported it when it drew the token",
           unit="nats", heading="sampler"),
    Column("loss_mask", "bool", "token", "the policy wrote it; where False (a tool's result, a user's words, a "
           "template) it has no loss and no scores, which are NaN; a file without it has no such tokens"),
    Column("segment_offsets", "int64", "response", "where each response begins in the segment columns",
           is_offsets=True),
    Column("segment_start", "int32", "segment", "index of its first token in the response; it ends at the next",
           ragged_by="segment_offsets"),
    Column("segment_turn", "int32", "segment", "the policy's turn that it belongs to, from 0",
           ragged_by="segment_offsets"),
    Column("segment_role", "uint8", "segment", "who wrote it", values=SegmentRole, ragged_by="segment_offsets"),
    Column("segment_tool_offsets", "int64", "segment", "where each name begins in segment_tool", is_offsets=True),
    Column("segment_tool", "uint8", "segment", "names of the tools that wrote segments, as UTF-8 bytes",
           ragged_by="segment_tool_offsets"),
    Column("reward_part_offsets", "int64", "response", "where each response begins in reward_part", is_offsets=True),
    Column("reward_part", "float32", "reward_part", "a part of the reward, before its weight in the sum",
           ragged_by="reward_part_offsets"),
    Column("reward_part_name_offsets", "int64", "reward_part", "where each name begins in reward_part_name",
           is_offsets=True),
    Column("reward_part_name", "uint8", "reward_part", "names of the parts as UTF-8 bytes",
           ragged_by="reward_part_name_offsets"),
    Column("ratio", "float32", "token",
           "its probability under the trainer's policy, before the first update, over the "
           "sampler's; 1 = they agree"),
))
# fmt: on

EVERY_KIND = (
    *("group_id", "prompt_offsets", "prompt_ids"),
    *("group", "row", "reward", "length", "finished"),
    *("token_offsets", "token_id"),
)
"""What every step file has: prompts, responses and their tokens."""
EXPECTED = ("expected_offsets", "expected_ids")
REWARD_PARTS = ("reward_part_offsets", "reward_part", "reward_part_name_offsets", "reward_part_name")
"""What files of rollouts have where a reward is the sum of several."""

RUN_META = {
    "step": "training step",
    "temperature": "sampling temperature; entropy and log_prob are taken at it",
    "task": "name of the task",
}
"""Keys of `meta_json` in every kind."""
