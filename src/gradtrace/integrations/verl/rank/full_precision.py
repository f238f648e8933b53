"""Passes in float32 of a model that FSDP2 computes in bf16: the stored weights are float32, only their gathered copies
are not. bf16 would round away the changes that differences of passes measure.

FSDP2 fixes the precision of its copies when it first gathers; torch has no public way to change it later. So what it
keeps of them is laid aside for the time of the passes, with all weights sharded, and put back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from gradtrace.attribution.collectives import forget_gathered

GATHERED = ("param_dtype", "reduce_dtype", "all_gather_outputs", "_unsharded_param")
"""What an FSDPParam keeps of the copy that it gathers."""


@contextmanager
def full_precision(engine: Any) -> Iterator[None]:
    """Inside, verl's engine runs in float32, attention too. No pass may be under way."""
    usual = engine._autocast_dtype
    if usual == torch.float32:
        yield
        return
    forget_gathered(engine.module)
    float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    aside = [
        _switch(module._get_fsdp_state(), float32)
        for module in engine.module.modules()
        if isinstance(module, FSDPModule)
    ]
    engine._autocast_dtype = torch.float32
    try:
        with _attention_in_full_precision(engine.module):
            yield
    finally:
        engine._autocast_dtype = usual
        forget_gathered(engine.module)
        for state, policy, groups in aside:
            state._mp_policy = policy
            for group, policy_of_group, kept in groups:
                _set_policy(group, policy_of_group)
                for parameter, values in zip(group.fsdp_params, kept, strict=True):
                    _clear(parameter)
                    vars(parameter).update(values)


@contextmanager
def _attention_in_full_precision(model: nn.Module) -> Iterator[None]:
    """Flash attention has half precision only; torch's own does the same in float32, packed rows included."""
    key = "_attn_implementation_internal"
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), key)}.values()
    flash = [(config, name) for config in found if "flash" in str(name := getattr(config, key))]
    try:
        for config, _ in flash:
            setattr(config, key, "sdpa")
        yield
    finally:
        for config, name in flash:
            setattr(config, key, name)


def _switch(state: Any, policy: MixedPrecisionPolicy) -> tuple[Any, Any, list[Any]]:
    """(FSDP's state of a module, its policy, its parameter groups with theirs and with what was laid aside)."""
    usual, state._mp_policy = state._mp_policy, policy
    groups = []
    for group in state._fsdp_param_groups:
        kept = []
        for parameter in group.fsdp_params:
            kept.append({name: vars(parameter)[name] for name in GATHERED if name in vars(parameter)})
            _clear(parameter)
        groups.append((group, group.mp_policy, kept))
        _set_policy(group, policy)
    return state, usual, groups


def _clear(parameter: Any) -> None:
    parameter.all_gather_outputs = []
    vars(parameter).pop("_unsharded_param", None)


def _set_policy(group: Any, policy: Any) -> None:
    group.mp_policy = policy
    group._init_mp_dtypes()
