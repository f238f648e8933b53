"""Forward-mode derivatives: how any quantity of a model changes along one direction in parameter space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradtrace.attribution.collectives import Ranks, forget_gathered, is_sharded, local
from gradtrace.attribution.errors import AttributionError

Method = Literal["jvp", "finite_difference"]
LARGE = 50_000_000
"""Parameters from which on two plain passes take clearly less time than one in forward mode."""
CAREFUL = 0.2
"""Part of the usual step that is taken where nothing is known of a function, or where its values are to sum to what is
known, as the shares of the entropy probe and of blame: there curvature is a greater danger than rounding."""

SPREAD = 0.6
"""By which share of itself a token's term changes, about, where the contrast of log-probs changes by 1."""


def faster_method(model: nn.Module) -> Method:
    """`finite_difference` for a large model in float32, whose passes are matrix products: forward mode costs it twice
    as much for digits that no ranking of tokens shows; and where weights are sharded. Everything else has forward mode,
    which is exact."""
    parameters = list(model.parameters())
    if is_sharded(model):
        return "finite_difference"
    plain = all(p.dtype == torch.float32 for p in parameters)
    return "finite_difference" if plain and sum(p.numel() for p in parameters) >= LARGE else "jvp"


def directional_derivative(
    model: nn.Module,
    fn: Callable[[], Tensor],
    direction: Mapping[str, Tensor],
    method: Method = "jvp",
    step: float | None = None,
    ranks: Ranks | None = None,
    rate: Tensor | float | None = None,
    step_scale: float = 1.0,
) -> Tensor:
    """d/dε fn() with the model's parameters at θ + ε·direction, at ε = 0. Same shape as `fn()`.

    `fn` calls `model` and returns any tensor: per-token log-probs, entropies, losses per sample. `direction` maps
    parameter names to tensors of their shape; parameters it leaves out do not move.

    `jvp` is exact and takes one forward pass of about twice the usual cost, with attention on the math
    backend. `finite_difference` is two or four ordinary forward passes at θ ± ε·direction: it works with any
    kernel and with parameters that are sharded over `ranks`, to about four digits in float32. `step` fixes its ε; by
    default ε is chosen so that `fn` changes by a little more than its rounding error allows, times `step_scale`. `rate`
    is by which share of themselves the values of `fn` change per unit of ε: where it is known, two passes are enough.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_direction(parameters, direction)
    with torch.no_grad():
        if method == "jvp":
            return _forward_mode(model, fn, parameters, direction)
        if method == "finite_difference":
            found = central_difference(model, fn, direction, step, ranks, float(rate or 0.0), step_scale)
            return found.to(parameters[next(iter(direction))].dtype)
    raise AttributionError(f"method is {method!r}; it can be 'jvp' or 'finite_difference'")


def _check_direction(parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> None:
    if not direction:
        raise AttributionError("the direction is empty: it must name at least one parameter")
    for name, tangent in direction.items():
        if name not in parameters:
            known = ", ".join(list(parameters)[:3])
            raise AttributionError(f"the direction names {name!r}, which the model does not have; it has {known} …")
        if tangent.shape != parameters[name].shape:
            raise AttributionError(
                f"the direction of {name} is {list(tangent.shape)}, the parameter is {list(parameters[name].shape)}"
            )


def _forward_mode(
    model: nn.Module,
    fn: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
) -> Tensor:
    modules = list(model.modules())
    # Dual numbers, not torch.func.jvp: the same bits, and a fifth less time on small models.
    # Flash and fused CPU attention have no forward mode, and neither have grouped products of experts.
    with (
        sdpa_kernel(SDPBackend.MATH),
        forward_ad.dual_level(),
        _dense_zeros(modules),
        _experts_one_by_one(modules),
        linear_layers_written_out(modules),
    ):
        still = {name: torch.zeros_like(p) for name, p in parameters.items() if p.dim() < 2 and name not in direction}
        moving = {
            id(parameters[name]): forward_ad.make_dual(parameters[name].detach(), tangent.to(parameters[name]))
            for name, tangent in {**still, **direction}.items()
        }
        with _replaced(modules, moving):
            value, derivative = forward_ad.unpack_dual(fn())
        return torch.zeros_like(value) if derivative is None else derivative


@contextmanager
def _replaced(modules: Sequence[nn.Module], by: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, the modules have other tensors for some parameters, given by their id; a tied weight in all its places.

    `torch.func.functional_call` does the same, but walks through the model some ten times, which a small model feels.
    """
    before = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if id(parameter) in by
    ]
    for module, name, parameter in before:
        module._parameters[name] = by[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


def at_rest(values: Tensor) -> Tensor:
    """Constants for a product with something that moves: in forward mode with a tangent of zeros. Without one torch
    takes a symbolic zero, whose every product is shaped in Python."""
    in_forward_mode = forward_ad._current_level >= 0
    return forward_ad.make_dual(values, torch.zeros_like(values)) if in_forward_mode else values


@contextmanager
def _experts_one_by_one(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, transformers' mixtures of experts run expert after expert, in plain linear maps."""
    key = "_experts_implementation_internal"
    configs = {id(c): c for m in modules if hasattr(c := getattr(m, "config", None), key)}.values()
    before = [(config, getattr(config, key)) for config in configs]
    for config, _ in before:
        setattr(config, key, "eager")
    try:
        yield
    finally:
        for config, value in before:
            setattr(config, key, value)


@contextmanager
def _dense_zeros(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, rotary tables have a tangent of zeros (see `at_rest`), as norm weights that stand still do: a fifth of
    the time on small models."""

    def with_zeros(module: nn.Module, inputs: object, output: object) -> object:
        if not isinstance(output, tuple) or not all(isinstance(table, Tensor) for table in output):
            return output
        return tuple(at_rest(table) for table in output)

    rotary = [module for module in modules if type(module).__name__.endswith("RotaryEmbedding")]
    handles = [module.register_forward_hook(with_zeros) for module in rotary]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- linear layers in forward mode


@contextmanager
def linear_layers_written_out(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, plain linear layers among `modules` compute value and tangent by `dual_linear`; those whose forward
    somebody replaced are left alone.

    torch makes the tangent dx·Wᵀ + x·dWᵀ + db of three tensors that it adds up afterwards; here the products add to one
    another. Half of such a pass on a small model are linear layers.
    """
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


# ---------------------------------------------------------------- moved weights


def has_low_precision(model: nn.Module) -> bool:
    """Whether weights are coarser than the steps that move them."""
    return any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters() if p.requires_grad)


@contextmanager
def moved(model: nn.Module, direction: Iterable[tuple[str, Tensor]], scale: float = 1.0) -> Iterator[None]:
    """Inside, the weights are at θ + scale·direction; afterwards they are what they were, bit by bit. Pairs of name and
    direction are asked for one by one, so that no second copy of all of them exists."""
    forget_gathered(model)  # after a pass, FSDP shows whole weights in the place of shards
    parameters, before = dict(model.named_parameters(remove_duplicate=False)), list[tuple[Tensor, Tensor]]()
    try:
        with torch.no_grad():
            for name, step in direction:
                weight = local(parameters[name].detach())
                if weight.dtype not in (torch.float32, torch.float64):
                    raise AttributionError(f"{name} is {weight.dtype}, which rounds away what one step changes")
                before.append((weight, weight.clone()))
                weight.add_(local(step).to(weight.dtype), alpha=scale)
        forget_gathered(model)
        yield
    finally:
        with torch.no_grad():
            for weight, values in before:
                weight.copy_(values)
        forget_gathered(model)


def central_difference(
    model: nn.Module,
    fn: Callable[[], Tensor],
    direction: Mapping[str, Tensor],
    step: float | None = None,
    ranks: Ranks | None = None,
    rate: float = 0.0,
    step_scale: float = 1.0,
) -> Tensor:
    """float64: d/dε of `fn()` at θ + ε·direction. Weights may be sharded over `ranks` (DTensor): then every rank moves
    its own part, and all of them do so together.

    By default ε changes the values by about the cube root of their rounding, where rounding and curvature weigh the
    same, times `step_scale`: a first guess, from `rate` or from the norms of weights and direction, is corrected if it
    was far off.
    """
    forget_gathered(model)  # as in `moved`
    ranks, parameters = ranks or Ranks(), dict(model.named_parameters(remove_duplicate=False))
    weights = [parameters[name].detach() for name in direction]
    low = {weight.dtype for weight in weights} - {torch.float32, torch.float64}
    if low:
        raise AttributionError(
            f"finite differences need float32 or float64 parameters, not {low.pop()}, whose rounding is larger than"
            " the difference. Use method='jvp' or a float32 copy of the model"
        )
    copies = torch.tensor([ranks.copies(weight) for weight in weights])

    def length(tensors: Iterable[Tensor]) -> float:
        """Norm over all ranks, in which each element counts once."""
        squares = torch.stack(torch._foreach_norm([local(tensor) for tensor in tensors])).double().square().cpu()
        return math.sqrt(math.fsum(ranks.gather(float((squares / copies).sum()))))

    def norm(values: Tensor) -> float:
        """Norm of the values of all ranks."""
        return math.sqrt(sum(ranks.gather(float(values.square().sum()))))

    def ends(epsilon: float) -> tuple[Tensor, Tensor]:
        with moved(model, direction.items(), epsilon):
            plus = fn().double()
        with moved(model, direction.items(), -epsilon):
            return plus, fn().double()

    size = length(direction.values())
    if size == 0.0:
        return torch.zeros_like(fn(), dtype=torch.float64)
    wanted = step_scale * (1.0 if rate else CAREFUL) * torch.finfo(weights[0].dtype).eps ** (1 / 3)
    epsilon = step or wanted * (1 / rate if rate else 0.3 * length(weights) / size)
    plus, minus = ends(epsilon)
    changed = norm(plus - minus) / max(norm(plus + minus), 1e-300)
    if step is None and changed > 0.0 and not 0.15 < changed / wanted < 4.0:
        epsilon *= wanted / changed
        plus, minus = ends(epsilon)
    return (plus - minus) / (2 * epsilon)
