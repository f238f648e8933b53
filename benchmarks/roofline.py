"""How close sampling and updating come to what the machine can do, and what a busy neighbour does to them.

Limits and work are measured in the same run on the same threads: by the clock on the wall, or with `--threads 1` in CPU
seconds, which other programs hardly change; freed memory stays with the process, as in `gradtrace train`. A decode step
cannot be faster than its weights and cache are read from memory, nor than its products are multiplied:
`roofline_decode` is the larger of the two times over the time taken, `bandwidth_decode` the first one alone.
`roofline_update` is the time that the products of forward and backward pass take at the speed of a large square
product, over the time of the update phase of a GRPO step with its optimizer step. Products are those of the tokens that
an update needs at the least: each prompt once, and responses without their last tokens, which predict nothing. Tokens
that are computed twice, attention, losses and everything else that is no product of a token with a weight count against
it. In the details: where the time goes, by operation.

`contention_decode` is tokens per second alone over those beside a process that keeps one core busy, on two threads, as
the command line starts (see `gradtrace.cli`); `contention_decode_spinning` with threads that spin while they wait,
torch's default. With two cores and one of them shared in halves, 1.33 would be fair. `overhead_sleeping_decode` is what
the setting of the command line costs alone: tokens per second with spinning threads over those without.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import (
    REPOSITORY,
    Timing,
    bench_folder,
    emit,
    load_smollm2,
    median_interval,
    parse_arguments,
    seconds,
    tiny_model,
)
from benchmarks.rollout import Clock, bandwidth_share, generate_with_gradtrace, random_prompts
from benchmarks.trace_overhead import Clocks, smollm2_overrides
from gradtrace.cli import WAITING
from gradtrace.config.loader import load_config
from gradtrace.intervals import Interval
from gradtrace.metrics import Timer
from gradtrace.policy.cpu.norm import keep_freed_memory
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

Found = dict[str, Any]
"""What is known of one piece of work, for the details."""
GEMM = 2048
BUSY = "while True: pass"


def products_per_second(clock: Clock, rounds: int = 5) -> float:
    """Floating-point operations per second of a large square product; measured before and after each piece of work,
    since other programs slow down both."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    a @ b
    return 2 * GEMM**3 / median(seconds(lambda: a @ b, clock) for _ in range(rounds))


def matrix_parameters(model: Any) -> tuple[int, int]:
    """Weights that every token is multiplied with: of the layers, and of the head."""
    layers = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name and "lm_head" not in name
    )
    return layers, model.get_output_embeddings().weight.numel()


def bare_products_ms(model: Any, rows: int, clock: Clock, rounds: int = 5, steps: int = 15) -> float:
    """Milliseconds that BLAS takes for the products of one decode step alone, in their real shapes: whether small ones
    can reach the speed of a large one."""
    layers = [
        p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    weights = [*layers, model.get_output_embeddings().weight]
    inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}

    def multiply() -> None:
        for weight in weights * steps:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    with torch.inference_mode():
        multiply()
        return 1e3 * median(seconds(multiply, clock) for _ in range(rounds)) / steps


def decode(model: Any, prompts: list[list[int]], n: int, tokens: int, blocks: int, rounds: int, clock: Clock) -> Found:
    """Blocks of a few rounds, each with both limits measured beside it: on a machine that is shared with others, these
    change by half from one second to the next."""
    operations_per_step = 2 * sum(matrix_parameters(model)) * len(prompts) * n
    speeds, found = [products_per_second(clock)], []
    for _ in range(blocks):
        found.append(bandwidth_share(model, prompts, n, tokens, rounds, clock))
        speeds.append(products_per_second(clock))
    around = [(before + after) / 2 for before, after in itertools.pairwise(speeds)]
    products_ms = [1e3 * operations_per_step / speed for speed in around]
    measured = list(zip(found, products_ms, strict=True))
    return {
        "limits_GFLOP_and_GB_per_s": [
            (round(speed / 1e9, 1), block["memory_GB_per_s"]) for block, speed in zip(found, around, strict=True)
        ],
        "MB_per_step": found[0]["MB_per_step"],
        "limits_ms_per_step": [(round(ms, 3), block["limit_ms_per_step"]) for block, ms in measured],
        "bare_products_ms_per_step": round(bare_products_ms(model, len(prompts) * n, clock), 3),
        "ours_ms_per_step": [block["ours_ms_per_step"] for block in found],
        "shares_of_reading": [block["share_of_limit"] for block in found],
        "shares": [max(ms, block["limit_ms_per_step"]) / block["ours_ms_per_step"] for block, ms in measured],
        "operations": operations(generate_with_gradtrace(model, prompts, n, tokens)),
    }


