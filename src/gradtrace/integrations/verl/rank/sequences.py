"""Sequences as verl's engine takes them: where their responses sit in the model inputs, and how ranks share passes.

A pass through sharded weights gathers them from all ranks, whoever has sequences to run. Sequences are a few kilobytes
and weights gigabytes: so it is the sequences that travel, and every rank runs an equal part of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.assign import PADDING, deal
from gradtrace.integrations.verl.tables import ROW

PASS_SETTINGS = (
    *("temperature", "use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu", "use_fused_kernels"),
    *("micro_batch_size_per_gpu", "pad_mode"),
)
"""How verl cuts and runs micro-batches: passes of our own are run as those of training."""
OWN = "gradtrace_column_"
"""Fields of ours with numbers for each response token begin with this."""
Values = Callable[[Any, Any], Tensor]
"""(model output, micro-batch of b sequences) → [..., b, T]: numbers per response token."""


def nested(values: list[Tensor]) -> Tensor:
    """Tensors of different lengths as one jagged tensor."""
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def dense(data: Any, name: str, like: Tensor) -> Tensor:
    """A nested column [b, j] as wide as `like` [b, T], zero outside."""
    values = data[name]
    values = values.to_padded_tensor(0.0) if values.is_nested else values
    return torch.nn.functional.pad(values, (0, like.shape[1] - values.shape[1])).to(like.device)


def rows_of(data: Any) -> Tensor:
    """long[b]: the row of each sequence, however the queue has packed single numbers."""
    rows: Tensor = data[ROW]
    return (rows.values() if rows.is_nested else rows).reshape(-1).cpu()


def plain(data: Any, key: str, default: Any = None) -> Any:
    """A value of a TensorDict that is not a tensor."""
    return tu.get_non_tensor_data(data=data, key=key, default=default)


def masks_of(data: Any) -> dict[int, Tensor]:
    """Row → bool[t]: the tokens of its response that the policy wrote."""
    masks = [mask.bool().cpu() for mask in data["response_mask"].unbind()]
    return dict(zip(rows_of(data).tolist(), masks, strict=True))


# ---------------------------------------------------------------- model inputs


def layout_of(engine: Any, micro_batch: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`response_layout` of a micro-batch as this engine makes model inputs of it."""
    packed = plain(micro_batch, "use_remove_padding", True)
    bucket = engine.pad_to_length_bucket if engine.pad_to_length else 0
    return response_layout(micro_batch, ids, packed, bucket)


def response_layout(micro_batch: Any, ids: Tensor, packed: bool, bucket: int = 0) -> tuple[Tensor, Tensor]:
    """Which response every model input belongs to: (`response`, `tokens`) as `InfluenceTracer.capture` takes them.

    `ids`: long[b], the id of each sequence, −1 to ignore it. With `packed` (verl's use_remove_padding) all sequences
    stand behind one another in one row, which is padded at its end to a multiple of `bucket` if that is not 0
    (pad_to_length); else each has a row of its own, padded on the right.
    """
    sequences, responses = micro_batch["input_ids"], micro_batch["responses"]
    if not responses.is_nested:
        raise GradtraceError(
            "the trace needs verl's V1 trainer (trainer.use_v1=true): responses arrived padded, not nested"
        )
    lengths = sequences.offsets().diff().cpu()
    response_lengths = responses.offsets().diff().cpu()
    mask = micro_batch["response_mask"].values().bool().cpu()
    ids = ids.cpu()
    width = int(lengths.sum()) if packed else int(lengths.max())
    if packed and bucket:
        width = -(-width // bucket) * bucket
    shape = (1, width) if packed else (len(lengths), width)
    response = torch.full(shape, -1)
    tokens = torch.zeros(shape, dtype=torch.bool)
    begin = mask_begin = 0
    for index, (length, own) in enumerate(zip(lengths.tolist(), response_lengths.tolist(), strict=True)):
        row, start = (0, begin) if packed else (index, 0)
        response[row, start : start + length] = ids[index]
        tokens[row, start + length - own : start + length] = mask[mask_begin : mask_begin + own]
        begin, mask_begin = begin + length, mask_begin + own
    return (response if packed else ids), tokens & (response >= 0)


# ---------------------------------------------------------------- batches of our own


def dealt_sequences(
    batch: RolloutBatch, ranks: int, place: int, multiple: int = 1, columns: dict[str, Tensor] | None = None
) -> Any:
    """The part of rank `place` of a batch, as verl's V1 trainer hands a mini-batch to a rank, with `columns` [R, T]
    beside it. Ranks have about equally many tokens, and equally many sequences, a multiple of `multiple`: the shortest
    one fills up, with the row −1."""
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    rows = deal(lengths, ranks, multiple)[place]
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    chosen = [shortest if row == PADDING else row for row in rows]
    ids = batch.response_ids
    responses = [ids[row] for row in chosen]
    prompts = [batch.prompts[int(batch.group[row])] for row in chosen]
    inputs = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]

    def column(values: Tensor) -> Tensor:
        return nested([values[row, : len(own)] for row, own in zip(chosen, responses, strict=True)])

    masks = column(batch.response_mask.long())
    return tu.get_tensordict(
        {
            "prompts": nested([torch.tensor(prompt) for prompt in prompts]),
            "responses": nested([torch.tensor(response) for response in responses]),
            "input_ids": nested(inputs),
            "position_ids": nested([torch.arange(len(ids)) for ids in inputs]),
            "response_mask": masks,
            "loss_mask": masks,
            ROW: torch.tensor(rows),
            **{f"{OWN}{name}": column(values.float()) for name, values in (columns or {}).items()},
        }
    )


