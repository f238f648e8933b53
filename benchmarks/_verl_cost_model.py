"""What a training step costs in memory, floating-point operations and bytes on the wire, with and without the trace.

Formulas from sizes alone; `docs/scaling.md` is made of them (`python -m benchmarks._verl_cost_model`), and a
test compares them with what one and two CPU ranks really do. Notation: N parameters, T tokens of a step, W workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace.attribution.factors.layers import projected_dims

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class ModelShape:
    """A transformer as the trace sees it: the linear layers of one block, times the number of blocks."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(d_out, d_in) of one block: q, k, v, o, gate, up, down."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (queries, self.hidden),
            (keys, self.hidden),
            (keys, self.hidden),
            (self.hidden, queries),
            (self.intermediate, self.hidden),
            (self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def linear_parameters(self) -> int:
        return self.layers * sum(out * inner for out, inner in self.linears)

    @property
    def parameters(self) -> int:
        """Without norms and biases, which are too few to matter; embedding and head counted once each."""
        return self.linear_parameters + 2 * self.vocabulary * self.hidden

    def projected(self, factor: int, max_dim: int = 0) -> list[tuple[int, int, int, int]]:
        """(d_out, d_in, k_out, k_in) of one block's layers."""
        return [(o, i, *projected_dims(o, i, factor, 0, max_dim)) for o, i in self.linears]


@dataclass(frozen=True)
class Workload:
    """One training step, one optimizer step of it."""

    responses: int
    group_size: int
    prompt_tokens: int
    """Per response."""
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.responses * (self.prompt_tokens + self.response_tokens)


# ---------------------------------------------------------------- training itself


def training_flops(shape: ModelShape, load: Workload) -> float:
    """Forward and backward, 6·N·T, and attention's 12·layers·hidden·length per token (causal: half of it)."""
    length = load.prompt_tokens + load.response_tokens
    attention = 6.0 * shape.layers * shape.heads * shape.head_dim * length * load.tokens
    matrices = 6.0 * (shape.linear_parameters + shape.vocabulary * shape.hidden) * load.tokens
    return matrices + attention


def fsdp_bytes_per_rank(parameters: int, workers: int, micro_batches: int, mixed: bool = True) -> float:
    """Sent by a rank in one mini-batch: weights gathered for the forward and again for the backward pass of every
    micro-batch, gradients scattered once per micro-batch (verl's default does not defer them)."""
    share = (workers - 1) / workers
    weight = BF16 if mixed else FP32
    return micro_batches * parameters * share * (2 * weight + FP32)


def state_bytes_per_rank(parameters: int, workers: int) -> float:
    """float32 weights, gradients and two moments of Adam, sharded."""
    return 4 * FP32 * parameters / workers


# ---------------------------------------------------------------- what the default score adds

PASSES = 2
"""At the weights before and after the step: training's own pass is in bf16, and the difference needs float32."""


def forward_flops(shape: ModelShape, load: Workload) -> float:
    """Of one pass without gradients over the whole step."""
    return training_flops(shape, load) / 3


def parts_bytes_per_rank(parameters: int, workers: int, micro_batches: int, passes: int = PASSES) -> float:
    """Sent by a rank: float32 weights gathered once in each micro-batch of each pass."""
    return passes * micro_batches * parameters * (workers - 1) / workers * FP32


def copy_bytes_per_rank(parameters: int, workers: int) -> float:
    """The weights that are put back, sharded as they are."""
    return FP32 * parameters / workers


# ---------------------------------------------------------------- what scores from captured factors add


def capture_flops(shape: ModelShape, load: Workload, factor: int) -> float:
    """Projecting u and v of every position, and Σ u vᵀ of every response."""
    per_token = 0
    for out, inner, k_out, k_in in shape.projected(factor):
        if (k_out, k_in) != (out, inner):
            per_token += 2 * (out * k_out + inner * k_in)
        per_token += 2 * k_out * k_in
    return float(shape.layers * per_token * load.tokens)


def score_flops(shape: ModelShape, load: Workload, factor: int, pairwise: bool = True) -> float:
    """Response curvature, per group: the kernel K, the solved gradients, and u ᵀ X v of every token and direction."""
    directions = load.group_size if pairwise else 1
    per_group = 0
    for _, _, k_out, k_in in shape.projected(factor):
        dim = k_out * k_in
        per_group += 2 * load.group_size**2 * dim  # K
        per_group += 2 * load.group_size * directions * dim  # X
        per_group += 2 * load.group_size * load.response_tokens * directions * (dim + k_in)
    return float(shape.layers * per_group * load.responses / load.group_size)


def response_gradient_entries(shape: ModelShape, factor: int) -> int:
    """Entries of one response's projected gradient, all traced layers."""
    return shape.layers * sum(k_out * k_in for _, _, k_out, k_in in shape.projected(factor))


def trace_bytes(shape: ModelShape, load: Workload, factor: int, split_share: float = 1.0) -> float:
    """All-reduced once per step: the projected gradients of responses in groups that are split over ranks. Each rank
    sends about twice of it (ring)."""
    return FP32 * split_share * load.responses * response_gradient_entries(shape, factor)


def stored_factor_bytes(shape: ModelShape, load: Workload, factor: int, workers: int) -> float:
    """Per rank, from the backward pass to scoring: projected factors of response tokens, and response gradients."""
    per_token = shape.layers * sum(k_out + k_in for _, _, k_out, k_in in shape.projected(factor))
    responses = load.responses / workers
    return FP32 * responses * (load.response_tokens * per_token + response_gradient_entries(shape, factor))


def joined_gradient_bytes(shape: ModelShape, load: Workload, factor: int) -> float:
    """Per rank, while one layer is scored: the gradients of all responses of split groups, largest layer."""
    largest = max(k_out * k_in for _, _, k_out, k_in in shape.projected(factor))
    return float(FP32 * load.responses * largest)


# ---------------------------------------------------------------- the table

SHAPES = (
    ModelShape("1.5B (Qwen2.5)", 28, 1536, 8960, 12, 2, 128, 151_936),
    ModelShape("7B (Qwen2.5)", 28, 3584, 18944, 28, 4, 128, 152_064),
    ModelShape("32B (Qwen2.5)", 64, 5120, 27648, 40, 8, 128, 152_064),
    ModelShape("70B (Llama 3)", 80, 8192, 28672, 64, 8, 128, 128_256),
)
GPUS = {
    "1.5B (Qwen2.5)": (8, 64),
    "7B (Qwen2.5)": (8, 64, 256),
    "32B (Qwen2.5)": (64, 256, 512),
    "70B (Llama 3)": (128, 512, 1024),
}
MICRO_BATCH_TOKENS = 32_768
LOAD = Workload(responses=512, group_size=8, prompt_tokens=512, response_tokens=2048)


def factor_for(workers: int) -> int:
    """While there is a group for every rank, groups stay whole and nothing travels. Beyond, gradients do, and their
    number falls with the square of the projection factor."""
    return 32 if workers <= LOAD.responses // LOAD.group_size else 256


def parts_table() -> str:
    """Markdown: what the default score adds to the same step."""
    lines = [
        "| model | GPUs | FLOPs of the update | of a forward pass | FSDP sends per GPU | two passes send | "
        "states per GPU | copy per GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        flops, forward = training_flops(shape, LOAD), forward_flops(shape, LOAD)
        for workers in GPUS[shape.name]:
            micro_batches = max(1, round(LOAD.tokens / workers / MICRO_BATCH_TOKENS))
            lines.append(
                f"| {shape.name} | {workers} | {flops:.2e} | {forward:.2e} | "
                f"{gib(fsdp_bytes_per_rank(shape.parameters, workers, micro_batches))} | "
                f"{gib(parts_bytes_per_rank(shape.parameters, workers, micro_batches))} | "
                f"{gib(state_bytes_per_rank(shape.parameters, workers))} | "
                f"{gib(copy_bytes_per_rank(shape.parameters, workers))} |"
            )
    return "\n".join(lines)


def table() -> str:
    """Markdown: per model and number of GPUs, a step of 512 responses (64 prompts × 8) of 512 + 2,048 tokens."""
    lines = [
        "| model | GPUs | factor | FLOPs of the step | trace adds | FSDP sends per GPU | trace sends per GPU | share | "
        "states per GPU | factors of the trace per GPU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        flops = training_flops(shape, LOAD)
        for workers in GPUS[shape.name]:
            factor = factor_for(workers)
            extra = capture_flops(shape, LOAD, factor) + score_flops(shape, LOAD, factor)
            micro_batches = max(1, round(LOAD.tokens / workers / MICRO_BATCH_TOKENS))
            fsdp = fsdp_bytes_per_rank(shape.parameters, workers, micro_batches)
            split = float(workers > LOAD.responses // LOAD.group_size)
            trace = 2 * trace_bytes(shape, LOAD, factor, split)
            lines.append(
                f"| {shape.name} | {workers} | {factor} | {flops:.2e} | {100 * extra / flops:.1f} % | {gib(fsdp)} | "
                f"{gib(trace)} | {100 * trace / fsdp:.2f} % | "
                f"{gib(state_bytes_per_rank(shape.parameters, workers))} | "
                f"{gib(stored_factor_bytes(shape, LOAD, factor, workers))} |"
            )
    return "\n".join(lines)


def gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"


if __name__ == "__main__":
    print(f"{parts_table()}\n\n{table()}")
