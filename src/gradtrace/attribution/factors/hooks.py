"""Capture of gradient factors: for y = Wx, u = ∂loss/∂y and v = x at every position, from a real backward pass.

The hooks stay on the model from construction to `close()`, and ask at *backward* time what the pass means. So
the forward pass may run anywhere, and passes that nobody captures cost next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradtrace.attribution.factors.modules import Block, Site

Receiver = Callable[[Block, Site, Tensor, Tensor], None]


class _SavedInput(torch.autograd.Function):
    """Keeps a layer's input the way autograd keeps it, rather than in a closure.

    Gradient checkpointing then drops and recomputes our copy together with its own, so capture does not
    undo the memory it saves. The output is never used: it only carries the saved tensor.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:  # pragma: no cover - not in any graph
        return None, None


class FactorHooks:
    """Calls `receive(block, site, u, v)` once per call of a traced module whose output receives a gradient."""

    def __init__(self, blocks: list[Block], receive: Receiver) -> None:
        self.receive = receive
        self.calls: dict[Block, int] = dict.fromkeys(blocks, 0)
        """Forward passes of each block that await their backward, as far as they are known beforehand."""
        self.forward_captures: Counter[str] = Counter()
        """How often each block's forward pass was seen since `forget_counts`."""
        self.backward_captures: Counter[str] = Counter()
        """How often a gradient reached it."""
        self._anchor = torch.empty(0, requires_grad=True)
        self._paused = False
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Put the hooks on the model, if they are not there."""
        if self._handles:
            return
        for block in self.calls:
            for site in block.sites:
                hook = self._forward_hook(block, site)
                self._handles.append(site.module.register_forward_hook(hook, with_kwargs=True))

    def _forward_hook(self, block: Block, site: Site) -> Callable[..., None]:
        def after_forward(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            if self._paused or not output.requires_grad:
                return
            recomputing = torch._C._current_graph_task_id() != -1  # checkpointing runs it again inside backward
            if not recomputing:
                self.calls[block] += 1
                self.forward_captures[block.name] += 1
            x = args[0] if args else kwargs["input"]
            saved = _SavedInput.apply(self._anchor, x.detach()).grad_fn

            def on_gradient(gradient: Tensor) -> None:
                nonlocal saved
                self.backward_captures[block.name] += 1
                self.receive(block, site, gradient, saved.saved_tensors[0])
                if not graph_is_kept():
                    saved = None  # as autograd does with its own, so that the next layer finds free memory

            # A hook of the tensor, not of the module: it survives in-place operations on the output
            # (verl divides logits by the temperature in place) and does not fire on recomputation.
            output.register_hook(on_gradient)

        return after_forward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes in here are not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def forget_calls(self) -> None:
        for block in self.calls:
            self.calls[block] = 0

    def captures(self) -> dict[str, tuple[int, int]]:
        """Module → how often its hooks captured something, forward and backward."""
        return {b.name: (self.forward_captures[b.name], self.backward_captures[b.name]) for b in self.calls}

    def forget_counts(self) -> None:
        self.forward_captures.clear()
        self.backward_captures.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def graph_is_kept() -> bool:
    """Inside a backward pass: whether another may follow through the same graph (`retain_graph`), as far as torch
    tells."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def full_precision(device: str) -> AbstractContextManager[object]:
    """Inside, no operation is rounded to half precision, though the pass may run under autocast."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def sides(block: Block, site: Site, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One call's factors as (U [..., k_out], V [..., k_in]) with Σ U⊗V = its part of the (projected) gradient."""
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    gradient = gradient.detach()
    if site.kind == "embedding":
        return _embedding_sides(block, site, gradient.to(dtype), x)
    # Under autocast the layer used x rounded to the gradient's type; so does the real weight gradient.
    x = x.to(gradient.dtype).to(dtype)
    gradient = gradient.to(dtype)
    scaling = block.scaling
    if block.projected:
        p_out, p_in = block.projections(dtype, gradient.device)
        if scaling is not None:  # of the projections: they have fewer rows than a pass has positions
            p_out, p_in = p_out * scaling.rows.to(p_out), p_in * scaling.columns.to(p_in)
        return _projected(gradient, p_out), _projected(x, p_in)
    if scaling is None:
        return gradient, x
    return gradient * scaling.rows.to(gradient), x * scaling.columns.to(x)


def _projected(values: Tensor, projection: Tensor) -> Tensor:
    """[.., d] → [rows, k]. The few rows of the projection come first: half the time of the other order."""
    return (projection @ values.flatten(0, -2).T).T


def _embedding_sides(block: Block, site: Site, gradient: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A tied embedding row e_id gets δ at each position: in the block's terms u = onehot(id), v = δ."""
    padding = getattr(site.module, "padding_idx", None)
    if padding is not None:
        gradient = gradient.masked_fill((ids == padding)[..., None], 0.0)
    factor = None
    if block.scaling is not None:
        factor = block.scaling.rows.to(gradient)[ids][..., None]
        gradient = gradient * block.scaling.columns.to(gradient)
    if block.projected:
        p_out, p_in = block.projections(gradient.dtype, gradient.device)
        rows, gradient = p_out.T[ids], gradient @ p_in.T
    else:
        rows = torch.nn.functional.one_hot(ids, block.d_out).to(gradient.dtype)
    return rows if factor is None else rows * factor, gradient
