"""The knobs of the influence trace. Names and meanings are the same under `trainer.influence_trace` in every host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gradtrace.attribution.errors import AttributionError

HessianMode = Literal["inverse", "identity"]
HessianSource = Literal["response", "token"]
OutputFunction = Literal["training_loss", "log_prob_advantage", "log_prob_reward", "log_prob"]
Scope = Literal["per_prompt", "all_selected"]
ContrastiveAgg = Literal["sum", "mean", "advantage"]
ResponseReduction = Literal["mean", "sum"]
Credit = Literal["position", "loss_term", "both"]
Solver = Literal["auto", "response", "gram", "cg", "dense"]

CHOICES = {
    "hessian_mode": get_args(HessianMode),
    "hessian_source": get_args(HessianSource),
    "output_function": get_args(OutputFunction),
    "accepted_rejected_scope": get_args(Scope),
    "contrastive_agg": get_args(ContrastiveAgg),
    "response_reduction": get_args(ResponseReduction),
    "credit": get_args(Credit),
    "solver": get_args(Solver),
}


@dataclass(frozen=True)
class InfluenceConfig:
    hessian_mode: HessianMode = "inverse"
    """`inverse`: infl(t→r) = g_tᵀ H⁻¹ g_r with the regularised Gauss-Newton H below. `identity`: H = I."""
    hessian_source: HessianSource = "response"
    """H = Σ_r g_r g_rᵀ + λI over responses, or Σ_t g_t g_tᵀ + λI over response tokens (`position` credit)."""
    output_function: OutputFunction = "training_loss"
    """The objective whose gradients are traced. The tracer rides on whatever backward pass it is shown;
    `gradtrace.attribution.objectives` says when that is the training pass and builds the others."""
    accepted_rejected_scope: Scope = "per_prompt"
    """Contrast and curvature over the responses of the token's own prompt, or over all selected ones."""
    contrastive_agg: ContrastiveAgg = "mean"
    """Weight of response r in a token's score: ±1, ±1/n_accepted and ∓1/n_rejected, or its advantage."""
    exclude_self_response: bool = False
    """Leave the token's own response out of its score (and out of the means)."""
    reg_lambda: float = 0.0
    """λ of H, per module; ≤ 0 means 0.1 · trace(unregularised H) / D."""
    response_reduction: ResponseReduction = "mean"
    """A response's gradient is the mean over its tokens, or the sum."""
    module_name_filter: tuple[str, ...] = ()
    """Regular expressions searched in module names. Empty: every trainable linear layer but the output head."""
    max_modules: int = 0
    """At most this many modules, evenly spaced over the depth of the model (0 = all)."""
    projection_dim_factor: int = 32
    """Project each side of a layer from d to max(1, d // factor) dimensions. 0 = no projection, exact."""
    max_proj_vector_sum: int = 0
    """Shrink the projection until k_in + k_out fits (0 or −1 = no cap)."""
    max_hessian_dim: int = 0
    """Shrink the projection until k_in · k_out fits (0 or −1 = no cap)."""
    max_tokens_per_response: int = 0
    """Score only the first so many tokens of a response (0 = all). Its gradient still uses all of them."""
    grad_offload_to_cpu: bool = False
    """Keep stored factors in host memory."""
    force_gpu_compute: bool = False
    """Move offloaded factors back to the model's device for scoring."""
    credit: Credit = "position"
    """`position`: what flows through the token's position. `loss_term`: the token's own term. Or both."""
    solver: Solver = "auto"
    """How H⁻¹ is applied; `auto` takes the cheapest."""
    pairwise: bool = True
    """Keep infl(t→r) for every token and every response of its scope."""
    profile_timing: bool = False
    """Time each phase (timing_s/influence_{project, gradients, solve}); synchronises a GPU around each, so slower."""
    seed: int = 0
    """Seed of the projections; each also depends on its module's name, never on call order."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise AttributionError(f"{name} is {value!r}; it can be {', '.join(map(repr, choices))}")
        for name in ("projection_dim_factor", "max_modules", "max_tokens_per_response"):
            if getattr(self, name) < 0:
                raise AttributionError(
                    f"{name} is {getattr(self, name)}; it cannot be negative (0 = no limit)"
                )
        if isinstance(self.module_name_filter, str):
            object.__setattr__(self, "module_name_filter", (self.module_name_filter,))
        object.__setattr__(self, "module_name_filter", tuple(self.module_name_filter))
        self._check_solver()

    def _check_solver(self) -> None:
        if self.solver in ("auto", "dense"):
            return
        if self.hessian_mode == "identity":
            raise AttributionError(
                f"solver={self.solver!r} has nothing to solve with hessian_mode='identity'; leave it at 'auto'"
            )
        if (self.solver == "response") != (self.hessian_source == "response"):
            fitting = (
                "'response' or 'dense'" if self.hessian_source == "response" else "'gram', 'cg' or 'dense'"
            )
            raise AttributionError(
                f"solver={self.solver!r} does not solve hessian_source={self.hessian_source!r}; use {fitting}"
            )

    @property
    def wants_loss_term(self) -> bool:
        return self.credit in ("loss_term", "both")
