"""Which layers are captured, and the hooks that capture them: for y = Wx, u = ∂loss/∂y and v = x at every position.

A *block* is one weight matrix. Usually one linear layer uses it; with tied weights several modules do, the
input embedding among them, and their gradients belong to the same block. Either side can be projected.

Hooks ask at *backward* time what the pass means. So the forward pass may run anywhere, and passes that nobody captures
cost next to nothing.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.geometry import Factored

SiteKind = Literal["linear", "conv1d", "embedding"]


@dataclass(eq=False)
class Site:
    """One module that uses the weight of a block."""

    name: str
    module: nn.Module
    kind: SiteKind


@dataclass(eq=False)
class Block:
    """One traced weight matrix, seen as d_out × d_in whatever the layer stores."""

    name: str
    parameter_name: str
    sites: list[Site]
    d_out: int
    d_in: int
    k_out: int
    k_in: int
    seed: int
    scaling: Factored | None = None
    """What the optimizer does to its gradient, of which either side gets the square root before anything else."""
    preconditioner: Tensor | None = None
    """[d_out, d_in]: the same, element by element."""
    _projections: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def projected(self) -> bool:
        return (self.k_out, self.k_in) != (self.d_out, self.d_in)

    @property
    def dim(self) -> int:
        """D: the number of entries of a (projected) gradient."""
        return self.k_out * self.k_in

    def projections(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """P_out [k_out, d_out] and P_in [k_in, d_in]; made at first use."""
        key = (dtype, device)
        if key not in self._projections:
            self._projections[key] = (
                rademacher(self.name, "out", self.k_out, self.d_out, self.seed, dtype).to(device),
                rademacher(self.name, "in", self.k_in, self.d_in, self.seed, dtype).to(device),
            )
        return self._projections[key]

    def zeros(self, rows: int, config: InfluenceConfig) -> Tensor:
        """[rows, k_out, k_in], where scores are computed."""
        weight = self.sites[0].module.weight
        assert isinstance(weight, Tensor)
        on_host = config.grad_offload_to_cpu and not config.force_gpu_compute
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        device = torch.device("cpu") if on_host else weight.device
        return torch.zeros(rows, self.k_out, self.k_in, dtype=dtype, device=device)

    def weight_direction(self, direction: Tensor) -> Tensor:
        """A direction [k_out, k_in] as a tensor shaped like the parameter: ⟨it, g⟩ = ⟨direction, projected g⟩."""
        rows, columns = (None, None) if self.scaling is None else (self.scaling.rows, self.scaling.columns)
        if self.projected:
            p_out, p_in = self.projections(direction.dtype, direction.device)
            # Scaled before the last product, while they are small.
            left = p_out.T if rows is None else rows.to(direction)[:, None] * p_out.T
            direction = (left @ direction) @ (p_in if columns is None else p_in * columns.to(direction))
        elif rows is not None and columns is not None:
            direction = rows.to(direction)[:, None] * direction * columns.to(direction)
        return direction.T if self.sites[0].kind == "conv1d" else direction


def by_block(blocks: Sequence[Block], gradients: Tensor) -> dict[Block, Tensor]:
    """Each block's part of [M, .., k_out, k_in], without the zeros that narrower ones were filled up with."""
    found = zip(blocks, gradients, strict=True)
    return {block: part[..., : block.k_out, : block.k_in] for block, part in found}


def oriented(block: Block, gradient: Tensor) -> Tensor:
    """A parameter-shaped tensor as d_out × d_in."""
    return gradient.T if block.sites[0].kind == "conv1d" else gradient


def linear_kind(module: nn.Module) -> SiteKind | None:
    if isinstance(module, nn.Linear):
        return "linear"
    # transformers' Conv1D (GPT-2): a linear layer that stores its weight transposed. By name: torch only here.
    return "conv1d" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def out_in(module: nn.Module, kind: SiteKind) -> tuple[int, int]:
    # Not from weight.shape: under FSDP the parameter may be a shard or flattened.
    if kind == "linear":
        return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    return int(module.nf), int(module.nx)  # type: ignore[arg-type]


