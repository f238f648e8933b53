"""Where the responses and their tokens sit in one (micro-)batch of model inputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradtrace.attribution.errors import AttributionError


def chosen_rows(rows: Tensor, device: torch.device) -> slice | Tensor:
    """An index for these rows: a slice where they follow one another, so that nothing is copied."""
    if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1 and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows.to(device)


@dataclass(eq=False)
class Layout:
    """One micro-batch of B rows × S positions. `flat` means an index into B·S positions."""

    response: Tensor
    """long[B·S]: the response each position belongs to, its prompt's positions included; −1 = ignore."""
    token_position: Tensor
    """long[N]: for each response token the flat position *whose logits predict it*, one before its own."""
    token_response: Tensor
    """long[N]: the response of each of those tokens; tokens of a response are in order."""
    shape: tuple[int, int]
    row_response: Tensor | None
    """long[B] when every row holds one response (padded batches); None when rows are packed."""
    scale: float | Tensor
    """What the captured gradients are multiplied with, to undo a normaliser of the loss: one factor, or one for
    each flat position."""
    kept_rows: Tensor | None = None
    """long[B]: the rows of the model's batch that this layout describes, where others were left out."""
    full_shape: tuple[int, int] | None = None
    """Of the model's batch, then."""

    @staticmethod
    def of(response: Tensor, tokens: Tensor, scale: float | Tensor = 1.0, predicted_at: Tensor | None = None) -> Layout:
        """`response`: long[B], or long[B, S] for packed rows. `tokens`: bool[B, S], True at response tokens.
        `scale`: one factor, or float[R] with one for each response. `predicted_at`: the flat positions that predict the
        response tokens, where these are not those before `tokens`."""
        if tokens.dim() != 2 or tokens.dtype != torch.bool:
            raise AttributionError(
                f"tokens must be a bool[B, S] mask of response tokens, not {tokens.dtype}{list(tokens.shape)}"
            )
        # On the host: decisions are made from it, and a lookup per layer must not wait for a GPU.
        response, tokens = response.cpu(), tokens.cpu()
        batch, length = tokens.shape
        if response.dtype not in (torch.int64, torch.int32):
            raise AttributionError(f"response must hold integer response ids, not {response.dtype}")
        if tuple(response.shape) == (batch,):
            per_position = response.long()[:, None].expand(batch, length)
            row_response = response.long()
        elif tuple(response.shape) == (batch, length):
            per_position, row_response = response.long(), None
        else:
            raise AttributionError(
                f"response is {list(response.shape)} but tokens is {list(tokens.shape)}: give one id per row"
                " (long[B]) or, for packed rows, one per position (long[B, S])"
            )
        if bool((per_position < -1).any()):
            raise AttributionError("response ids are 0, 1, 2 … or −1 for rows to ignore; got a smaller one")
        if row_response is not None:
            number = Counter(response for response in row_response.tolist() if response >= 0)
            if len(number) and max(number.values()) > 1:
                twice = min(response for response in number if number[response] > 1)
                raise AttributionError(f"response {twice} stands in two rows of one batch")
        flat = per_position.reshape(-1)
        if predicted_at is not None and row_response is not None:
            raise AttributionError("predicted_at is for packed rows, where response has an id for every position")
        if predicted_at is None:
            token_position = before_tokens(per_position, tokens, packed=row_response is None)
        else:
            token_position = predicted_at.cpu()[flat[predicted_at.cpu()] >= 0]
        token_response = flat[token_position]
        order = torch.argsort(token_response, stable=True)
        if isinstance(scale, Tensor):
            scale = torch.where(flat >= 0, scale.detach().cpu()[flat.clamp(min=0)], 0.0)[:, None]
        return Layout(
            response=flat,
            token_position=token_position[order],
            token_response=token_response[order],
            shape=(batch, length),
            row_response=row_response,
            scale=scale,
        )

    @staticmethod
    def without_ignored_rows(
        response: Tensor, tokens: Tensor, scale: float | Tensor = 1.0, predicted_at: Tensor | None = None
    ) -> Layout:
        """As `of`, but rows of a padded batch with response −1 are not even looked at: factors of theirs would be
        computed for nothing."""
        full = Layout.of(response, tokens, scale, predicted_at)  # checks all of it
        if full.row_response is None or bool((full.row_response >= 0).all()):
            return full
        kept = (full.row_response >= 0).nonzero().squeeze(-1)
        layout = Layout.of(full.row_response[kept], tokens.cpu()[kept], scale)
        layout.kept_rows, layout.full_shape = kept, full.shape
        return layout

    @cached_property
    def responses(self) -> list[int]:
        """The responses of this micro-batch, ascending."""
        return [int(r) for r in self.response.unique().tolist() if r >= 0]

    @cached_property
    def token_counts(self) -> dict[int, int]:
        numbers = dict.fromkeys(self.responses, 0)
        return numbers | {response: tokens.numel() for response, tokens in self._tokens.items()}

    def positions_of(self, response: int) -> Tensor:
        """long: all flat positions of a response, prompt included."""
        if response not in self._positions:
            self._positions[response] = (self.response == response).nonzero().squeeze(-1)
        return self._positions[response]

    def tokens_of(self, response: int, limit: int = 0) -> Tensor:
        """long: flat positions that predict the response's (first `limit`) tokens, in order."""
        tokens = self._tokens.get(response, self.token_position[:0])
        return tokens[:limit] if limit else tokens

    def rows_of(self, responses: list[int]) -> Tensor:
        """long[n]: the batch rows of these responses, in a padded batch."""
        return torch.tensor([self._rows[response] for response in responses])

    def index_of(self, responses: list[int], device: torch.device) -> slice | Tensor:
        """`rows_of` as an index; the layers of a pass ask for the same one."""
        key = (*responses, device)
        if key not in self._indices:
            rows = [self._rows[response] for response in responses]
            in_turn = range(rows[0], rows[0] + len(rows)) if rows else range(0)
            follows = rows == list(in_turn)  # a slice copies nothing
            self._indices[key] = slice(in_turn.start, in_turn.stop) if follows else torch.tensor(rows, device=device)
        return self._indices[key]

    @cached_property
    def _indices(self) -> dict[tuple[object, ...], slice | Tensor]:
        return {}

    @cached_property
    def _positions(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _tokens(self) -> dict[int, Tensor]:
        found, counts = self.token_response.unique_consecutive(return_counts=True)
        return dict(zip(found.tolist(), self.token_position.split(counts.tolist()), strict=True))

    @cached_property
    def _rows(self) -> dict[int, int]:
        assert self.row_response is not None
        return {response: row for row, response in enumerate(self.row_response.tolist())}


def before_tokens(response: Tensor, tokens: Tensor, packed: bool) -> Tensor:
    """long[N]: the flat positions one before each of the `tokens`, bool[B, S], that belong to a response."""
    wanted = tokens & (response >= 0)
    if bool(wanted[:, 0].any()):
        first = int(wanted[:, 0].nonzero()[0])
        raise AttributionError(
            f"tokens[{first}, 0] is True: the first position of a row has no position before it that predicts"
            " it. The mask marks where input_ids holds response tokens, so the prompt comes first"
        )
    row, column = wanted.nonzero(as_tuple=True)
    if packed:
        stranger = response[row, column - 1] != response[row, column]
        if bool(stranger.any()):
            which = int(response[row, column][stranger][0])
            raise AttributionError(
                f"response {which} starts with a response token in a packed row: the position before it belongs"
                " to another response. Mark its prompt's positions with its id too"
            )
    return row * response.shape[1] + column - 1
