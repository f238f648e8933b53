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


def number(default: float, minimum: float | None = None, maximum: float | None = None) -> Any:
    """An int or float field with inclusive bounds."""
    return dataclasses.field(default=default, metadata={"minimum": minimum, "maximum": maximum})


@dataclass
class InfluenceConfig:
    hessian_mode: str = choice("optimizer", "identity", "inverse")
    """The geometry in which two gradients meet. `optimizer`: infl(t→r) = g_tᵀ P g_r with P what the optimizer does to
    a gradient, 1/(√v̂+ε) for Adam; without a known optimizer it is `identity`. `identity`: g_tᵀ g_r. `inverse`:
    g_tᵀ H⁻¹ g_r with the regularised Gauss-Newton H below."""
    preconditioner_form: str = choice("auto", "exact", "factored")
    """P element by element (`exact`), or as an outer product of a vector of rows and one of columns (`factored`),
    which also works on projected gradients. `auto`: exact where gradients are not projected."""
    output_function: str = choice("training_loss", "log_prob_advantage", "log_prob_reward", "log_prob")
    """The *step*: the objective whose gradient a token contributes. The tracer rides on whatever backward pass it is
    shown; `gradtrace.attribution.factors.objectives` says when that is the training pass and builds the others."""
    target: str = choice("log_prob", "output_function")
    """What the step is asked about: the contrast of the responses' log-probs, or of the same function as the
    step's."""
    hessian_source: str = choice("response", "token")
    """H = Σ_r g_r g_rᵀ + λI over responses, or Σ_t g_t g_tᵀ + λI over response tokens (`position` credit)."""
    accepted_rejected_scope: str = choice("per_prompt", "all_selected")
    """Contrast and curvature over the responses of the token's own prompt, or over all selected ones."""
    contrastive_agg: str = choice("mean", "sum", "advantage")
    """Weight of response r in a token's score: ±1, ±1/n_accepted and ∓1/n_rejected, or its advantage."""
    exclude_self_response: bool = False
    """Leave the token's own response out of its score (and out of the means)."""
    reg_lambda: float = 0.0
    """λ of H, per module; ≤ 0 means by `reg_rule`."""
    reg_rule: str = choice("per_row", "per_dimension")
    """`per_row`: λ = reg_scale · trace(unregularised H) / n, n the responses (or tokens) in its sum. `per_dimension`,
    the older rule: 0.1 · trace / D, which is so small where n ≪ D that scores repeat the labels."""
    reg_scale: float = 1.0
    """Large: scores tend to those of `identity`. Small: they tend to the responses' labels."""
    response_reduction: str = choice("mean", "sum")
    """A response's gradient is the mean over its tokens, or the sum."""
    module_name_filter: tuple[str, ...] = ()
    """Regular expressions searched in module names. Empty: every trainable linear layer but the output head."""
    max_modules: int = number(0, minimum=0)
    """At most this many modules, evenly spaced over the depth of the model (0 = all)."""
    projection_dim_factor: int = number(32, minimum=0)
    """Project each side of a layer from d to max(1, d // factor) dimensions. 0 = no projection, exact."""
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
    credit: str = choice("loss_term", "tail", "position", "both")
    """What a token's gradient is. `position`: all that flows through its position, later tokens' terms included.
    `loss_term`: the gradient of its own term, for the groups of `loss_term_prompts`; every other group has `tail`:
    only the weights of the last block in which both are the same, for nothing on the pass of the step. `both`:
    position for every group, and loss terms for those."""
    loss_term_prompts: int = number(4, minimum=0)
    """How many groups of a `score()` have loss terms, which take a forward pass or two of theirs (0 = all)."""
    solver: str = choice("auto", "response", "gram", "cg", "dense")
    """How H⁻¹ is applied; `auto` takes the cheapest."""
    pairwise: bool = True
    """Keep infl(t→r) for every token and every response of its scope."""
    profile_timing: bool = False
    """Time each phase (timing_s/influence_{project, gradients, solve}); synchronises a GPU around each, so slower."""
    seed: int = 0
    """Seed of the projections; each also depends on its module's name, never on call order."""

    def __post_init__(self) -> None:
        if isinstance(self.module_name_filter, str):
            self.module_name_filter = (self.module_name_filter,)
        self.module_name_filter = tuple(self.module_name_filter)
        self.check()

    def check(self) -> None:
        """Raise for a value that a knob cannot have, and for knobs that contradict each other."""
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata
            if value not in limits.get("choices", (value,)):
                choices = ", ".join(map(repr, limits["choices"]))
                raise AttributionError(f"{field.name} is {value!r}; it can be {choices}")
            if limits.get("minimum") is not None and value < limits["minimum"]:
                raise AttributionError(f"{field.name} is {value}; it cannot be negative (0 = no limit)")
        if self.reg_scale <= 0:
            raise AttributionError(f"reg_scale is {self.reg_scale}; it must be above 0")
        if self.preconditioner_form == "exact" and self.projection_dim_factor:
            raise AttributionError(
                "preconditioner_form='exact' divides weight by weight, and projected gradients have none: use"
                " 'factored' or 'auto', or projection_dim_factor=0"
            )
        for cap in ("max_hessian_dim", "max_proj_vector_sum"):
            if not self.projection_dim_factor and getattr(self, cap) > 0:
                raise AttributionError(
                    f"{cap}={getattr(self, cap)} caps a projection, and projection_dim_factor=0 has none: set"
                    f" projection_dim_factor=1, which projects a layer only as far as the cap asks, or {cap}=0"
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

    @staticmethod
    def older(**knobs: Any) -> InfluenceConfig:
        """The form of earlier versions: H⁻¹ with a small λ, position credit, and one function as step and target."""
        form = {"hessian_mode": "inverse", "reg_rule": "per_dimension", "credit": "position"}
        return InfluenceConfig(**{**form, "target": "output_function", "loss_term_prompts": 0, **knobs})

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

    @property
    def wants_loss_term(self) -> bool:
        return self.credit in ("loss_term", "both")

    @property
    def tail_only(self) -> bool:
        """Whether the pass of the step scores the weights of the tail alone."""
        return self.credit in ("loss_term", "tail")

    @property
    def needs_prompts(self) -> bool:
        """Whether the scores of a backward pass need what flows into each response's prompt. Those of the tail do not,
        and loss terms neither where one contrast of log-probs is all that they ask about."""
        one_contrast = self.hessian_mode != "inverse" and self.target == "log_prob" and not self.exclude_self_response
        return not self.tail_only or (self.wants_loss_term and not one_contrast)

    def captured(self, tokens: int) -> int:
        """How many of a response's tokens are scored."""
        return min(tokens, self.max_tokens_per_response or tokens)
