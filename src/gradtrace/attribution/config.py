"""The knobs of the influence trace. Names and meanings are the same under `trainer.influence_trace` in every host."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from gradtrace.attribution.errors import AttributionError


def choice(default: str, *others: str) -> Any:
    """A string field that accepts its default and `others`."""
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


def number(default: float | None, minimum: float | None = None, maximum: float | None = None) -> Any:
    """An int or float field with inclusive bounds; `default` may be None for "not set"."""
    return dataclasses.field(default=default, metadata={"minimum": minimum, "maximum": maximum})


@dataclass
class InfluenceConfig:
    """By default a token's score is its part: what the coming step does to its own term of the loss (parts.py). Other
    values of `hessian_mode`, `credit`, `output_function` or `target` select scores from captured factors (factors/).
    """

    hessian_mode: str = choice("optimizer", "identity", "inverse")
    """What lies between two gradients. `optimizer`: the optimizer's preconditioner P, 1/(√v̂+ε) for Adam. `identity`:
    nothing. `inverse`: H⁻¹ with the regularised Gauss-Newton H below."""
    credit: str = choice("loss_term", "position", "both")
    """What a token's gradient is. `loss_term`: that of its own term. `position`: all that flows through its position,
    later tokens' terms included. `both`: a score of each."""
    output_function: str = choice("training_loss", "log_prob_advantage", "log_prob_reward", "log_prob")
    """The objective whose gradient a token contributes."""
    target: str = choice("auto", "log_prob", "output_function")
    """The objective that the score is about: the contrast of the responses' log-probs (`log_prob`), or the same as the
    token's. `auto`: the loss as trained for parts, `log_prob` for scores from captured factors."""
    accepted_rejected_scope: str = choice("auto", "per_prompt", "all_selected")
    """Whose objective the score is about: that of the token's own prompt, or of all selected responses. `auto`:
    `all_selected` for parts, `per_prompt` for scores from captured factors."""
    measure: int | str = "auto"
    """Groups of a step that are measured as well: parts in their own prompt's objective, and what the step really
    changed. `auto`: as many as cost at most 3 % of the update, at least one in ten steps; `all`; or a number."""
    pairwise: bool = True
    """Keep the effect of each token on each response: of measured groups, or of the scope of captured factors."""

    # What follows belongs to scores from captured factors.
    contrastive_agg: str = choice("mean", "sum", "advantage")
    """Weight of response r in a token's score: ±1/n_accepted and ∓1/n_rejected, ±1, or its advantage."""
    exclude_self_response: bool = False
    """Leave the token's own response out of its score (and out of the means)."""
    response_reduction: str = choice("mean", "sum")
    """A response's gradient is the mean over its tokens, or the sum."""
    preconditioner_form: str = choice("auto", "exact", "factored")
    """P element by element (`exact`), or as an outer product of a vector of rows and one of columns (`factored`),
    which also works on projected gradients. `auto`: exact where gradients are not projected."""
    hessian_source: str = choice("response", "token")
    """H = Σ_r g_r g_rᵀ + λI over responses, or Σ_t g_t g_tᵀ + λI over response tokens (`position` credit)."""
    reg_lambda: float = 0.0
    """λ of H, per module; ≤ 0 means by `reg_rule`."""
    reg_rule: str = choice("per_row", "per_dimension")
    """`per_row`: λ = reg_scale · trace(unregularised H) / n, n the responses (or tokens) in its sum. `per_dimension`,
    the older rule: 0.1 · trace / D, which is so small where n ≪ D that scores repeat the labels."""
    reg_scale: float = 1.0
    """Large: scores tend to those of `identity`. Small: they tend to the responses' labels."""
    solver: str = choice("auto", "response", "gram", "cg", "dense")
    """How H⁻¹ is applied; `auto` takes the cheapest."""
    module_name_filter: tuple[str, ...] = ()
    """Regular expressions searched in module names. Empty: every trainable linear layer but the output head."""
    max_modules: int = number(0, minimum=0)
    """At most this many modules, evenly spaced over the depth of the model (0 = all)."""
    projection_dim_factor: int | None = number(None, minimum=0)
    """Project each side of a layer from d to max(1, d // factor) dimensions. Unset or 0: no projection, exact."""
    max_proj_vector_sum: int = number(0, minimum=-1)
    """Shrink the projection until k_in + k_out fits (0 or −1 = no cap)."""
    max_hessian_dim: int = number(0, minimum=-1)
    """Shrink the projection until k_in · k_out fits (0 or −1 = no cap)."""
    max_tokens_per_response: int = number(0, minimum=0)
    """Score only the first so many tokens of a response (0 = all). Its gradient still uses all of them."""
    grad_offload_to_cpu: bool = False
    """Keep stored factors in host memory."""
    force_gpu_compute: bool = False
    """Move offloaded factors back to the model's device for scoring."""
    profile_timing: bool = False
    """Time each phase (timing_s/influence_{project, gradients, solve}); synchronises a GPU around each, so slower."""
    seed: int = 0
    """Seed of the projections; each also depends on its module's name, never on call order."""

    def __post_init__(self) -> None:
        if isinstance(self.module_name_filter, str):
            self.module_name_filter = (self.module_name_filter,)
        self.module_name_filter = tuple(self.module_name_filter)
        self.check()

    # ------------------------------------------------------------ what the knobs come to

    @property
    def is_parts(self) -> bool:
        """Whether the score is a token's part of the coming step; otherwise it is made of captured factors."""
        return (
            self.hessian_mode == "optimizer"
            and self.credit == "loss_term"
            and self.output_function == "training_loss"
            and self.target in ("auto", "output_function")
        )

    @property
    def about(self) -> str:
        """`target` without `auto`."""
        if self.target != "auto":
            return self.target
        return "output_function" if self.is_parts else "log_prob"

    @property
    def scope(self) -> str:
        """`accepted_rejected_scope` without `auto`."""
        if self.accepted_rejected_scope != "auto":
            return self.accepted_rejected_scope
        return "all_selected" if self.is_parts else "per_prompt"

    @property
    def wants_loss_term(self) -> bool:
        return self.credit in ("loss_term", "both")

    def captured(self, tokens: int) -> int:
        """How many of a response's tokens are scored."""
        return min(tokens, self.max_tokens_per_response or tokens)

    @staticmethod
    def older(**knobs: Any) -> InfluenceConfig:
        """The original's definition: H⁻¹ with a small λ, position credit, one function as step and target."""
        form: dict[str, Any] = {
            "hessian_mode": "inverse",
            "reg_rule": "per_dimension",
            "credit": "position",
            "target": "output_function",
            "accepted_rejected_scope": "per_prompt",
            "projection_dim_factor": 32,
        }
        return InfluenceConfig(**form | knobs)

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Raise for a value that a knob cannot have, and for knobs that contradict each other."""
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata
            if value not in limits.get("choices", (value,)):
                choices = ", ".join(map(repr, limits["choices"]))
                raise AttributionError(f"{field.name} is {value!r}; it can be {choices}")
            if limits.get("minimum") is not None and value is not None and value < limits["minimum"]:
                raise AttributionError(f"{field.name} is {value}; it cannot be negative (0 = no limit)")
        if isinstance(self.measure, bool) or (self.measure not in ("auto", "all") and not _is_count(self.measure)):
            raise AttributionError(f"measure is {self.measure!r}; it can be 'auto', 'all' or a number of groups")
        if self.is_parts:
            self._check_parts()
        else:
            self._check_factors()

    def _check_parts(self) -> None:
        given = [name for name in FACTOR_KNOBS if self._is_given(name)]
        if given:
            raise AttributionError(
                f"{', '.join(f'{name}={getattr(self, name)!r}' for name in given)} belongs to scores from captured"
                f" factors: set hessian_mode=identity|inverse or credit=position, or leave {given[0]} out"
            )

    def _is_given(self, name: str) -> bool:
        value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
        return (tuple(value) if isinstance(value, list) else value) != default

    def _check_factors(self) -> None:
        if self.measure != "auto":
            raise AttributionError(
                f"measure={self.measure!r} belongs to the default score, and hessian_mode={self.hessian_mode!r},"
                f" credit={self.credit!r}, output_function={self.output_function!r}, target={self.target!r} are made of"
                " captured factors: leave measure out"
            )
        if self.reg_scale <= 0:
            raise AttributionError(f"reg_scale is {self.reg_scale}; it must be above 0")
        if self.preconditioner_form == "exact" and self.projection_dim_factor:
            raise AttributionError(
                "preconditioner_form='exact' divides weight by weight, and projected gradients have none: use"
                " 'factored' or 'auto', or leave projection_dim_factor out"
            )
        for cap in ("max_hessian_dim", "max_proj_vector_sum"):
            if not self.projection_dim_factor and getattr(self, cap) > 0:
                raise AttributionError(
                    f"{cap}={getattr(self, cap)} caps a projection, and without projection_dim_factor there is none:"
                    f" set projection_dim_factor=1, which projects a layer only as far as the cap asks, or {cap}=0"
                )
        for pattern in self.module_name_filter:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                glob = " It looks like a glob: `mlp` alone finds every name with mlp in it." if "*" in pattern else ""
                raise AttributionError(
                    f"module_name_filter: {pattern!r} is no regular expression ({error}).{glob}"
                ) from None
        if self.force_gpu_compute and not self.grad_offload_to_cpu:
            raise AttributionError(
                "force_gpu_compute moves factors that grad_offload_to_cpu keeps in host memory back to the GPU: set "
                "grad_offload_to_cpu=true as well, or leave it out"
            )
        self._check_solver()

    def _check_solver(self) -> None:
        if self.solver in ("auto", "dense"):
            return
        if self.hessian_mode != "inverse":
            raise AttributionError(
                f"solver={self.solver!r} has nothing to solve with hessian_mode={self.hessian_mode!r}; leave it at"
                " 'auto'"
            )
        if (self.solver == "response") != (self.hessian_source == "response"):
            fitting = "'response' or 'dense'" if self.hessian_source == "response" else "'gram', 'cg' or 'dense'"
            raise AttributionError(
                f"solver={self.solver!r} does not solve hessian_source={self.hessian_source!r}; use {fitting}"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


FACTOR_KNOBS = (
    *("contrastive_agg", "exclude_self_response", "response_reduction", "preconditioner_form", "hessian_source"),
    *("reg_lambda", "reg_rule", "reg_scale", "solver", "module_name_filter", "max_modules", "projection_dim_factor"),
    *("max_proj_vector_sum", "max_hessian_dim", "max_tokens_per_response", "grad_offload_to_cpu", "force_gpu_compute"),
    *("profile_timing", "seed"),
)
"""Knobs that only scores from captured factors read."""
