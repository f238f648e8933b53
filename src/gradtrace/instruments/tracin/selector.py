"""TracIn scores: which responses help a validation objective, one number each.

    I_r = ⟨∇L_val(θ), ∇L_train(θ; r)⟩        positive = a gradient step on response r lowers the validation loss

Two ways, the same numbers: *tangent* takes the derivative of every response's loss along the validation gradient, in
one forward-mode pass; *ghost* contracts the factors of a backward pass with it. Neither forms a gradient per
response. Needs torch and a model; our trainer is not involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError, GhostProduct, directional_derivative
from gradtrace.policy.padding_row import padding_row_is_constant
from gradtrace.policy.policy import embedding_output

METHODS = ("auto", "ghost", "tangent")
PARAMETERS = ("linear", "all")
VALUE_HEADS = ("v_head", "value_head")
"""Parts of parameter names that never count: a value head learns another objective."""
SIGN = "positive = a gradient step on this response lowers the validation loss"
UNIT = "validation loss per unit of learning rate"

Loss = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Piece:
    """Responses that go through the model together."""

    rows: Tensor
    """long[r]: their numbers, 0 … R−1."""
    losses: Loss
    """Runs the model and returns float[r]: each response's own term of the training loss."""
    response: Tensor | None = None
    """For ghost: long[B], the response of each input row, or long[B, S] when packed; −1 = ignore."""
    tokens: Tensor | None = None
    """For ghost: bool[B, S], True where `input_ids` holds a response token."""
    positions: Mapping[str, Tensor] = field(default_factory=dict)
    """For ghost: flat positions that a module sees, where it does not see all (an output head on responses)."""


