"""From rows of a `RolloutBatch` to model inputs, in pieces that fit a token budget.

Three layouts, with the same gradients:
- padded: one response per input row, its prompt before it, padding on the right. Causal attention never looks
  right, so no mask is needed and attention takes its fast path.
- packed: responses, each with its prompt, behind one another in a single row; no padding.
- shared: the same, with the prompt of a group once, for all its responses. Of a prompt's positions, a backward pass
  then knows the sum over the responses alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.policy.attention import Packing, Rectangle

InputLayout = Literal["padded", "packed", "shared"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward/backward pass: r responses of a batch as B model rows of S positions, with N response tokens that
    the policy wrote."""

    rows: Tensor
    """long[r]: their rows in the `RolloutBatch`."""
    input_ids: Tensor
    """long[B, S]."""
    position_ids: Tensor | None
    """long[1, S] when packed; None when padded (0, 1, 2 … in every row)."""
    packing: Packing | None
    """Who attends to whom, when packed."""
    response: Tensor
    """`RolloutBatch` row of each input row, long[B], or of each position when packed, long[1, S]; −1 where a prompt
    is shared."""
    tokens: Tensor
    """bool[B, S]: True where `input_ids` holds a response token that the policy wrote."""
    logit_positions: Tensor
    """long[N]: flat positions (b·S + s) whose logits predict `targets`; lm_head runs on these alone."""
    mask: Tensor
    """bool[r, T]: the responses' loss mask, trimmed to the longest of them."""
    targets: Tensor
    """long[N]: the response tokens that the policy wrote, row by row."""
    prompt_rows: Tensor | None = field(default=None, kw_only=True)
    """long[1, S], where prompts are shared: at every position the first of the rows that share its prompt. The last
    tokens of responses are not in `input_ids` then."""

    @property
    def shares_prompts(self) -> bool:
        return self.prompt_rows is not None

    def column(self, batch: RolloutBatch, name: str, device: torch.device) -> Any:
        """Column [R, T] of the whole batch → [r, T] of this micro-batch; None if it is not set."""
        values: Tensor | None = getattr(batch, name)
        return None if values is None else values[self.rows, : self.mask.shape[1]].to(device)

    def unflatten(self, values: Tensor) -> Tensor:
        """[N] in the order of `targets` → [r, T], zero outside the mask; differentiable."""
        if values.numel() == self.mask.numel():
            return values.view(self.mask.shape)
        mask = self.mask.to(values.device)
        return torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values)

    def to(self, device: torch.device) -> MicroBatch:
        if device == self.input_ids.device:
            return self
        moved: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            column = getattr(self, name)
            moved[name] = column.to(device) if isinstance(column, Tensor | Packing) else column
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
        """long[R]: the length of each sequence, prompt and response."""
        return self.prompt_lengths + self.response_lengths

    def micro_batch(self, rows: Tensor, layout: InputLayout) -> MicroBatch:
        return {"padded": self.padded, "packed": self.packed, "shared": self.shared}[layout](rows)

    def padded(self, rows: Tensor) -> MicroBatch:
        """One input row for each of `rows`."""
        ids, _, in_response = self._rectangle(rows)
        return self._micro_batch(rows, ids, self._written(rows, in_response), response=rows)

    def packed(self, rows: Tensor) -> MicroBatch:
        """One input row for all of `rows`, without padding."""
        ids, in_prompt, in_response = self._rectangle(rows)
        real = in_prompt | in_response
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        return self._micro_batch(
            rows,
            ids[real][None],
            self._written(rows, in_response)[real][None],
            response=rows.repeat_interleave(self.lengths[rows])[None],
            position_ids=positions[real][None],
            packing=Packing(Rectangle.of(self.lengths[rows])),
        )

    def shared(self, rows: Tensor) -> MicroBatch:
        """The rows packed, with each prompt once: first the prompts without their last tokens, then for each row that
        last token and the response without its own last one, which predicts nothing. So every position that predicts a
        token belongs to one response, and its gradient there is that response's own."""
        # Rows of a group stand together; in this order each prompt is handed out to the rows after the last one's.
        groups, prompt_of = self.batch.group[rows].unique_consecutive(return_inverse=True)
        prompts = self.prompts[groups]
        shared_lengths = torch.tensor([len(self.batch.prompts[group]) - 1 for group in groups.tolist()])
        last_tokens = prompts.gather(1, shared_lengths[:, None])[prompt_of]
        own = torch.cat([last_tokens, self.batch.responses[rows]], dim=1)
        own_lengths = self.response_lengths[rows]
        in_prompt = torch.arange(prompts.shape[1]) < shared_lengths[:, None]
        in_own = torch.arange(own.shape[1]) < own_lengths[:, None]
        prompt_positions = torch.arange(prompts.shape[1]).expand(in_prompt.shape)[in_prompt]
        own_positions = (shared_lengths[prompt_of, None] + torch.arange(own.shape[1]))[in_own]
        border = int(shared_lengths.sum())

        mask = self._mask(rows)
        starts = border + own_lengths.cumsum(0) - own_lengths
        predicted_at = starts[:, None] + torch.arange(mask.shape[1])
        owner = torch.cat([torch.full((border,), -1), rows.repeat_interleave(own_lengths)])
        first = rows[torch.cat([torch.ones(1, dtype=torch.bool), prompt_of.diff() > 0])]
        prompt_rows = torch.cat(
            [first.repeat_interleave(shared_lengths), first[prompt_of].repeat_interleave(own_lengths)]
        )
        written = torch.cat([torch.zeros(len(rows), 1, dtype=torch.bool), mask], dim=1)
        sequences = Rectangle.of(own_lengths)
        return MicroBatch(
            rows=rows,
            input_ids=torch.cat([prompts[in_prompt], own[in_own]])[None],
            position_ids=torch.cat([prompt_positions, own_positions])[None],
            packing=Packing(sequences, Rectangle.of(shared_lengths), prompt_of) if border else Packing(sequences),
            response=owner[None],
            tokens=torch.cat([torch.zeros(border, dtype=torch.bool), written[in_own[:, : written.shape[1]]]])[None],
            logit_positions=predicted_at[mask],
            mask=mask,
            targets=self.batch.responses[rows, : mask.shape[1]][mask],
            prompt_rows=prompt_rows[None],
        )

    def _micro_batch(
        self,
        rows: Tensor,
        ids: Tensor,
        tokens: Tensor,
        response: Tensor,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
    ) -> MicroBatch:
        return MicroBatch(
            rows=rows,
            input_ids=ids,
            position_ids=position_ids,
            packing=packing,
            response=response,
            tokens=tokens,
            logit_positions=tokens.flatten().nonzero().squeeze(-1) - 1,
            mask=self._mask(rows),
            targets=ids[tokens],
        )

    def _mask(self, rows: Tensor) -> Tensor:
        return self.batch.response_mask[rows, : int(self.response_lengths[rows].max())]

    def _written(self, rows: Tensor, in_response: Tensor) -> Tensor:
        """bool[r, S]: where the rectangle holds tokens that the policy wrote."""
        found = torch.zeros_like(in_response)
        found[in_response] = self.batch.response_mask[rows][self.batch.present[rows]]
        return found

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
        ids[in_response] = self.batch.responses[rows][self.batch.present[rows]]
        return ids, in_prompt, in_response


