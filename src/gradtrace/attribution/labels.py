"""What is known of all R responses: which were accepted, which share a prompt, their advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.errors import AttributionError


@dataclass(frozen=True)
class Labels:
    """The same on every rank."""

    accepted: Tensor
    """bool[R]"""
    group: Tensor
    """long[R]; −1 = in no group"""
    advantages: Tensor | None = None
    """float[R]"""

    @staticmethod
    def of(accepted: Tensor, group: Tensor, advantages: Tensor | None) -> Labels:
        accepted, group = accepted.cpu(), group.cpu()
        if accepted.dtype != torch.bool or accepted.dim() != 1:
            raise AttributionError(f"accepted must be bool[R], not {accepted.dtype}{list(accepted.shape)}")
        if group.shape != accepted.shape or group.is_floating_point():
            raise AttributionError(
                f"group must be long[{len(accepted)}] like accepted, not {group.dtype}{list(group.shape)}"
            )
        if advantages is not None:
            advantages = advantages.detach().cpu()
            if advantages.shape != accepted.shape:
                raise AttributionError(
                    f"advantages is {list(advantages.shape)}, but there are {len(accepted)} responses"
                )
        return Labels(accepted, group, advantages)

    def __len__(self) -> int:
        return len(self.accepted)

    def same_as(self, other: Labels) -> bool:
        def equal(a: Tensor | None, b: Tensor | None) -> bool:
            return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))

        return (
            equal(self.accepted, other.accepted)
            and equal(self.group, other.group)
            and equal(self.advantages, other.advantages)
        )

    def groups(self) -> dict[int, list[int]]:
        """Group id → its responses."""
        members: dict[int, list[int]] = {}
        for response, group in enumerate(self.group.tolist()):
            if group >= 0:
                members.setdefault(group, []).append(response)
        return members

    def mixed_groups(self) -> dict[int, list[int]]:
        """Groups that hold accepted *and* rejected responses."""
        return {g: rs for g, rs in self.groups().items() if 0 < int(self.accepted[rs].sum()) < len(rs)}
