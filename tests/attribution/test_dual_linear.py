"""Linear layers written out for forward mode are those of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from gradtrace.attribution.tangent import linear_layers_written_out

CASES = [
    (shape, with_bias, moving)
    for shape in ((3,), (2, 5, 3))
    for with_bias in (False, True)
    for count in range(4)
    for moving in itertools.combinations(("x", "weight", "bias"), count)
    if with_bias or "bias" not in moving
]


@pytest.mark.parametrize(("shape", "with_bias", "moving"), CASES)
def test_value_and_tangent_equal_torchs_own(shape: tuple[int, ...], with_bias: bool, moving: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=with_bias, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(shape, dtype=torch.float64)
    with forward_ad.dual_level():
        if "x" in moving:
            x = forward_ad.make_dual(x, torch.randn_like(x))
        for name, parameter in list(layer.named_parameters()):
            if name in moving:
                layer._parameters[name] = forward_ad.make_dual(parameter.data, torch.randn_like(parameter))  # type: ignore[assignment]
        expected, expected_tangent = forward_ad.unpack_dual(layer(x))
        with linear_layers_written_out([layer]):
            found, tangent = forward_ad.unpack_dual(layer(x))
    torch.testing.assert_close(found, expected)
    assert (tangent is None) == (not moving)
    if moving:
        torch.testing.assert_close(tangent, expected_tangent)
    assert "forward" not in vars(layer)


def test_a_replaced_forward_is_left_alone() -> None:
    layer = nn.Linear(3, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with linear_layers_written_out([layer]):
        assert layer(x := torch.ones(3)) is x
    assert "forward" in vars(layer)