class MicroBatches:
    """Cuts rows of one batch into model inputs of one layout: padded, packed or shared."""

    def __init__(self, batch: RolloutBatch, token_budget: int, layout: InputLayout = "padded") -> None:
        self.sequences = Sequences.of(batch)
        self.token_budget = token_budget
        self.layout = layout

    def laid_out(self, layout: InputLayout) -> MicroBatches:
        """The same, in another layout."""
        return MicroBatches(self.sequences.batch, self.token_budget, layout)

    def with_prompts_apart(self) -> MicroBatches:
        """The same, in a layout in which every response has its prompt to itself."""
        if self.layout != "shared":
            return self
        return self.laid_out("packed" if padding_share(self.sequences.batch) > WORTH_PACKING else "padded")

    def __call__(self, rows: Tensor) -> Iterator[MicroBatch]:
        for part in split_rows(self.sequences, rows, self.token_budget, self.layout):
            yield self.sequences.micro_batch(part, self.layout)


WORTH_PACKING = 0.1
"""Share of padding above which packing pays for its rearranging."""
WORTH_SHARING = 0.2
"""Share of all tokens that sharing prompts must save, to pay for an attention that has no plain causal mask."""


def padding_share(batch: RolloutBatch) -> float:
    """The share of padding if all rows of the batch were padded to the longest."""
    lengths = batch.prompt_lengths + batch.response_lengths
    return 1 - float(lengths.sum()) / (len(lengths) * int(lengths.max()))


