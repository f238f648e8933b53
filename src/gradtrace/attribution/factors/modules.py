"""Which layers are traced: blocks of weights, and the modules ("sites") that use them.

A *block* is one weight matrix. Usually one linear layer uses it; with tied weights several modules do, the
input embedding among them, and their gradients belong to the same block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.projection import projected_dims, rademacher
from gradtrace.attribution.geometry import Factored

SiteKind = Literal["linear", "conv1d", "embedding"]


@dataclass(eq=False)
class Site:
    """One module that uses the weight of a block."""

    name: str
    module: nn.Module
    kind: SiteKind


@dataclass(eq=False)
class Block:
    """One traced weight matrix, seen as d_out × d_in whatever the layer stores."""

    name: str
    parameter_name: str
    sites: list[Site]
    d_out: int
    d_in: int
    k_out: int
    k_in: int
    seed: int
    tail: bool = False
    """Whether no position feeds a later one through it: then position and loss-term credit are the same there."""
    scored: bool = True
    """Whether it has a part in the scores that are taken inside the backward pass."""
    scaling: Factored | None = None
    """What the optimizer does to its gradient, of which either side gets the square root before anything else."""
    preconditioner: Tensor | None = None
    """[d_out, d_in]: the same, element by element."""
    _projections: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def projected(self) -> bool:
        return (self.k_out, self.k_in) != (self.d_out, self.d_in)

    @property
    def dim(self) -> int:
        """D: the number of entries of a (projected) gradient."""
        return self.k_out * self.k_in

    def projections(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """P_out [k_out, d_out] and P_in [k_in, d_in]; made at first use."""
        key = (dtype, device)
        if key not in self._projections:
            self._projections[key] = (
                rademacher(self.name, "out", self.k_out, self.d_out, self.seed, dtype).to(device),
                rademacher(self.name, "in", self.k_in, self.d_in, self.seed, dtype).to(device),
            )
        return self._projections[key]

    def weight_direction(self, direction: Tensor) -> Tensor:
        """A direction [k_out, k_in] as a tensor shaped like the parameter: ⟨it, g⟩ = ⟨direction, projected g⟩."""
        rows, columns = (None, None) if self.scaling is None else (self.scaling.rows, self.scaling.columns)
        if self.projected:
            p_out, p_in = self.projections(direction.dtype, direction.device)
            # Scaled before the last product, while they are small.
            left = p_out.T if rows is None else rows.to(direction)[:, None] * p_out.T
            direction = (left @ direction) @ (p_in if columns is None else p_in * columns.to(direction))
        elif rows is not None and columns is not None:
            direction = rows.to(direction)[:, None] * direction * columns.to(direction)
        return direction.T if self.sites[0].kind == "conv1d" else direction


def by_block(blocks: Sequence[Block], gradients: Tensor) -> dict[Block, Tensor]:
    """Each block's part of [M, .., k_out, k_in], without the zeros that narrower ones were filled up with."""
    found = zip(blocks, gradients, strict=True)
    return {block: part[..., : block.k_out, : block.k_in] for block, part in found}


def linear_kind(module: nn.Module) -> SiteKind | None:
    if isinstance(module, nn.Linear):
        return "linear"
    # transformers' Conv1D (GPT-2): a linear layer that stores its weight transposed. By name: torch only here.
    return "conv1d" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def out_in(module: nn.Module, kind: SiteKind) -> tuple[int, int]:
    # Not from weight.shape: under FSDP the parameter may be a shard or flattened.
    if kind == "linear":
        return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    return int(module.nf), int(module.nx)  # type: ignore[arg-type]