def update(overrides: list[str], rounds: int, clock: Clock) -> Found:
    """The update phase of GRPO steps without instruments, on one batch."""
    with tempfile.TemporaryDirectory() as folder:
        off = [f"trainer.{name}.enable=false" for name in ("influence_trace", "entropy_trace", "blame")]
        parts = build_components(load_config([*overrides, *off, f"trainer.runs_dir={bench_folder()}"]))
        trainer = Trainer(parts, RunFiles(Path(folder) / "run"), SilentDisplay())
        batch, _ = trainer.experience.collect(parts.generators["rollout"], Timer())
        taken: list[float] = []

        def step() -> None:
            clocks = Clocks()
            trainer.train_step(batch, len(taken) + 1, clocks)
            of_update = clocks.cpu_seconds if clock is time.process_time else clocks.seconds
            taken.append(of_update["update_actor"])

        step()
        speeds = [products_per_second(clock)]
        for _ in range(rounds):
            gc.collect()
            step()
            speeds.append(products_per_second(clock))
        around = [(before + after) / 2 for before, after in itertools.pairwise(speeds)]
        measured = list(zip(taken[1:], around, strict=True))
        found = operations(step)
    layers, head = matrix_parameters(parts.policy.model)
    tokens = sum(map(len, batch.prompts)) + int((batch.response_lengths - 1).sum())
    products = 6 * (layers * tokens + head * int(batch.response_mask.sum()))
    return {
        "gflops": round(median(around) / 1e9, 1),
        "update_s": round(median(taken[1 : 1 + rounds]), 4),
        "products_s": round(products / median(around), 4),
        "shares": [products / gemm / update_s for update_s, gemm in measured],
        "tokens": tokens,
        "operations": found,
    }


def operations(work: Callable[[], None]) -> dict[str, float]:
    """The operations that take most of the time, as shares of it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:10]}


class Decoder:
    """The sampler on SmolLM2 in a process of its own with two threads, started with these settings of the environment.
    It decodes when it is asked to and sleeps otherwise, so that the model is loaded once for all rounds."""

    def __init__(self, settings: dict[str, str]) -> None:
        names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        environment = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "2"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.roofline", "--decode"],
            cwd=REPOSITORY,
            env=environment | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def speed(self, busy: bool) -> float:
        """Tokens per second, alone or beside a process that keeps one core busy."""
        assert self.process.stdin is not None and self.process.stdout is not None
        neighbour = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
        try:
            print("decode", file=self.process.stdin, flush=True)
            return float(self.process.stdout.readline())
        finally:
            if neighbour is not None:
                neighbour.kill()
                neighbour.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def answer_with_decoding_speeds() -> None:
    """What the process of a `Decoder` runs: a speed for every line it is sent, of few tokens, since some settings make
    few of them in a second."""
    model, _ = load_smollm2()
    prompts = random_prompts(2, 32, model.config.vocab_size)
    generate_with_gradtrace(model, prompts, 8, 1)()
    run = generate_with_gradtrace(model, prompts, 8, 8)
    for _ in sys.stdin:
        run()  # its threads have slept
        taken = [0.0]
        while len(taken) <= 3 and sum(taken) < 15:
            taken.append(seconds(run))
        print(16 * 8 / median(taken[1:]), flush=True)


def contention(rounds: int) -> tuple[dict[str, Timing], dict[str, Any]]:
    """What a busy neighbour does to decoding, with either way of waiting."""
    decoders = {"contention_decode": Decoder(WAITING), "contention_decode_spinning": Decoder({})}
    for decoder in decoders.values():
        decoder.speed(busy=False)  # both have loaded their models after this, and nothing else runs
    speeds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for (label, decoder), busy in itertools.product(decoders.items(), (False, True)):
            speeds.setdefault((label, busy), []).append(decoder.speed(busy))
    for decoder in decoders.values():
        decoder.close()
    ratios = {label: Timing(speeds[label, False], speeds[label, True]) for label in decoders}
    detail = {
        label: {"alone_tokens_per_s": speeds[label, False], "beside_tokens_per_s": speeds[label, True]}
        for label in decoders
    }
    alone = [speeds[label, False] for label in reversed(decoders)]
    return ratios | {"overhead_sleeping_decode": Timing(*alone)}, detail


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, options)
    if args.decode:
        answer_with_decoding_speeds()
        return
    keep_freed_memory()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    detail: dict[str, Any] = {"threads": torch.get_num_threads()}
    ratios: dict[str, Timing | Interval] = {}
    rounds = 2 if args.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        smollm2 = smollm2_overrides(Path(folder), True)
        cases = {
            "tiny": (tiny_model(), 32, 10, ["recipe=demo", "actor.mini_batch_size=0"]),
            "smollm2": (load_smollm2()[0], 2, 64, smollm2),
        }
        for name, (model, prompts, length, overrides) in cases.items():
            tokens = 16 if name == "tiny" else 33  # long enough for packed weights, as responses are
            questions = random_prompts(prompts, length, model.config.vocab_size)
            # As long as SmolLM2 takes for one round, the demo's model makes some, for a median of each block.
            blocks, in_block = (2 * rounds + 2, 5) if name == "tiny" else (rounds + 1, 1)
            found = decode(model, questions, 8, tokens, blocks, in_block, clock)
            made = update(overrides, 3 * rounds if name == "tiny" else rounds + 1, clock)
            ratios |= {
                f"roofline_decode_{name}": median_interval(found["shares"]),
                f"bandwidth_decode_{name}": median_interval(found["shares_of_reading"]),
                f"roofline_update_{name}": median_interval(made["shares"]),
            }
            detail[name] = {"decode": found, "update": made}
    of_neighbour, more = contention(1 if args.quick else 4)
    ratios |= of_neighbour
    detail |= more
    emit("roofline", ratios, detail)


if __name__ == "__main__":
    main()
