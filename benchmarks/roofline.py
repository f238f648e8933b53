"""How close sampling and updating come to what the machine can do, and what a busy neighbour does to them.

Limits and work are measured in the same run on the same threads. A decode step cannot be faster than its weights and
cache are read from memory, nor than its products are multiplied: `roofline_decode` is the larger of the two times over
the time taken, `bandwidth_decode` the first one alone. `roofline_update` is the time that the products of forward and
backward pass take at the speed of a large square product, over the time of a whole update with its optimizer step; in
the details, where the rest goes, by operation.

`contention_decode` is tokens per second alone over those beside a process that keeps one core busy, on two threads, as
the command line starts, with threads that sleep while they wait (see `gradtrace.cli`); `contention_decode_spinning`
with threads that spin, torch's default. With two cores and one of them shared in halves, 1.33 would be fair.
`overhead_sleeping_decode` is what sleeping costs alone: tokens per second with spinning threads over those without.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import REPOSITORY, emit, load_smollm2, parse_arguments, seconds, tiny_model
from benchmarks.rollout import bandwidth_share, generate_with_gradtrace, random_prompts

GEMM = 2048
BUSY = "while True: pass"


def products_per_second(rounds: int = 5) -> float:
    """Floating-point operations per second of a large square product."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    a @ b
    return 2 * GEMM**3 / min(seconds(lambda: a @ b) for _ in range(rounds))


def matrix_parameters(model: Any) -> int:
    """Weights that every token is multiplied with; a tied embedding counts as the head that it is."""
    layers = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    tied = model.config.tie_word_embeddings
    return layers + (model.get_output_embeddings().weight.numel() if tied else 0)


def decode(
    model: Any, prompts: list[list[int]], n: int, tokens: int, rounds: int, gemm: float
) -> dict[str, Any]:
    found = bandwidth_share(model, prompts, n, tokens, rounds)
    products_ms = 2e3 * matrix_parameters(model) * len(prompts) * n / gemm
    limit = max(products_ms, found["limit_ms_per_step"])
    return found | {"products_ms_per_step": round(products_ms, 3), "share": limit / found["ours_ms_per_step"]}


def update(model: Any, rows: int, length: int, rounds: int, gemm: float) -> dict[str, Any]:
    """Forward, backward and AdamW on `rows` sequences of `length` tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.tensor(random_prompts(rows, length, model.config.vocab_size))

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    taken = sorted(seconds(step) for _ in range(rounds))[rounds // 2]
    products = 6 * matrix_parameters(model) * ids.numel() / gemm
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return {
        "update_s": round(taken, 4),
        "products_s": round(products, 4),
        "share": products / taken,
        "tokens": ids.numel(),
        "operations": {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:8]},
    }


def decoding_speed(busy: bool, passive: bool, quick: bool) -> float:
    """Tokens per second of the sampler on SmolLM2 in a fresh process with two threads."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"OMP_NUM_THREADS": "2"}
    if passive:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    neighbour = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
    try:
        command = [sys.executable, "-m", "benchmarks.roofline", "--decode", *(["--quick"] if quick else [])]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    return float(done.stdout.split()[-1])


def print_decoding_speed(quick: bool) -> None:
    """What `decoding_speed` runs."""
    model, _ = load_smollm2()
    tokens = 4 if quick else 16
    run = generate_with_gradtrace(model, random_prompts(2, 32, model.config.vocab_size), 8, tokens)
    run()
    print(16 * tokens / sorted(seconds(run) for _ in range(3))[1])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, options)
    if args.decode:
        print_decoding_speed(args.quick)
        return
    gemm = products_per_second()
    detail: dict[str, Any] = {"gflops": round(gemm / 1e9, 1), "threads": torch.get_num_threads()}
    ratios: dict[str, float] = {}
    rounds = 1 if args.quick else 3
    smollm2, _ = load_smollm2()
    cases = {"tiny": (tiny_model(), 32, 10, 256, 28), "smollm2": (smollm2, 2, 64, 4, 128)}
    for name, (model, prompts, length, rows, row_length) in cases.items():
        tokens = 8 if args.quick else 16
        questions = random_prompts(prompts, length, model.config.vocab_size)
        found = decode(model, questions, 8, tokens, rounds, gemm)
        made = update(model, rows, row_length, rounds, gemm)
        ratios |= {
            f"roofline_decode_{name}": found["share"],
            f"bandwidth_decode_{name}": found["share_of_limit"],
            f"roofline_update_{name}": made["share"],
        }
        detail[name] = {"decode": found, "update": made}
    alone: dict[str, float] = {}
    for label, passive in (("contention_decode", True), ("contention_decode_spinning", False)):
        alone[label], beside = (decoding_speed(busy, passive, args.quick) for busy in (False, True))
        ratios[label] = alone[label] / beside
        detail[label] = {
            "alone_tokens_per_s": round(alone[label], 1),
            "beside_tokens_per_s": round(beside, 1),
        }
    ratios["overhead_sleeping_decode"] = alone["contention_decode_spinning"] / alone["contention_decode"]
    emit("roofline", ratios, detail)


if __name__ == "__main__":
    main()