def output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def select_blocks(model: nn.Module, config: InfluenceConfig) -> list[Block]:
    """The trainable linear layers that `module_name_filter` picks, in model order, one block per weight.

    Raises with the cause when nothing is left: no linear layer, no match, or all of them frozen.
    """
    linear = [(name, module) for name, module in model.named_modules() if linear_kind(module)]
    if not linear:
        raise AttributionError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer, so there is nothing to attribute to"
        )
    if config.module_name_filter:
        patterns = [re.compile(pattern) for pattern in config.module_name_filter]
        chosen = [item for item in linear if any(pattern.search(item[0]) for pattern in patterns)]
        if not chosen:
            examples = ", ".join(name for name, _ in linear[:4])
            raise AttributionError(
                f"module_name_filter={list(config.module_name_filter)} matches none of the {len(linear)} linear"
                f" layers; their names are like {examples}"
            )
    else:
        head = output_head(model)
        chosen = [item for item in linear if item[1] is not head] or linear
    trainable = [(name, module) for name, module in chosen if module.weight.requires_grad]
    if not trainable:
        raise AttributionError(
            f"all {len(chosen)} selected layers are frozen (weight.requires_grad is False), the first is"
            f" {chosen[0][0]}; unfreeze them, or with LoRA let module_name_filter match the adapter layers"
            " (lora_A, lora_B)"
        )
    if 0 < config.max_modules < len(trainable):
        step = len(trainable) / config.max_modules
        trainable = [trainable[int((i + 0.5) * step)] for i in range(config.max_modules)]
    blocks = _group_by_weight(model, trainable, config)
    tail = tail_modules(model)
    for block in blocks:
        block.tail = all(site.name in tail for site in block.sites)
        block.scored = block.tail or not config.tail_only
    if not any(block.scored for block in blocks):
        raise AttributionError(
            f"credit={config.credit!r} scores layers of the last block through which no position feeds a later one, and"
            f" none of the {len(blocks)} selected layers is one, such as {blocks[-1].name}: let module_name_filter or"
            " max_modules pick some, or use credit='position' or 'both'"
        )
    return [block for block in blocks if block.tail] if config.credit == "tail" else blocks


_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_AFTER_MIXING = re.compile(r"(^|\.)(q|q_a|q_b|o|out|c)_proj(\.|$)|(^|\.)(query|dense|wq|wo|output)(\.|$)")
"""Layers of an attention module whose value at a position is used at that position alone: queries, and what comes
after the mixing. Keys and values, also where they share a layer with queries, are used at later positions."""


def tail_modules(model: nn.Module) -> set[str]:
    """Names of the layers through which no position feeds a later one: in the last block, and the output head."""
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and any(linear_kind(m) for m in module.modules())
    ]
    if not stacks:
        return set()
    # The outermost list with the most blocks: experts and heads have lists of their own inside.
    outer = [s for s in stacks if not any(s[0].startswith(f"{other}.") for other, _ in stacks)]
    name, stack = max(outer, key=lambda item: len(item[1]))
    prefix = f"{name}.{len(stack) - 1}."
    found = set()
    for layer, module in model.named_modules():
        if module is output_head(model) and isinstance(module, nn.Module):
            found.add(layer)
        if not layer.startswith(prefix) or not linear_kind(module):
            continue
        path = layer.removeprefix(prefix)
        attention = _ATTENTION.search(path)
        if attention is None or _AFTER_MIXING.search(path[attention.end() :]):
            found.add(layer)
    return found


def _group_by_weight(model: nn.Module, layers: list[tuple[str, nn.Module]], config: InfluenceConfig) -> list[Block]:
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks: dict[int, Block] = {}
    for name, module in layers:
        kind = linear_kind(module)
        assert kind is not None
        weight = module.weight
        if id(weight) in blocks:
            blocks[id(weight)].sites.append(Site(name, module, kind))
            continue
        d_out, d_in = out_in(module, kind)
        k_out, k_in = projected_dims(
            d_out, d_in, config.projection_dim_factor or 0, config.max_proj_vector_sum, config.max_hessian_dim
        )
        parameter_name = parameter_names.get(id(weight), f"{name}.weight")
        blocks[id(weight)] = Block(
            name, parameter_name, [Site(name, module, kind)], d_out, d_in, k_out, k_in, config.seed
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in blocks:
            if type(module) is not nn.Embedding:
                raise AttributionError(
                    f"{blocks[id(module.weight)].name} shares its weight with {name}, a {type(module).__name__},"
                    " whose gradient is not a plain embedding's; leave that layer out of module_name_filter"
                )
            blocks[id(module.weight)].sites.append(Site(name, module, "embedding"))
    return list(blocks.values())
