"""Does gradient reach the layers that will be traced? One small pass tells, with the cause named if not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.layers import Block, FactorHooks, Site, select_blocks


@dataclass
class LayerFlow:
    name: str
    shape: tuple[int, int]
    projected: tuple[int, int]
    ran: bool = False
    """Its forward was called."""
    captures: tuple[int, int] = (0, 0)
    """How often its hook kept an input in the forward pass, and received a gradient in the backward pass."""
    rows: int = 0
    """Positions at which its hook received a gradient."""
    gradient_norm: float = 0.0
    """Of the output gradients, not of the weight."""


@dataclass
class FlowReport:
    layers: list[LayerFlow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Each names a cause and what to do. Empty: everything that was selected can be traced."""

    @property
    def healthy(self) -> bool:
        return not self.problems


def check_gradient_flow(
    model: nn.Module, loss_fn: Callable[[], Tensor], config: InfluenceConfig | None = None
) -> FlowReport:
    """Runs `loss_fn()` once and its backward pass, without touching any `.grad`."""
    report = FlowReport()
    try:
        blocks = select_blocks(model, config or InfluenceConfig())
    except AttributionError as error:
        report.problems.append(str(error))
        return report
    flows = {block: LayerFlow(block.name, (block.d_out, block.d_in), (block.k_out, block.k_in)) for block in blocks}
    report.layers = list(flows.values())
    without_grad: set[str] = set()

    def ran(block: Block) -> Callable[..., None]:
        def hook(*_: object) -> None:
            flows[block].ran = True
            if not torch.is_grad_enabled():
                without_grad.add(block.name)

        return hook

    def receive(block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        flows[block].rows += gradient.shape[:-1].numel()
        flows[block].gradient_norm += float(gradient.float().norm())

    handles = [block.sites[0].module.register_forward_hook(ran(block)) for block in blocks]
    hooks = FactorHooks(blocks, receive)
    try:
        loss = loss_fn()
        if loss.requires_grad:
            weights = [block.sites[0].module.weight for block in blocks]
            torch.autograd.grad(loss, weights, allow_unused=True)  # type: ignore[arg-type]
    finally:
        for name, counts in hooks.captures().items():
            next(flow for flow in report.layers if flow.name == name).captures = counts
        hooks.close()
        for handle in handles:
            handle.remove()
    report.problems += _problems(report.layers, without_grad, loss)
    return report


def _problems(layers: list[LayerFlow], without_grad: set[str], loss: Tensor) -> list[str]:
    idle = [layer.name for layer in layers if not layer.ran]
    if len(idle) == len(layers):
        return [
            f"none of the {len(layers)} selected layers ran: the loss does not come from this model (a copy, a"
            " compiled or wrapped version?)"
        ]
    if not loss.requires_grad:
        if without_grad:
            return [
                f"the loss was computed under torch.no_grad() or inference_mode ({len(without_grad)} selected layers"
                f" ran without grad mode, the first is {layers[0].name}): there is no graph to go backward through"
            ]
        return [
            "the loss is detached from the graph although the layers ran with grad mode on: look for .detach(),"
            " .item(), .data or a conversion to numpy between the logits and the loss"
        ]
    problems = []
    if not bool(torch.isfinite(loss).all()):
        problems.append(f"the loss is {float(loss.detach().flatten()[0])}: gradients of it carry no information")
    silent = [layer.name for layer in layers if layer.ran and layer.rows == 0]
    if silent:
        problems.append(
            f"{len(silent)} of {len(layers)} selected layers ran but received no gradient, the first is {silent[0]}:"
            " the graph is cut above them (.detach(), torch.no_grad() around a part of the model), or their"
            " output does not enter the loss"
        )
    if idle:
        problems.append(
            f"{len(idle)} selected layers did not run in this pass, the first is {idle[0]} (an expert that was not"
            " routed to, an unused branch?); they will have no part in the scores"
        )
    return problems
