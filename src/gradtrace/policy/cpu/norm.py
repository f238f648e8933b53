"""RMSNorm with its gradient written out, and a heap that keeps freed memory, for training on a CPU.

A small model's update is bound by memory, and autograd's gradient of the plain formula passes over the activations
some fourteen times. Written out it is six, and the norm takes a third of the time. Same values, same state dict: only
the `forward` of the norms in one loaded model is replaced. Reverse mode, twice too, and forward mode with dual
numbers work; the transforms of torch.func do not.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

SAME_FORMULA = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms of transformers that compute weight · x / √(mean x² + variance_epsilon)."""


class RmsNorm(torch.autograd.Function):
    """(x [..., D], weight [D], epsilon) → [..., D]."""

    # Not in two parts (`setup_context`), which would bind the arguments by name in every call: as slow as the norm.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = inverse_length(x, epsilon)
        ctx.epsilon = epsilon
        ctx.save_for_backward(x, weight, scale)
        ctx.save_for_forward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        # With s = 1/√(mean x² + ε) and g' = g·w: dx = s·g' − x · s³ · ⟨g', x⟩ / D, dw = Σ s·g·x.
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass will be differentiated, and the scale moves with x
            scale = inverse_length(x, ctx.epsilon)
        products = (gradient * x).reshape(-1, x.shape[-1])  # [N, D]
        along_x = torch.mv(products, weight).view(scale.shape)
        x_gradient = (gradient * weight).mul_(scale)
        x_gradient.addcmul_(x, along_x * scale**3, value=-1 / x.shape[-1])
        weight_gradient = torch.mv(products.t(), scale.flatten()) if ctx.needs_input_grad[1] else None
        return x_gradient, weight_gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, weight_tangent: Tensor | None, _: None) -> Tensor:
        x, weight, scale = ctx.saved_tensors
        if tangent is None:
            result = torch.zeros_like(x)
        else:
            along_x = torch.linalg.vecdot(x, tangent).unsqueeze(-1)
            result = (scale * tangent).addcmul_(x, along_x * scale**3, value=-1 / x.shape[-1]).mul_(weight)
        if weight_tangent is not None:
            result.addcmul_(x * scale, weight_tangent)
        return result


def inverse_length(x: Tensor, epsilon: float) -> Tensor:
    """1/√(mean x² + ε) [..., 1]."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (length.square() / x.shape[-1] + epsilon).rsqrt()


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    return RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)


_forward.computes_the_same = True  # type: ignore[attr-defined]  # so that the sampler keeps its fast path


def use_fast_norms(model: nn.Module) -> None:
    """Replace the forward of every norm of known formula, unless somebody did so before; float32 on a CPU only, where
    it is exact and pays."""
    for module in model.modules():
        if type(module).__name__ in SAME_FORMULA and "forward" not in vars(module):
            weight: Any = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                module.forward = MethodType(_forward, module)


LARGEST_KEPT = 32 * 2**20
"""Blocks up to this size come out of the heap; glibc takes no larger limit. Others return to the system when freed."""
MOST_KEPT = 512 * 2**20
"""The heap gives back what is free at its end beyond this."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> bool:
    """Whether glibc's malloc was told to keep it; not where the user has settings of their own, or there is no glibc.

    Otherwise it gives memory back whenever much of it is free at the end of the heap, and the next step has every page
    of it zeroed again: ten thousand pages in a step of the demo.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))