class SharedSequences:
    """Some sequences of a mini-batch on every rank, so that all ranks take an equal part of a pass over them."""

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
        found = token_values(self.engine, self.data(rows), values_of)
        everything = {row: values for part in self.ranks.gather(found) for row, values in part.items()}
        nothing = next(iter(everything.values()))[..., :0]
        return torch.cat([nothing, *(everything[row] for row in rows if row in self.held)], dim=-1)

    def data(self, rows: Sequence[int]) -> Any:
        """The part of this rank of a pass over these sequences, as verl's trainer hands it to a rank. What only fills
        up has the row −1."""
        lengths = [len(self.sequences[row]["input_ids"]) for row in rows]
        whole, settings = -(-len(rows) // self.ranks.size), dict(self._settings)
        multiple = 1
        if not settings.get("use_dynamic_bsz", True):
            multiple = settings["micro_batch_size_per_gpu"] = min(int(settings["micro_batch_size_per_gpu"]), whole)
        places = deal(lengths, self.ranks.size, multiple)[self.ranks.place]
        shortest = rows[lengths.index(min(lengths))]
        chosen = [(PADDING, shortest) if place == PADDING else (rows[place], rows[place]) for place in places]
        fields: dict[str, Tensor | list[Any]] = {}
        for key in self.sequences[chosen[0][1]]:
            values = [self.sequences[row][key] for _, row in chosen]
            fields[key] = nested(values) if key in self._ragged else torch.stack(values)
        fields[ROW] = torch.tensor([row for row, _ in chosen])
        data = tu.get_tensordict(fields)
        tu.assign_non_tensor(data, **settings)
        return data


def by_row(values: Tensor, data: Any) -> dict[int, Tensor]:
    """Row → float64[..., t]: values [..., b, T] of the sequences of a micro-batch."""
    masks = enumerate(zip(rows_of(data).tolist(), data["response_mask"].unbind(), strict=True))
    return {
        row: values[..., place, : len(mask)][..., mask.bool()].detach().double().cpu() for place, (row, mask) in masks
    }


def token_values(engine: Any, data: Any, values_of: Values) -> dict[int, Tensor]:
    """Row → float64[..., t]: a forward pass of this rank over `data`; every rank runs one. What only fills up stands
    under PADDING."""
    found: dict[int, Tensor] = {}

    def keep(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
        values = values_of(model_output, data)
        found.update(by_row(values, data))
        return values.sum(), {}

    engine.plain_passes(data, keep, forward_only=True)
    return found
