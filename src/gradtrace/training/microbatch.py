"""From rows of a `RolloutBatch` to model inputs, in pieces that fit a token budget.

Two layouts, with the same gradients:
- padded: one response per input row, its prompt before it, padding on the right. Causal attention never looks
  right, so no mask is needed and attention takes its fast path.
- packed: responses behind one another in a single row, told apart by position ids that start again at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward/backward pass: r responses of a batch as B model rows of S positions, N response tokens."""

    rows: Tensor
    """long[r]: their rows in the `RolloutBatch`."""
    input_ids: Tensor
    """long[B, S]."""
    position_ids: Tensor | None
    """long[1, S] when packed; None when padded (0, 1, 2 … in every row)."""
    response: Tensor
    """`RolloutBatch` row of each input row, long[B], or of each position when packed, long[1, S]."""
    tokens: Tensor
    """bool[B, S]: True where `input_ids` holds a response token."""
    mask: Tensor
    """bool[r, T]: the responses' mask, trimmed to the longest of them."""
    targets: Tensor
    """long[N]: the response tokens, row by row."""

    @cached_property
    def logit_positions(self) -> Tensor:
        """long[N]: flat positions (b·S + s) whose logits predict `targets`; lm_head runs on these alone."""
        return self.tokens.flatten().nonzero().squeeze(-1) - 1

    @property
    def is_packed(self) -> bool:
        return self.position_ids is not None

    def column(self, batch: RolloutBatch, name: str, device: torch.device) -> Any:
        """Column [R, T] of the whole batch → [r, T] of this micro-batch; None if it is not set."""
        values: Tensor | None = getattr(batch, name)
        return None if values is None else values[self.rows, : self.mask.shape[1]].to(device)

    def unflatten(self, values: Tensor) -> Tensor:
        """[N] in the order of `targets` → [r, T], zero outside the mask; differentiable."""
        if values.numel() == self.mask.numel():
            return values.view(self.mask.shape)
        return torch.zeros_like(self.mask, dtype=values.dtype).masked_scatter(self.mask, values)

    def to(self, device: torch.device) -> MicroBatch:
        if device == self.input_ids.device:
            return self
        moved: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            column = getattr(self, name)
            moved[name] = None if column is None else column.to(device)
        return MicroBatch(**moved)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Prompt + response of every row of a batch, in tensors that micro-batches are cut from."""

    batch: RolloutBatch
    prompts: Tensor
    """long[G, P], right-padded."""
    prompt_lengths: Tensor
    """long[R]."""
    response_lengths: Tensor
    """long[R]."""

    @staticmethod
    def of(batch: RolloutBatch) -> Sequences:
        longest = max(len(prompt) for prompt in batch.prompts)
        padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in batch.prompts])
        return Sequences(batch, padded, batch.prompt_lengths, batch.response_lengths)

    @property
    def lengths(self) -> Tensor:
        """long[R]: prompt and response."""
        return self.prompt_lengths + self.response_lengths

    def padded(self, rows: Tensor) -> MicroBatch:
        """One input row for each of `rows`."""
        ids, _, in_response = self._rectangle(rows)
        mask = self.batch.response_mask[rows, : int(self.response_lengths[rows].max())]
        return MicroBatch(
            rows=rows,
            input_ids=ids,
            position_ids=None,
            response=rows,
            tokens=in_response,
            mask=mask,
            targets=ids[in_response],
        )

    def packed(self, rows: Tensor) -> MicroBatch:
        """One input row for all of `rows`, without padding."""
        ids, in_prompt, in_response = self._rectangle(rows)
        real = in_prompt | in_response
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        mask = self.batch.response_mask[rows, : int(self.response_lengths[rows].max())]
        return MicroBatch(
            rows=rows,
            input_ids=ids[real][None],
            position_ids=positions[real][None],
            response=rows.repeat_interleave(self.lengths[rows])[None],
            tokens=in_response[real][None],
            mask=mask,
            targets=ids[in_response],
        )

    def _rectangle(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids long[r, S], padded on the right, and where the prompt and the response are, bool[r, S]."""
        prompt_lengths = self.prompt_lengths[rows, None]
        ends = self.lengths[rows, None]
        columns = torch.arange(int(ends.max()))
        in_prompt = columns < prompt_lengths
        in_response = (columns >= prompt_lengths) & (columns < ends)
        ids = torch.zeros(in_prompt.shape, dtype=torch.long)
        prompts = self.prompts[self.batch.group[rows]]
        # Selections go row by row on both sides, so a row's tokens land in that row, in order.
        ids[in_prompt] = prompts[torch.arange(prompts.shape[1]) < prompt_lengths]
        ids[in_response] = self.batch.responses[rows][self.batch.response_mask[rows]]
        return ids, in_prompt, in_response


def split_rows(sequences: Sequences, rows: Tensor, token_budget: int, packed: bool = False) -> list[Tensor]:
    """`rows` in parts of at most `token_budget` tokens (padding counted) each; a part has at least one row.

    A group stays in one part where it fits: scores that compare the responses of a group can then be computed
    inside the backward pass. Long groups go together, so that short ones are not padded up to them.
    """
    lengths = sequences.lengths
    groups = sequences.batch.group[rows]
    members = [rows[groups == group] for group in groups.unique()]
    members.sort(key=lambda group_rows: int(lengths[group_rows].max()), reverse=True)

    def cost(part: list[Tensor]) -> int:
        joined = lengths[torch.cat(part)]
        return int(joined.sum()) if packed else len(joined) * int(joined.max())

    parts: list[list[Tensor]] = []
    current: list[Tensor] = []
    for group_rows in members:
        fits = cost([group_rows]) <= token_budget
        for piece in [group_rows] if fits else list(group_rows.split(1)):
            if current and cost([*current, piece]) > token_budget:
                parts.append(current)
                current = []
            current.append(piece)
    if current:
        parts.append(current)
    return [torch.cat(part) for part in parts]
