"""Linear layers of a pass in forward mode, value and tangent written out.

torch makes the tangent dx·Wᵀ + x·dWᵀ + db of three tensors that it adds up afterwards; here the products add to one
another. Half of such a pass on a small model are linear layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad


@contextmanager
def linear_layers_written_out(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, plain linear layers among `modules` compute value and tangent by `dual_linear`; those whose forward
    somebody replaced are left alone."""
    replaced: list[Any] = [m for m in modules if type(m) is nn.Linear and "forward" not in vars(m)]
    for module in replaced:
        module.forward = MethodType(dual_linear, module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def dual_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What `layer` makes of dual numbers x [..., d_in], as dual numbers [..., d_out]."""
    if torch.is_autocast_enabled(x.device.type):  # which rounds at every operation, and knows where
        return F.linear(x, layer.weight, layer.bias)
    x, x_tangent = _parts(x)
    weight, weight_tangent = _parts(layer.weight)
    bias, bias_tangent = (None, None) if layer.bias is None else _parts(layer.bias)
    value = F.linear(x, weight, bias)
    tangent = None
    if x_tangent is not None:
        tangent = F.linear(x_tangent.reshape(-1, x.shape[-1]), weight, bias_tangent)
    if weight_tangent is not None:
        rows = x.reshape(-1, x.shape[-1])
        if tangent is None:
            tangent = F.linear(rows, weight_tangent, bias_tangent)
        else:
            tangent.addmm_(rows, weight_tangent.T)
    if tangent is None and bias_tangent is not None:
        tangent = bias_tangent.expand_as(value)
    return value if tangent is None else forward_ad.make_dual(value, tangent.reshape(value.shape))


def _parts(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    """Value and tangent; None for a tangent of zeros that torch keeps as a symbol."""
    value, tangent = forward_ad.unpack_dual(dual)
    return value, None if tangent is None or tangent._is_zerotensor() else tangent