def shared_share(batch: RolloutBatch) -> float:
    """The share of all prompt and response tokens that need not be computed where prompts are shared."""
    tokens = float((batch.prompt_lengths + batch.response_lengths).sum())
    used = batch.group.unique().tolist()
    shared = sum(len(batch.prompts[group]) - 1 for group in used) + float(batch.response_lengths.sum())
    return 1 - shared / tokens


def split_rows(sequences: Sequences, rows: Tensor, token_budget: int, layout: InputLayout) -> list[Tensor]:
    """`rows` in parts of at most `token_budget` tokens (padding counted) each; a part has at least one row.

    A group stays in one part where it fits: scores that compare the responses of a group can then be computed
    inside the backward pass. Long groups go together, so that short ones are not padded up to them.
    """
    # Plain numbers: tensor operations on a group at a time would take longer than a small model's forward pass.
    prompts = [len(prompt) for prompt in sequences.batch.prompts]
    lengths = sequences.response_lengths.tolist()
    members: dict[int, list[int]] = {}
    for row, group in zip(rows.tolist(), sequences.batch.group[rows].tolist(), strict=True):
        members.setdefault(group, []).append(row)

    def size_of(group: int, some: list[int]) -> Size:
        return Size.of(group, prompts[group], [lengths[row] for row in some])

    sizes = {group: size_of(group, members[group]) for group in sorted(members)}
    parts: list[list[int]] = [[]]
    current = Size()
    for group in sorted(sizes, key=lambda group: sizes[group].longest, reverse=True):
        fits = sizes[group].tokens(layout) <= token_budget
        for piece in [members[group]] if fits else [[row] for row in members[group]]:
            joined = current.joined(size_of(group, piece))
            if parts[-1] and joined.tokens(layout) > token_budget:
                parts.append([])
                joined = size_of(group, piece)
            parts[-1].extend(piece)
            current = joined
    return [torch.tensor(part) for part in parts if part]


@dataclass(frozen=True)
class Size:
    """The numbers that decide how many tokens some rows take."""

    rows: int = 0
    longest: int = 0
    responses: int = 0
    """Tokens of the responses."""
    prompts: int = 0
    """Tokens of the prompts, one for each row."""
    shared_prompts: int = 0
    """Tokens of the prompts, one for each group."""
    last_group: int = -1

    @staticmethod
    def of(group: int, prompt: int, responses: list[int]) -> Size:
        """The size of rows of one group, from the lengths of their prompt and of each response."""
        rows = len(responses)
        return Size(rows, prompt + max(responses), sum(responses), prompt * rows, prompt, group)

    def joined(self, later: Size) -> Size:
        return Size(
            self.rows + later.rows,
            max(self.longest, later.longest),
            self.responses + later.responses,
            self.prompts + later.prompts,
            self.shared_prompts + (later.shared_prompts if later.last_group != self.last_group else 0),
            later.last_group,
        )

    def tokens(self, layout: InputLayout) -> int:
        """How many tokens the rows take, padding counted."""
        if layout == "padded":
            return self.rows * self.longest
        return self.responses + (self.prompts if layout == "packed" else self.shared_prompts)
