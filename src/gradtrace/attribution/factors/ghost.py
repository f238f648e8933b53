"""Per-response products with a given gradient, without a gradient per response (the "ghost" product).

⟨∇L(r), S⟩ = Σ_t u_tᵀ S v_t over the positions of response r: one matmul inside the backward hook, as cheap as the
weight gradient that autograd computes anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradtrace.attribution.collectives import gathered
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.capture import Capture, Layout
from gradtrace.attribution.factors.layers import (
    Block,
    FactorHooks,
    Site,
    full_precision,
    oriented,
    select_blocks,
    sides,
)
from gradtrace.attribution.factors.solvers import TokenRows


class GhostProduct:
    """Scores every response of a backward pass against `target`, a gradient by parameter name.

    ```python
    ghost = GhostProduct(model, {name: p.grad.clone() for name, p in model.named_parameters()})
    with ghost.capture(response=rows, tokens=mask):
        loss.backward()
    scores = ghost.scores(responses)    # [R]: ⟨∇loss of response r, target⟩, in the units of loss · target
    ```

    Covers the weights of linear layers (tied embeddings included) and their biases; `missed` names the
    parameters of `target` that it does not. `directional_derivative` of per-response losses covers all.

    A sharded target (DTensor, FSDP2) stays sharded: the part of a layer is gathered inside that layer's hook and
    dropped again. All ranks must then run the same passes, as FSDP itself demands.
    """

    def __init__(
        self, model: nn.Module, target: Mapping[str, Tensor], module_name_filter: tuple[str, ...] = (".*",)
    ) -> None:
        config = InfluenceConfig(credit="position", module_name_filter=module_name_filter)
        self._blocks = [block for block in select_blocks(model, config) if block.parameter_name in target]
        if not self._blocks:
            raise AttributionError(
                "the target gradient names no weight of a selected linear layer; its first names are"
                f" {list(target)[:3]}"
            )
        self._weights = {block: oriented(block, target[block.parameter_name]).detach() for block in self._blocks}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._biases: dict[Site, Tensor] = {}
        covered = {block.parameter_name for block in self._blocks}
        for block in self._blocks:
            for site in block.sites:
                name = names.get(id(getattr(site.module, "bias", None)))
                if name is not None and name in target and name not in covered:
                    self._biases[site] = target[name].detach()
                    covered.add(name)
        self.missed = sorted(set(target) - covered)
        self._hooks = FactorHooks(self._blocks, self._receive)
        self._open: Capture | None = None
        self._scores: dict[int, Tensor] = {}

    @contextmanager
    def capture(
        self,
        *,
        response: Tensor,
        tokens: Tensor,
        scale: float | Tensor = 1.0,
        positions: Mapping[str, Tensor] | None = None,
    ) -> Iterator[None]:
        """As `InfluenceTracer.capture`: the backward pass inside belongs to these rows."""
        layout = Layout.of(response, tokens, scale)
        self._open = Capture(layout, dict(positions or {}))
        for r in layout.responses:
            self._scores.setdefault(r, torch.zeros((), dtype=torch.float64))
        try:
            yield
        finally:
            self._open = None
            self._hooks.forget_calls()

    @torch.no_grad()
    def _receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        if self._open is None:
            return
        with full_precision(gradient.device.type):
            gradient, x, positions = self._open.wanted(site, gradient, x)
            weight = gathered(self._weights[block])
            if site.kind == "embedding":  # u is one-hot: S's row of the token, without a matrix of that width
                products, positions = self._embedding_products(site, gradient, x, weight, positions)
            else:
                self._open.add(block, *sides(block, site, gradient, x), positions)
                part = self._open.parts.pop(block)[0]
                rows = TokenRows(part.u[None], part.v[None], len(part.u))
                products = rows.contract(weight.to(part.u)[None, None]).flatten()
                if site in self._biases:
                    products = products + part.u @ gathered(self._biases[site]).to(part.u)
        response = self._open.layout.response
        owner = response if positions is None else response[positions]
        size = int(owner.max()) + 2
        sums = torch.zeros(size, dtype=torch.float64, device=products.device)
        sums.index_add_(0, owner.to(products.device) + 1, products.double())
        for r in self._open.layout.responses:
            if r + 1 < size:
                self._scores[r] = self._scores[r].to(sums.device) + sums[r + 1]

    def _embedding_products(
        self, site: Site, gradient: Tensor, ids: Tensor, weight: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[rows]: the product of each position's own gradient of the embedding's weight."""
        assert self._open is not None
        gradient, ids = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1)
        if gradient.dtype != torch.float64:
            gradient = gradient.float()
        padding = getattr(site.module, "padding_idx", None)
        if padding is not None:
            gradient = gradient.masked_fill((ids == padding)[:, None], 0.0)
        scale = self._open.layout.scale
        if isinstance(scale, Tensor):
            scale = (scale if positions is None else scale[positions]).to(gradient)
        return (gradient * scale * weight[ids].to(gradient)).sum(-1), positions

    def scores(self, responses: int) -> Tensor:
        """float64[responses]: the products since the last call; NaN for a response that was not captured."""
        if not self._scores:
            raise AttributionError("nothing was captured: no backward pass ran inside `with ghost.capture(…)`")
        result = torch.full((responses,), torch.nan, dtype=torch.float64)
        for response, value in self._scores.items():
            if response >= responses:
                raise AttributionError(f"response id {response} was captured, but only {responses} were announced")
            result[response] = value
        self._scores.clear()
        return result

    def close(self) -> None:
        self._hooks.close()
