"""One backward pass: where responses and their tokens sit in it (`Layout`), and the factors that it delivers, sorted by
response (`Capture`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.layers import Block, Site

Role = Literal["both", "step", "target"]
"""What a backward pass is of: the step that tokens contribute, the target it is asked about, or one standing for
both."""
LIKE_WIDTHS = 8
"""Sides whose widths round up to the same multiple of it are filled up to one width and taken together: another few
columns of zeros cost less than another round of small operations."""
LITTLE_PADDING = 1.25
"""Responses of packed rows are multiplied side by side where filling them up to the longest takes no more than this."""


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
    """Shape [B, S] of the whole batch, where rows were left out."""

    @staticmethod
    def of(response: Tensor, tokens: Tensor, scale: float | Tensor = 1.0) -> Layout:
        """`response`: long[B], or long[B, S] for packed rows. `tokens`: bool[B, S], True at response tokens.
        `scale`: one factor, or float[R] with one for each response."""
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
        token_position = before_tokens(per_position, tokens, packed=row_response is None)
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
    def without_ignored_rows(response: Tensor, tokens: Tensor, scale: float | Tensor = 1.0) -> Layout:
        """As `of`, but without the rows of a padded batch that have response −1: nobody uses their factors."""
        full = Layout.of(response, tokens, scale)  # checks all of it
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

    def index_of(self, responses: list[int], device: torch.device) -> slice | Tensor:
        """Of the batch rows of these responses, in a padded batch; the layers of a pass ask for the same one."""
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


# ---------------------------------------------------------------- factors


@dataclass(eq=False)
class Part:
    """The factors of one call of a module: U [rows, k_out], V [rows, k_in]; or of M modules of one shape, side by side:
    [M, rows, …]."""

    u: Tensor
    v: Tensor
    positions: Tensor | None
    """long[rows]: the flat position of each row; None when the module saw every position, in order."""

    def rows_of(self, flat: Tensor, total: int) -> Tensor:
        """Rows of these flat positions (any shape); −1 for −1 and for what the module did not see."""
        if self.positions is None:
            return flat
        lookup = torch.full((total + 1,), -1, dtype=torch.long)  # the last entry answers for −1
        lookup[self.positions] = torch.arange(len(self.positions))
        return lookup[flat]


def side_by_side(parts: Sequence[Part]) -> Part:
    """One call of each of M modules that saw the same positions, [M, rows, …]."""
    first = parts[0]
    if len(parts) == 1:
        return Part(first.u[None], first.v[None], first.positions)
    return Part(_stacked([p.u for p in parts]), _stacked([p.v for p in parts]), first.positions)


def _stacked(sides: list[Tensor]) -> Tensor:
    """[M, rows, k] of sides [rows, k_m]; narrow ones are filled up with zeros, which change no product."""
    widest = max(side.shape[1] for side in sides)
    return torch.stack([side if side.shape[1] == widest else pad(side, (0, widest - side.shape[1])) for side in sides])


@dataclass(eq=False)
class Capture:
    layout: Layout
    positions: dict[str, Tensor]
    """Modules that see only some positions (an output head on the response alone): name → flat positions."""
    role: Role = "both"
    factors: Mapping[int, float] = field(default_factory=dict)
    """Response → what turns its captured gradient into that of its target, without a sign."""
    parts: dict[Block, list[Part]] = field(default_factory=dict)

    def wanted(self, site: Site, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The part of a module's output gradient and input that belongs to rows that are not ignored, and its flat
        positions; None where these are all B·S of the layout, in order."""
        batch, length = self.layout.full_shape or self.layout.shape
        seen = gradient.shape[:-1].numel()
        kept = self.layout.kept_rows
        if site.name in self.positions:
            positions = self.positions[site.name].cpu()
            if len(positions) != seen:
                raise AttributionError(
                    f"{site.name} ran on {seen} positions, but positions[{site.name!r}] lists {len(positions)}"
                )
            gradient, x = gradient.reshape(seen, -1), x.reshape(seen, *x.shape[gradient.dim() - 1 :])
            if kept is None:
                return gradient, x, positions
            new_row = torch.full((batch,), -1, dtype=torch.long)
            new_row[kept] = torch.arange(len(kept))
            row = new_row[positions // length]
            chosen = (row >= 0).nonzero().squeeze(-1)
            return gradient[chosen], x[chosen], row[chosen] * length + positions[chosen] % length
        if seen == batch * length:
            if kept is None:
                return gradient, x, None
            by_row = (batch, length)
            return gradient.reshape(*by_row, -1)[kept], _by_row(x, by_row)[kept], None
        if gradient.dim() == 3 and gradient.shape[0] == batch and gradient.shape[1] < length:
            # transformers' `logits_to_keep`: the head ran on the last positions of each row.
            if kept is not None:
                gradient, x = gradient[kept], x[kept]
            last = torch.arange(length - gradient.shape[1], length)
            return gradient, x, (torch.arange(len(gradient))[:, None] * length + last).reshape(-1)
        raise AttributionError(
            f"{site.name} ran on {list(gradient.shape[:-1])} positions, but this capture describes {batch} × {length}:"
            " response and tokens must be those of the batch that is going backward. If this module sees only"
            f" some positions, pass positions={{{site.name!r}: long[…]}} to capture()"
        )

    def add(self, block: Block, u: Tensor, v: Tensor, positions: Tensor | None) -> None:
        """Factors of one call, as many rows as `positions` (all of them for None)."""
        u, v = u.reshape(-1, u.shape[-1]), v.reshape(-1, v.shape[-1])
        scale = self.layout.scale
        if isinstance(scale, Tensor):
            u = u * (scale if positions is None else scale[positions]).to(u)
        elif scale != 1.0:
            u = u * scale
        self.parts.setdefault(block, []).append(Part(u, v, positions))

    def kind(self, block: Block) -> tuple[object, ...]:
        """Modules of one kind can be taken together: their factors have as many rows, and about the same width."""
        calls = tuple((len(part.u), id(part.positions)) for part in self.parts[block])
        if block.preconditioner is not None:
            return (block.k_out, block.k_in, *calls)
        return (-(-block.k_out // LIKE_WIDTHS), -(-block.k_in // LIKE_WIDTHS), None, *calls)

    def take(self, blocks: Sequence[Block]) -> list[Part]:
        """The calls of modules of one kind, side by side; they are not kept any longer."""
        return [side_by_side(call) for call in zip(*(self.parts.pop(block) for block in blocks), strict=True)]

    def gradients(self, calls: Sequence[Part], responses: list[int]) -> Tensor:
        """[M, n, k_out, k_in]: per response Σ u vᵀ over all its positions, its prompt's included."""
        parts = [self._gradients_of(part, responses) for part in calls]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _gradients_of(self, part: Part, responses: list[int]) -> Tensor:
        if self.layout.row_response is None or part.positions is not None:
            total = self.layout.response.numel()
            positions = [self.layout.positions_of(response) for response in responses]
            longest = max(len(own) for own in positions)
            if longest * len(responses) <= LITTLE_PADDING * sum(len(own) for own in positions):
                flat = pad_sequence(positions, batch_first=True, padding_value=-1)
                u, v = (side.squeeze(2) for side in self.tokens([part], flat))
                return u.mT @ v
            products = []
            for own in positions:
                rows = part.rows_of(own, total)
                chosen = chosen_rows(rows[rows >= 0], part.u.device)
                products.append(part.u[:, chosen].mT @ part.v[:, chosen])
            return torch.stack(products, 1)
        u, v = part.u.unflatten(1, self.layout.shape), part.v.unflatten(1, self.layout.shape)
        chosen = self.layout.index_of(responses, u.device)
        return u[:, chosen].mT @ v[:, chosen]

    def prefers_products(self, block: Block, members: list[int], tokens: int) -> bool:
        """Whether `products` of these responses, with this many tokens, multiplies less than their gradients would."""
        positions = sum(len(self.layout.positions_of(r)) for r in members)
        through_gradients = (positions + tokens * len(members)) * block.dim
        return positions**2 * (block.k_out + block.k_in) < through_gradients

    def products(self, calls: Sequence[Part], factors: Mapping[int, float], flat: Tensor) -> tuple[Tensor, Tensor]:
        """Of the gradients of n responses, each times its factor: [M, T, n] with those of the tokens at the flat
        positions (−1 = none, gives zeros), and [M, n, n] with each other. For modules that were called once.

        They are sums of (u_s · u_t)(v_s · v_t) over the positions of a response, so that no gradient is formed.
        """
        (part,), total = calls, self.layout.response.numel()
        positions = torch.cat([self.layout.positions_of(r) for r in factors])
        owner = torch.cat([torch.full((len(self.layout.positions_of(r)),), i) for i, r in enumerate(factors)])
        rows = part.rows_of(positions, total)
        positions, owner, rows = positions[rows >= 0], owner[rows >= 0], rows[rows >= 0]
        chosen = chosen_rows(rows, part.u.device)
        weights = torch.zeros(len(positions), len(factors), dtype=torch.float64)
        weights[torch.arange(len(positions)), owner] = torch.tensor(list(factors.values()), dtype=torch.float64)[owner]
        mixing = weights.to(part.u)
        # One module after the other: a product of positions with each other is large.
        sides = ((u[chosen], v[chosen]) for u, v in zip(part.u, part.v, strict=True))
        cross = torch.stack([(u @ u.T).mul_(v @ v.T) @ mixing for u, v in sides])
        place = torch.full((total + 1,), len(positions))  # the last entry answers for −1
        place[positions] = torch.arange(len(positions))
        with_none = torch.cat([cross, cross.new_zeros(len(cross), 1, len(factors))], 1)
        return with_none[:, place[flat].to(cross.device)], mixing.T @ cross

    def tokens(self, calls: Sequence[Part], flat: Tensor) -> tuple[Tensor, Tensor]:
        """Factors at the flat positions [S, T] (−1 = none, gives zeros): u [M, S, P, T, k_out], v [M, S, P, T, k_in]
        for the P calls of each module."""
        us, vs = [], []
        for part in calls:
            rows = part.rows_of(flat, self.layout.response.numel())
            missing = rows < 0
            chosen = rows.clamp(min=0).flatten().to(part.u.device)
            u, v = (side.index_select(1, chosen).unflatten(1, flat.shape) for side in (part.u, part.v))
            if bool(missing.any()):
                u = u.masked_fill(missing[..., None].to(u.device), 0.0)
                v = v.masked_fill(missing[..., None].to(v.device), 0.0)
            us.append(u)
            vs.append(v)
        if len(calls) == 1:
            return us[0].unsqueeze(2), vs[0].unsqueeze(2)
        return torch.stack(us, 2), torch.stack(vs, 2)


def _by_row(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inputs of a linear layer [.., d] or ids of an embedding, as [B, S, …]."""
    return x.reshape(shape) if x.numel() == shape[0] * shape[1] and not x.is_floating_point() else x.reshape(*shape, -1)


# ---------------------------------------------------------------- step and target


def check_target(config: InfluenceConfig, role: Role, target_scale: Tensor | None, sign: Tensor | None) -> None:
    """Raise where a pass does not say what is needed to know the target's gradient, or says it twice."""
    if config.about == "output_function":
        if role != "both" or target_scale is not None:
            raise AttributionError(
                "target='output_function' has one pass and one scale: role and target_scale belong to target='log_prob'"
            )
        return
    if sign is not None:
        raise AttributionError(
            "sign turns the target of target='output_function'; with target='log_prob' give target_scale, which has"
            " the sign in it"
        )
    if role == "both" and target_scale is None and config.output_function != "log_prob":
        raise AttributionError(
            f"target='log_prob' asks about log-probs, and this pass is of {config.output_function!r}: give"
            " target_scale (see objectives.target_scale), or capture a pass of Σ log-probs with role='target' first"
        )


def target_factors(
    config: InfluenceConfig, layout: Layout, scale: float | Tensor, target_scale: Tensor | None
) -> dict[int, float]:
    """Response → what turns its captured gradient (with `scale`) into that of its target, without a sign."""
    factors = {}
    for response in layout.responses:
        own = float(scale[response]) if isinstance(scale, Tensor) else float(scale)
        ratio = 1.0 if target_scale is None else float(target_scale[response]) / own if own else 0.0
        mean = config.response_reduction == "mean"
        factors[response] = ratio / (max(layout.token_counts[response], 1) if mean else 1)
    return factors
