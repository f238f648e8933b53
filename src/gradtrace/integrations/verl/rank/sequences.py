"""Sequences as verl's engine takes them, and where their responses sit in the model inputs that it makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.told import ROW

PASS_SETTINGS = (
    *("temperature", "use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu", "use_fused_kernels"),
    *("micro_batch_size_per_gpu", "pad_mode"),
)
"""How verl cuts and runs micro-batches: passes of our own are run as those of training."""


def sequences(prompts: list[list[int]], responses: list[list[int]], rows: list[int], **more: list[Tensor]) -> Any:
    """A TensorDict as verl's V1 trainer hands one to a rank. `rows`: under `ROW`, −1 for what only fills up; `more`:
    further fields with one tensor per sequence."""
    inputs = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    masks = nested([torch.ones(len(response), dtype=torch.long) for response in responses])
    return tu.get_tensordict(
        {
            "prompts": nested([torch.tensor(prompt) for prompt in prompts]),
            "responses": nested([torch.tensor(response) for response in responses]),
            "input_ids": nested(inputs),
            "position_ids": nested([torch.arange(len(ids)) for ids in inputs]),
            "response_mask": masks,
            "loss_mask": masks,
            ROW: torch.tensor(rows),
            **{name: nested(values) for name, values in more.items()},
        }
    )


def nested(values: list[Tensor]) -> Tensor:
    """Tensors of different lengths as one jagged tensor."""
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def rows_of(data: Any) -> Tensor:
    """long[b]: the row of each sequence, however the queue has packed single numbers."""
    rows: Tensor = data[ROW]
    return (rows.values() if rows.is_nested else rows).reshape(-1).cpu()


def plain(data: Any, key: str, default: Any = None) -> Any:
    """A value of a TensorDict that is not a tensor."""
    return tu.get_non_tensor_data(data=data, key=key, default=default)


def layout_of(engine: Any, micro_batch: Any) -> tuple[Tensor, Tensor]:
    """`response_layout` of a micro-batch as this engine makes model inputs of it; ids are rows."""
    packed = plain(micro_batch, "use_remove_padding", True)
    bucket = engine.pad_to_length_bucket if engine.pad_to_length else 0
    return response_layout(micro_batch, rows_of(micro_batch), packed, bucket)


def response_layout(micro_batch: Any, ids: Tensor, packed: bool, bucket: int = 0) -> tuple[Tensor, Tensor]:
    """Which response every model input belongs to: (`response`, `tokens`) as `InfluenceTracer.capture` takes them.

    `ids`: long[b], the tracer's response id of each sequence, −1 to ignore it. With `packed` (verl's
    use_remove_padding) all sequences stand behind one another in one row, which is padded at its end to a multiple
    of `bucket` if that is not 0 (pad_to_length); else each has a row of its own, padded on the right.
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
