"""What a person should know about scores that are right, and yet not all that they were hoping for."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch.distributed as dist
from torch import nn

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.scopes import Scope


def remarks(experts: str, scopes: Iterable[Scope], captured: Collection[int], ranks: Ranks) -> list[str]:
    """`experts`: what `fused_experts` says of the model."""
    return [said for said in (_split_groups(scopes, captured, ranks), experts) if said]


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