def output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def select_blocks(model: nn.Module, config: InfluenceConfig) -> list[Block]:
    """The trainable linear layers that `module_name_filter` picks, in model order, one block per weight.

    Raises with the cause when nothing is left: no linear layer, no match, or all of them frozen.
    """
    linear = [(name, module) for name, module in model.named_modules() if linear_kind(module)]
    if not linear:
        raise AttributionError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer, so there is nothing to attribute to"
        )
    if config.module_name_filter:
        patterns = [re.compile(pattern) for pattern in config.module_name_filter]
        chosen = [item for item in linear if any(pattern.search(item[0]) for pattern in patterns)]
        if not chosen:
            examples = ", ".join(name for name, _ in linear[:4])
            raise AttributionError(
                f"module_name_filter={list(config.module_name_filter)} matches none of the {len(linear)} linear"
                f" layers; their names are like {examples}"
            )
    else:
        head = output_head(model)
        chosen = [item for item in linear if item[1] is not head] or linear
    trainable = [(name, module) for name, module in chosen if module.weight.requires_grad]
    if not trainable:
        raise AttributionError(
            f"all {len(chosen)} selected layers are frozen (weight.requires_grad is False), the first is"
            f" {chosen[0][0]}; unfreeze them, or with LoRA let module_name_filter match the adapter layers"
            " (lora_A, lora_B)"
        )
    if 0 < config.max_modules < len(trainable):
        step = len(trainable) / config.max_modules
        trainable = [trainable[int((i + 0.5) * step)] for i in range(config.max_modules)]
    return _group_by_weight(model, trainable, config)


def _group_by_weight(model: nn.Module, layers: list[tuple[str, nn.Module]], config: InfluenceConfig) -> list[Block]:
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks: dict[int, Block] = {}
    for name, module in layers:
        kind = linear_kind(module)
        assert kind is not None
        weight = module.weight
        if id(weight) in blocks:
            blocks[id(weight)].sites.append(Site(name, module, kind))
            continue
        d_out, d_in = out_in(module, kind)
        k_out, k_in = projected_dims(
            d_out, d_in, config.projection_dim_factor, config.max_proj_vector_sum, config.max_hessian_dim
        )
        parameter_name = parameter_names.get(id(weight), f"{name}.weight")
        blocks[id(weight)] = Block(
            name, parameter_name, [Site(name, module, kind)], d_out, d_in, k_out, k_in, config.seed
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in blocks:
            if type(module) is not nn.Embedding:
                raise AttributionError(
                    f"{blocks[id(module.weight)].name} shares its weight with {name}, a {type(module).__name__},"
                    " whose gradient is not a plain embedding's; leave that layer out of module_name_filter"
                )
            blocks[id(module.weight)].sites.append(Site(name, module, "embedding"))
    return list(blocks.values())


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


# ---------------------------------------------------------------- projection


def projected_dims(
    d_out: int, d_in: int, factor: int | None, max_vector_sum: int = 0, max_hessian_dim: int = 0
) -> tuple[int, int]:
    """(k_out, k_in): d // factor on each side, then the larger side shrinks until both caps hold.

    Without a factor nothing is projected (and `InfluenceConfig` refuses caps). Factor 1 projects only as far as the
    caps ask.
    """
    if not factor:
        return d_out, d_in
    k_out, k_in = max(1, d_out // factor), max(1, d_in // factor)

    def too_big() -> bool:
        over_sum = max_vector_sum > 0 and k_out + k_in > max_vector_sum
        over_product = max_hessian_dim > 0 and k_out * k_in > max_hessian_dim
        return (over_sum or over_product) and max(k_out, k_in) > 1

    while too_big():
        if k_out >= k_in:
            k_out -= 1
        else:
            k_in -= 1
    return k_out, k_in


def rademacher(name: str, side: str, k: int, d: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[k, d] of ±1/√k, the same on every machine and rank for the same module name, side and seed."""
    digest = hashlib.sha256(f"{seed}/{side}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    signs = torch.randint(0, 2, (k, d), generator=generator, dtype=torch.int8)
    return signs.to(dtype).mul_(2).sub_(1).div_(math.sqrt(k))


# ---------------------------------------------------------------- hooks

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