class TracInSelector:
    """Scores responses against a validation gradient.

    ```python
    selector = TracInSelector(model)
    selector.set_validation(lambda: validation_loss(model))        # a function, or several: their sum
    scores = selector.score([Piece(rows, lambda: losses(model))])  # float64[R], positive = helpful
    kept = select(scores, "drop_lowest").kept                      # gradtrace.instruments.tracin.rules
    ```

    `parameters="linear"` counts weights and biases of linear layers (LoRA's A and B are such, tied embeddings too),
    `"all"` every trainable parameter. Value heads never count. Neither weights nor `.grad` change.
    """

    def __init__(self, model: nn.Module, method: str = "auto", parameters: str = "linear") -> None:
        if method not in METHODS:
            raise AttributionError(f"method is {method!r}; it can be {', '.join(METHODS)}")
        if parameters not in PARAMETERS:
            raise AttributionError(f"parameters is {parameters!r}; it can be {', '.join(PARAMETERS)}")
        if method == "ghost" and parameters == "all":
            raise AttributionError(
                "method='ghost' sees linear layers only: use parameters='linear', or method='tangent'"
            )
        self.model = model
        self.parameters = parameters
        self.method = method
        if method == "auto":
            self.method = choose_method(model) if parameters == "linear" else "tangent"
        if self.method == "tangent" and getattr(model, "is_gradient_checkpointing", False):
            raise AttributionError(
                "forward mode does not go together with gradient checkpointing: use method='ghost' and"
                " parameters='linear', or turn checkpointing off"
            )
        self.counted = countable(model, parameters, VALUE_HEADS)
        self.gradient: dict[str, Tensor] = {}
        self._ghost: GhostProduct | None = None
        self.loss = 0.0
        """Loss of the validation batch."""

    # ------------------------------------------------------------ the validation gradient

    def set_validation(self, losses: Loss | Iterable[Loss]) -> dict[str, Tensor]:
        """The gradient of the sum of these scalar losses (one for each micro-batch) is what scores refer to."""
        gradient, self.loss = self.gradient_of([losses] if callable(losses) else losses)
        self.set_validation_gradient(gradient)
        return self.gradient

    def set_validation_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """One that was computed elsewhere (by parameter name); what does not count is left out of it."""
        self.gradient = {name: value.detach() for name, value in gradient.items() if name in self.counted}
        if not self.gradient:
            raise AttributionError(
                f"the validation gradient names none of the {len(self.counted)} parameters that count;"
                f" its first names are {list(gradient)[:3]}"
            )

    def gradient_of(self, losses: Iterable[Loss]) -> tuple[dict[str, Tensor], float]:
        """Gradient and value of the sum of scalar losses, over the parameters that count. `.grad` stays as it is."""
        total: dict[str, Tensor] = {}
        value, count = 0.0, 0
        for loss in losses:
            with torch.enable_grad():
                result = loss()
            count += 1
            if not result.requires_grad:
                raise AttributionError(
                    "the validation loss does not depend on any trainable parameter: was it computed without"
                    " gradients, or are all weights frozen?"
                )
            found = torch.autograd.grad(result, list(self.counted.values()), allow_unused=True)
            value += float(result.detach())
            for name, part in zip(self.counted, found, strict=True):
                if part is not None:
                    total[name] = total[name] + part if name in total else part
        if not count:
            raise AttributionError("the validation set is empty: there is no loss to take a gradient of")
        return total, value

    # ------------------------------------------------------------ scores

    def score(self, pieces: Iterable[Piece], responses: int | None = None) -> Tensor:
        """float64[R]: I_r; NaN for a response that is in no piece."""
        self._check_gradient()
        by_row: dict[int, float] = {}
        for piece in pieces:
            values = self._tangent(piece) if self.method == "tangent" else self._ghost_pass(piece)
            by_row.update(zip(piece.rows.tolist(), values.double().tolist(), strict=True))
        size = responses if responses is not None else max(by_row, default=-1) + 1
        scores = torch.full((size,), torch.nan, dtype=torch.float64)
        for row, value in by_row.items():
            scores[row] = value
        return scores

    def _check_gradient(self) -> None:
        if not self.gradient:
            raise AttributionError("there is no validation gradient yet: call set_validation first")

    def _tangent(self, piece: Piece) -> Tensor:
        # A response that holds the padding token must score the same by both methods.
        with padding_row_is_constant(self.model):
            return directional_derivative(self.model, piece.losses, self.gradient)

    def _ghost_pass(self, piece: Piece) -> Tensor:
        """A backward pass of our own, down to the embeddings' output: weight gradients are not even computed."""
        if piece.response is None or piece.tokens is None:
            raise AttributionError(
                "method='ghost' needs to know which position belongs to which response: give the Piece `response`"
                " and `tokens`, or use method='tangent'"
            )
        with (
            self.capture(response=piece.response, tokens=piece.tokens, positions=piece.positions),
            embedding_output(self.model) as outputs,
            torch.enable_grad(),
        ):
            total = piece.losses().sum()
            torch.autograd.grad(total, outputs or list(self.counted.values()), allow_unused=True)
        return self.captured(int(piece.rows.max()) + 1)[piece.rows]

    @contextmanager
    def capture(
        self, *, response: Tensor, tokens: Tensor, positions: Mapping[str, Tensor] | None = None, **more: Any
    ) -> Iterator[None]:
        """A backward pass of yours, inside, gives the scores of its responses as well: `captured(R)` afterwards."""
        self._check_gradient()
        if self._ghost is None:
            self._ghost = GhostProduct(self.model, self.gradient)
        with self._ghost.capture(response=response, tokens=tokens, positions=positions, **more):
            yield

    def captured(self, responses: int) -> Tensor:
        """float64[R]: scores of the backward passes inside `capture` since the last call. Hooks come off."""
        if self._ghost is None:
            raise AttributionError("nothing was captured: no backward pass ran inside `with selector.capture(…)`")
        self._ghost.close()
        scores = self._ghost.scores(responses)
        self._ghost = None
        return scores


def choose_method(model: nn.Module) -> str:
    """The cheaper one. Both take three matrix products per linear layer; forward mode keeps no activations, but
    needs attention in its plain form and no gradient checkpointing (benchmarks/tracin.py measures both)."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
    return "ghost" if checkpointing or attention not in ("sdpa", "eager") else "tangent"


def countable(model: nn.Module, parameters: str, exclude: Sequence[str]) -> dict[str, nn.Parameter]:
    """The trainable parameters that scores are taken over."""
    trainable = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and not any(part in name.split(".") for part in exclude)
    }
    if parameters == "linear":
        # GhostProduct decides what a linear layer's parameter is, so that both methods count the same.
        ghost = GhostProduct(model, {name: p.detach() for name, p in trainable.items()})
        ghost.close()
        trainable = {name: p for name, p in trainable.items() if name not in ghost.missed}
    if not trainable:
        raise AttributionError("no trainable parameter counts: every weight is frozen or excluded")
    return trainable
