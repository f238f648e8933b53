"""What a person should know about scores that are right, and yet not all that they were hoping for."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch.distributed as dist
from torch import nn

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.factors.modules import Block
from gradtrace.attribution.factors.scopes import Scope

FEW_NUMBERS = 10_000
"""With fewer numbers in a projected gradient scores predict worse: docs/validity.md has what was measured."""


def remarks(about: Iterable[str], scopes: Iterable[Scope], captured: Collection[int], ranks: Ranks) -> list[str]:
    """`about`: what `fused_experts` and `coarse_projection` say of the model."""
    return [said for said in (_split_groups(scopes, captured, ranks), *about) if said]


def _split_groups(scopes: Iterable[Scope], captured: Collection[int], ranks: Ranks) -> str:
    """Groups of which this rank saw a part, where nobody said that there are other ranks."""
    if ranks.size > 1 or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    torn = [scope for scope in scopes if 0 < len(set(scope.members) & set(captured)) < len(scope.members)]
    if not torn:
        return ""
    said = (
        f"{len(torn)} groups have no scores: this rank captured a part of their responses, and it is one of "
        f"{dist.get_world_size()}. Pass process_group=torch.distributed.group.WORLD to InfluenceTracer, with response "
        "ids that are global, or keep groups whole on a rank"
    )
    warnings.warn(said, stacklevel=4)
    return said


def coarse_projection(blocks: Iterable[Block]) -> str:
    """The default projection is made for layers of a real size; of a toy's it leaves next to nothing."""
    kept = sum(block.k_out * block.k_in for block in blocks)
    whole = sum(block.d_out * block.d_in for block in blocks)
    if kept == whole or kept >= FEW_NUMBERS:
        return ""
    return (
        f"Projection leaves {kept:,} of the {whole:,} numbers of a gradient, which costs accuracy: "
        "projection_dim_factor=0 is exact, and affordable for a model of this size"
    )


def fused_experts(model: nn.Module) -> str:
    """Experts whose weights lie in one 3-D parameter are no linear layers, and have no scores."""
    fused = [
        (f"{path}.{name}", parameter.numel())
        for path, module in model.named_modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.requires_grad
    ]
    if not fused:
        return ""
    share = sum(size for _, size in fused) / sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        f"{share:.0%} of the trainable weights are fused experts, such as {fused[0][0]}, which are not traced: scores "
        "are of the other layers (attention, shared experts). `gradtrace verify` measures what they are worth"
    )
