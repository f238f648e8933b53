"""What is known of all R responses: which were accepted, which share a prompt, their advantages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

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
    sign: Tensor | None = None
    """float[R] of ±1: with which sign the captured objective counts the response's log-prob; None = all +1."""

    @staticmethod
    def of(accepted: Tensor, group: Tensor, advantages: Tensor | None = None, sign: Tensor | None = None) -> Labels:
        accepted, group = accepted.cpu(), group.cpu()
        if accepted.dtype != torch.bool or accepted.dim() != 1:
            raise AttributionError(f"accepted must be bool[R], not {accepted.dtype}{list(accepted.shape)}")
        if group.shape != accepted.shape or group.is_floating_point():
            raise AttributionError(
                f"group must be long[{len(accepted)}] like accepted, not {group.dtype}{list(group.shape)}"
            )
        columns = {"advantages": advantages, "sign": sign}
        for name, column in columns.items():
            if column is not None:
                columns[name] = column.detach().cpu()
                if column.shape != accepted.shape:
                    raise AttributionError(f"{name} is {list(column.shape)}, but there are {len(accepted)} responses")
        if sign is not None and bool((sign.abs() != 1).any()):
            raise AttributionError("sign must hold +1 or −1 for every response (use +1 where the weight is 0)")
        return Labels(accepted, group, columns["advantages"], columns["sign"])

    def __len__(self) -> int:
        return len(self.accepted)

    def same_as(self, other: Labels) -> bool:
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    def sign_of(self, response: int) -> float:
        return 1.0 if self.sign is None else float(self.sign[response])

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Group id → its responses."""
        members: dict[int, list[int]] = {}
        for response, group in enumerate(self.group.tolist()):
            if group >= 0:
                members.setdefault(group, []).append(response)
        return members

    @cached_property
    def mixed_groups(self) -> dict[int, list[int]]:
        """Groups that hold accepted *and* rejected responses."""
        accepted = self.accepted.tolist()
        return {g: rs for g, rs in self.groups.items() if 0 < sum(accepted[r] for r in rs) < len(rs)}
