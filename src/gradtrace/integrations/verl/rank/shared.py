"""Some sequences of a mini-batch on every rank, so that all ranks take an equal part of a pass over them.

A pass through sharded weights gathers them from all ranks, whoever has sequences to run. Sequences are a few kilobytes
and weights gigabytes: so it is the sequences that travel, and a pass over a group's responses is one of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from gradtrace.attribution.collectives import Ranks
from gradtrace.integrations.verl.dealing import PADDING, deal
from gradtrace.integrations.verl.rank.sequences import PASS_SETTINGS, nested, plain, rows_of
from gradtrace.integrations.verl.told import ROW

Values = Callable[[Any, Any], Tensor]
"""(model output, micro-batch of b sequences) → [..., b, T]: numbers per response token."""


class SharedSequences:
    def __init__(self, engine: Any, data: Any, rows: Sequence[int], ranks: Ranks) -> None:
        """`rows`: those to share, the same on all ranks; `data`: verl's, of the sequences of this rank. Collective."""
        self.engine = engine
        self.ranks = ranks
        columns = {key: data[key].unbind() for key in data.keys() if isinstance(data[key], Tensor)}  # noqa: SIM118
        wanted = set(rows)
        self.held = {
            row: {key: values[place].cpu().clone() for key, values in columns.items()}
            for place, row in enumerate(rows_of(data).tolist())
            if row in wanted
        }
        """By row: the fields of a sequence given to this rank. Copies: a view is sent with all that it is a view of."""
        self.sequences = {row: one for part in ranks.gather(self.held) for row, one in part.items()}
        self._ragged = {key for key in columns if data[key].is_nested}
        self._settings = {key: plain(data, key) for key in PASS_SETTINGS if key in data}
        self._settings |= {"calculate_entropy": plain(data, "calculate_entropy", False), "global_batch_size": len(rows)}

    def run(self, rows: Sequence[int], values_of: Values) -> Tensor:
        """float64[..., N]: one forward pass over these sequences, the same on all ranks; the values of the tokens of
        those that this rank holds, one sequence after the other. Collective."""
        lengths = [len(self.sequences[row]["input_ids"]) for row in rows]
        whole, settings = -(-len(rows) // self.ranks.size), dict(self._settings)
        multiple = 1
        if not settings.get("use_dynamic_bsz", True):
            multiple = settings["micro_batch_size_per_gpu"] = min(int(settings["micro_batch_size_per_gpu"]), whole)
        places = deal(lengths, self.ranks.size, multiple)[self.ranks.place]
        shortest = rows[lengths.index(min(lengths))]
        chosen = [(PADDING, shortest) if place == PADDING else (rows[place], rows[place]) for place in places]
        found = token_values(self.engine, self._data(chosen, settings), values_of)
        everything = {row: values for part in self.ranks.gather(found) for row, values in part.items()}
        nothing = next(iter(everything.values()))[..., :0]
        return torch.cat([nothing, *(everything[row] for row in rows if row in self.held)], dim=-1)

    def _data(self, chosen: list[tuple[int, int]], settings: dict[str, Any]) -> Any:
        """Sequences as verl's trainer hands them to a rank: (row that stands for it, row that it is) of each."""
        fields: dict[str, Tensor | list[Any]] = {}
        for key in self.sequences[chosen[0][1]]:
            values = [self.sequences[row][key] for _, row in chosen]
            fields[key] = nested(values) if key in self._ragged else torch.stack(values)
        fields[ROW] = torch.tensor([row for row, _ in chosen])
        data = tu.get_tensordict(fields)
        tu.assign_non_tensor(data, **settings)
        return data


def token_values(engine: Any, data: Any, values_of: Values) -> dict[int, Tensor]:
    """Row → float64[..., t]: a forward pass of this rank over `data`; every rank runs one. What only fills up stands
    under PADDING."""
    found: dict[int, Tensor] = {}

    def keep(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
        values = values_of(model_output, data)
        for place, (row, mask) in enumerate(zip(rows_of(data).tolist(), data["response_mask"].unbind(), strict=True)):
            own = values[..., place, : len(mask)][..., mask.bool()]
            found[row] = own.detach().double().cpu()
        return values.sum(), {}

    engine.plain_passes(data, keep, forward_only=True)
    return found
