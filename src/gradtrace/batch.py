"""`RolloutBatch`: the one type that travels from rollout to trace and gains columns on the way.

A *group* is one prompt with its n responses. Shapes below use G groups, R responses and T, the length
of the longest response in this batch. Token columns are right-padded; `response_mask` is the loss mask: it says
which tokens the policy wrote. In a response of several turns others stand between them (a tool's result, a user's
words, a template), which `response_lengths` counts and `segments` describes; they are shown and never scored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.segments import Segment, segments_by_mask

TOKEN_COLUMNS = (
    "sampler_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "entropies",
    "values",
    "advantages",
    "returns",
    "loss_weights",
)
RESPONSE_COLUMNS = ("finished", "lengths", "rewards", "flipped", "first_version", "last_version", "kept")
COLUMNS = (*TOKEN_COLUMNS, *RESPONSE_COLUMNS, "group", "responses", "response_mask")
"""All that are tensors."""
SET_BY = {
    "rewards": "the reward (`policy.rollouts.judge`)",
    "old_log_probs": "the pass over the rollout before the update (`policy.loss.fill_statistics`)",
    "entropies": "the pass over the rollout before the update (`policy.loss.fill_statistics`)",
    "ref_log_probs": "the reference policy",
    "values": "the critic",
    "returns": "an advantage estimator with a critic",
    "advantages": "the advantage estimator (`policy.rollouts.add_advantages`)",
    "loss_weights": "a trainer that corrects for its sampler (verl's rollout correction)",
    "first_version": "a rollout engine that says which weights it sampled with",
    "last_version": "the same",
    "kept": "TracIn selection",
}
"""Who sets a column that a fresh rollout does not have."""
LISTS = ("texts", "segments", "reward_parts")
"""What there is one of for each response and is no tensor."""
OPTIONAL_COLUMNS = ("texts", "reward_parts", "flipped", *SET_BY)


class Environment(Protocol):
    """What answers the policy between its turns."""

    stop_token_ids: tuple[int, ...]
    """A turn that ends with one of these is a call; the response goes on after the reply to it."""

    def reply(self, ids: list[int]) -> tuple[list[int], str] | None:
        """The reply to a call at the end of `ids` (prompt, and the response so far), and the name of the tool that
        wrote it; None: there is none, and the response is over."""


@dataclass
class RolloutBatch:
    prompts: list[list[int]]
    """G prompts as token ids, without padding."""
    group: Tensor
    """long[R]: the index into `prompts` of each response."""
    responses: Tensor
    """long[R, T]: token ids after the prompt, the stop token included."""
    response_mask: Tensor
    """bool[R, T]: the loss mask: True where `responses` holds a token that the policy wrote. Others inside of a
    response carry no loss and have no scores."""
    finished: Tensor
    """bool[R]: ended with a stop token rather than at the length limit."""
    sampler_log_probs: Tensor
    """float[R, T]: log-probs of the sampled tokens under the distribution they were sampled from."""

    items: list[dict[str, Any]] = field(default_factory=list)
    """G task items (answer, data source …) that the reward needs; the prompt's text under "prompt"."""
    lengths: Tensor | None = None
    """long[R]: tokens of each response, whoever wrote them; None: up to the last one that the policy wrote."""
    segments: list[list[Segment]] | None = None
    """R lists: who wrote which part. None: every response is one turn of the policy, or only the mask is known."""
    texts: list[str] | None = None
    """R decoded responses."""
    rewards: Tensor | None = None
    """float[R]."""
    reward_parts: list[dict[str, float]] | None = None
    """R times the parts that a reward is the sum of, by name and before their weights; None: it is not a sum."""
    flipped: Tensor | None = None
    """bool[R]: its reward was flipped on purpose (reward.flip_probability)."""
    old_log_probs: Tensor | None = None
    """float[R, T]: log-probs under the policy before this step's first update, at the sampling temperature."""
    ref_log_probs: Tensor | None = None
    """float[R, T]: log-probs under the frozen reference policy."""
    entropies: Tensor | None = None
    """float[R, T]: entropy in nats of the full next-token distribution each token was drawn from."""
    values: Tensor | None = None
    """float[R, T]: the critic's value estimates (PPO only)."""
    advantages: Tensor | None = None
    """float[R, T]: zero outside the mask."""
    returns: Tensor | None = None
    """float[R, T]: targets of the critic (PPO only)."""
    loss_weights: Tensor | None = None
    """float[R, T]: what the loss multiplies each token's term by, beside its advantage, to correct for the sampler
    (truncated importance sampling); None: nothing."""
    first_version: Tensor | None = None
    """long[R]: training steps behind the weights that its first token was sampled with."""
    last_version: Tensor | None = None
    """long[R]: the same of its last token."""
    kept: Tensor | None = None
    """bool[R]: False for a response that selection left out of the update."""

    def __post_init__(self) -> None:
        responses, longest = self.responses.shape
        for name in TOKEN_COLUMNS + ("response_mask",):
            column = getattr(self, name)
            if column is not None and tuple(column.shape) != (responses, longest):
                raise ValueError(
                    f"{name} is {tuple(column.shape)}, the batch is {(responses, longest)}: "
                    "columns of one batch describe the same tokens"
                )
        for name in RESPONSE_COLUMNS + ("group",):
            column = getattr(self, name)
            if column is not None and tuple(column.shape) != (responses,):
                raise ValueError(f"{name} is {tuple(column.shape)}, the batch has {responses} responses")
        for name in LISTS:
            if getattr(self, name) is not None and len(getattr(self, name)) != responses:
                raise ValueError(f"{len(getattr(self, name))} {name} for {responses} responses")
        if self.lengths is not None and bool((self.response_mask & ~self.present).any()):
            raise ValueError("response_mask is True after the end of a response: lengths and mask do not agree")
        if self.items and len(self.items) != len(self.prompts):
            raise ValueError(f"{len(self.items)} task items for {len(self.prompts)} prompts")

    def __len__(self) -> int:
        return self.responses.shape[0]

    def need(self, column: str) -> Tensor:
        """A column that this stage of the step relies on; an error that says which stage sets it, if it is missing."""
        found: Tensor | None = getattr(self, column)
        if found is None:
            raise GradtraceError(
                f"the batch has no {column}: {SET_BY.get(column, 'an earlier stage of the step')} sets them, and that "
                "has not run on this batch"
            )
        return found

    @property
    def response_lengths(self) -> Tensor:
        """long[R]: tokens of each response, whoever wrote them."""
        if self.lengths is not None:
            return self.lengths
        ends = self.response_mask * torch.arange(1, self.response_mask.shape[1] + 1)
        return ends.amax(1) if ends.numel() else self.response_mask.sum(-1)

    @property
    def written_counts(self) -> Tensor:
        """long[R]: tokens of each response that the policy wrote: those that are trained and scored."""
        return self.response_mask.sum(-1)

    @property
    def present(self) -> Tensor:
        """bool[R, T]: True where `responses` holds a token, whoever wrote it."""
        return torch.arange(self.responses.shape[1]) < self.response_lengths[:, None]

    def all_segments(self) -> list[list[Segment]] | None:
        """Who wrote which part of each response, from the mask where nothing else is known; None where every
        response is one turn of the policy."""
        if self.segments is not None:
            return self.segments
        if torch.equal(self.present, self.response_mask):
            return None
        masks, lengths = self.response_mask.tolist(), self.response_lengths.tolist()
        return [segments_by_mask(mask[:length]) for mask, length in zip(masks, lengths, strict=True)]

    @property
    def response_ids(self) -> list[list[int]]:
        """The token ids of each response, whoever wrote them, without padding."""
        rows, lengths = self.responses.tolist(), self.response_lengths.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    @property
    def prompt_lengths(self) -> Tensor:
        """long[R]: the length of each *response's* prompt."""
        return torch.tensor([len(prompt) for prompt in self.prompts])[self.group]

    def columns(self) -> dict[str, Tensor]:
        """Every tensor that is set, by name, contiguous: what a file needs beside prompts, items and texts."""
        found = {name: getattr(self, name) for name in COLUMNS}
        return {name: column.contiguous() for name, column in found.items() if column is not None}

    def to_tensors(self) -> dict[str, Tensor]:
        """`columns`, and the prompts as flat `prompt_ids` with `prompt_offsets`; not items and `LISTS`."""
        lengths = torch.tensor([0, *(len(prompt) for prompt in self.prompts)])
        ids = torch.tensor([token for prompt in self.prompts for token in prompt], dtype=torch.long)
        return self.columns() | {"prompt_ids": ids, "prompt_offsets": lengths.cumsum(0)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], **more: Any) -> RolloutBatch:
        """Inverse of `to_tensors`; `more`: items and `LISTS`."""
        offsets = tensors["prompt_offsets"].tolist()
        ids = tensors["prompt_ids"].tolist()
        columns: dict[str, Any] = {name: tensors[name] for name in COLUMNS if name in tensors}
        prompts = [ids[start:end] for start, end in itertools.pairwise(offsets)]
        return RolloutBatch(prompts=prompts, **columns, **more)

    def only(self, *names: str) -> RolloutBatch:
        """A copy with these of the columns that a fresh rollout does not have, and no others."""
        return self.replace(**{name: None for name in OPTIONAL_COLUMNS if name not in names})

    def replace(self, **columns: Any) -> RolloutBatch:
        """A copy with these columns set; tensors are shared, not cloned."""
        return dataclasses.replace(self, **columns)

    def select(self, rows: Tensor) -> RolloutBatch:
        """The responses `rows` (long or bool), trimmed to their longest. Prompts and group ids stay."""
        if rows.dtype == torch.bool:
            rows = rows.nonzero().squeeze(-1)
        longest = int(self.response_lengths[rows].max()) if len(rows) else 0
        chosen: dict[str, Any] = {}
        for name in (*COLUMNS, *LISTS):
            column = getattr(self, name)
            if name in LISTS and column is not None:
                chosen[name] = [column[row] for row in rows.tolist()]
            elif column is not None:
                chosen[name] = column[rows, :longest] if column.dim() == 2 else column[rows]
        return dataclasses.replace(self, **chosen)

    @staticmethod
    def concat(batches: list[RolloutBatch], pad_id: int = 0) -> RolloutBatch:
        """Batches after one another, groups renumbered. A column must be set in all of them or in none."""
        longest = max(batch.responses.shape[1] for batch in batches)

        def joined(name: str) -> Tensor | None:
            columns = [getattr(batch, name) for batch in batches]
            if name == "lengths" and any(column is not None for column in columns):
                columns = [batch.response_lengths for batch in batches]
            missing = [column is None for column in columns]
            if all(missing):
                return None
            if any(missing):
                raise ValueError(f"column {name} is set in some of the batches only")
            if columns[0].dim() == 2:
                fill = pad_id if name == "responses" else 0
                columns = [
                    torch.nn.functional.pad(column, (0, longest - column.shape[1]), value=fill) for column in columns
                ]
            return torch.cat(columns)

        first_group = 0
        groups = []
        for batch in batches:
            groups.append(batch.group + first_group)
            first_group += len(batch.prompts)
        names = TOKEN_COLUMNS + RESPONSE_COLUMNS + ("responses", "response_mask")
        columns: dict[str, Any] = {name: joined(name) for name in names}
        for name in ("texts", "reward_parts"):
            lists = [getattr(batch, name) for batch in batches]
            if not any(own is None for own in lists):
                columns[name] = [entry for own in lists for entry in own]
        segments = [batch.all_segments() for batch in batches]
        if any(segments):
            whole = [Segment(0, 0, "assistant")]
            columns["segments"] = [
                part for own, batch in zip(segments, batches, strict=True) for part in own or [whole] * len(batch)
            ]
        return RolloutBatch(
            prompts=[prompt for batch in batches for prompt in batch.prompts],
            items=[item for batch in batches for item in batch.items],
            group=torch.cat(groups),
            **columns,
        )
