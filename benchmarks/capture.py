"""What capture costs: forward and backward with the tracer scoring every q, k, v, o, gate, up and down projection
inside the backward pass (inverse Hessian of responses, pairwise scores, projection factor 32), against without; in CPU
seconds on one thread, which other programs hardly change.

And loss-term credit of all tokens of a batch: one forward-mode pass against one backward pass per token.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Timing, alternate, emit, load_smollm2, parse_arguments, tiny_model
from gradtrace.attribution import InfluenceConfig, InfluenceTrace, InfluenceTracer, directional_derivative

MODULES = (r"\.(q|k|v|o|gate|up|down)_proj$",)


class Batch:
    """Random responses: groups of `n`, every sequence prompt + response tokens long."""

    def __init__(self, vocabulary: int, groups: int, n: int, prompt: int, response: int) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = groups * n
        self.ids = torch.randint(0, vocabulary, (rows, prompt + response), generator=generator)
        self.tokens = torch.zeros(self.ids.shape, dtype=torch.bool)
        self.tokens[:, prompt:] = True
        self.group = torch.arange(groups).repeat_interleave(n)
        self.accepted = torch.arange(rows) % 2 == 0
        self.advantages = self.accepted.float()[:, None] * 2 - 1
        self.response = torch.arange(rows)

    def loss(self, model: nn.Module) -> Tensor:
        logits = model(input_ids=self.ids, use_cache=False).logits[:, :-1]
        scores = -nn.functional.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten(), reduction="none")
        return -(scores.view(len(self.ids), -1) * self.tokens[:, 1:] * self.advantages).sum()


def capture_overhead(model: nn.Module, batch: Batch, short: Batch, rounds: int) -> tuple[Timing, dict[str, Any]]:
    """On `batch`; both sides run on `short` once before, to warm up."""
    tracer = InfluenceTracer(model, config=InfluenceConfig.older(module_name_filter=MODULES, projection_dim_factor=32))
    traces: list[InfluenceTrace] = []

    def traced(of: Batch = batch) -> None:
        model.zero_grad()
        with tracer.capture(response=of.response, tokens=of.tokens, accepted=of.accepted, group=of.group):
            of.loss(model).backward()
        traces[:] = [tracer.score()]

    def plain_without_hooks(of: Batch = batch) -> None:
        with tracer.factors.hooks.paused():
            model.zero_grad()
            of.loss(model).backward()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for work in (traced, plain_without_hooks):
        work(short)
    timing = alternate(traced, plain_without_hooks, rounds, warmup=0, clock=time.process_time)
    torch.set_num_threads(threads)
    tracer.close()
    rows = traces[-1].metrics["influence_trace/rows_emitted"]
    return timing, timing.detail() | {"tokens_scored": rows, "modules": len(tracer.blocks)}


def loss_term_speedup(model: nn.Module, vocabulary: int, tokens: int, sample: int) -> tuple[Timing, dict[str, Any]]:
    """T backward passes are timed on `sample` of the tokens, spread evenly, and multiplied up."""
    batch = Batch(vocabulary, 1, 1, 16, tokens)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.dim() == 2 and "proj" in name}
    parameters = [dict(model.named_parameters())[name] for name in direction]

    def terms() -> Tensor:
        logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
        scores = -nn.functional.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
        return scores[batch.tokens[:, 1:].flatten()]

    values = terms()
    chosen = torch.linspace(0, tokens - 1, sample).long().tolist()
    derivatives: list[Tensor] = []

    def backward_passes() -> None:
        derivatives.clear()
        for token in chosen:
            gradients = torch.autograd.grad(values[token], parameters, retain_graph=True)
            products = [(g * direction[n]).sum() for n, g in zip(direction, gradients, strict=True)]
            derivatives.append(torch.stack(products).sum())

    result: list[Tensor] = []

    def forward_mode() -> None:
        result[:] = [directional_derivative(model, terms, direction)]

    timed = alternate(backward_passes, forward_mode, rounds=6)  # the fewest that promise 95 %
    timing = Timing([tokens / sample * taken for taken in timed.theirs], timed.ours)
    error = (result[0][chosen] - torch.stack(derivatives)).norm() / torch.stack(derivatives).norm()
    detail = {"tokens": tokens, "timed_tokens": sample, "relative_error": float(error)}
    return timing, timing.detail() | detail


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    ratios: dict[str, Timing] = {}
    detail: dict[str, Any] = {}
    tiny = tiny_model()
    batch = Batch(18, 4, 8, 10, 18)
    ratios["overhead_capture_tiny"], detail["capture_tiny"] = capture_overhead(tiny, batch, batch, 40)
    ratios["speedup_loss_term_256_tiny"], detail["loss_term_tiny"] = loss_term_speedup(tiny, 18, 256, 128)
    smollm2, _ = load_smollm2()
    batch = Batch(49152, 1, 8, 64, 64 if args.quick else 128)
    short, rounds = Batch(49152, 1, 8, 8, 8), 2 if args.quick else 9
    ratios["overhead_capture_smollm2"], detail["capture_smollm2"] = capture_overhead(smollm2, batch, short, rounds)
    sample = 2 if args.quick else 8
    ratios["speedup_loss_term_256"], detail["loss_term"] = loss_term_speedup(smollm2, 49152, 256, sample)
    emit("capture", ratios, detail)


if __name__ == "__main__":
    main()
