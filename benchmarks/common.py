"""What every benchmark shares: arguments, alternating timing, peak memory, and the last JSON line.

A benchmark module has this shape; its docstring is what `--help` shows:

    def main(arguments: list[str] | None = None) -> None:
        args = parse_arguments(__doc__, arguments)
        timing = alternate(theirs, ours, rounds=2 if args.quick else 5)
        emit("rollout", {"speedup_generate_tiny": timing}, {"tiny": timing.detail()})

    if __name__ == "__main__":
        main()
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace.intervals import LEVEL, Interval

REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2_VARIABLE = "GRADTRACE_SMOLLM2"
SMOLLM2_FOLDER = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
VERSIONED_PACKAGES = ("torch", "transformers", "trl", "kronfluence", "numpy")


def parse_arguments(
    description: str | None,
    arguments: list[str] | None = None,
    extra: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """`--quick` and `--threads`, plus whatever `extra(parser)` adds. Sets torch's thread count."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds: under a minute")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's own choice)")
    if extra is not None:
        extra(parser)
    args = parser.parse_args(arguments)
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    return args


def code() -> str:
    """A name of the program that is measured: a digest of all files of `src` as they are, committed or not."""
    digest = hashlib.sha256()
    for path in sorted((REPOSITORY / "src").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
            digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def bench_folder() -> Path:
    """Where runs of this very code are kept. As `trainer.runs_dir` it lets all benchmarks share one warm start of the
    demo, which takes half a minute to make; a run's own files go to the folder that its `RunFiles` names."""
    return REPOSITORY / "runs" / "bench" / code()


def study_folder(name: str) -> Path:
    """Where a study keeps the runs that it made. It belongs to this very code: an interrupted study goes on where it
    was, and nothing that other code has made is taken for it."""
    return bench_folder() / name


def study_arguments(parser: argparse.ArgumentParser, name: str, page: str) -> None:
    """What every study with a page knows."""
    parser.add_argument("--folder", type=Path, default=study_folder(name), help="the runs that are made stay here")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long; run it again to go on")
    parser.add_argument("--write-docs", action="store_true", help=f"rewrite its part of {page}")


@dataclass(frozen=True)
class Timing:
    """Seconds of both sides of a comparison, one entry per round."""

    theirs: list[float]
    ours: list[float]

    @property
    def theirs_median(self) -> float:
        return statistics.median(self.theirs)

    @property
    def ours_median(self) -> float:
        return statistics.median(self.ours)

    @property
    def ratio(self) -> float:
        """Theirs over ours: above 1, ours is faster. For an overhead, give the side *with* it as theirs.

        The median of the rounds' own ratios: both sides of a round ran next to each other, so what slows the machine
        for a while slows both and drops out.
        """
        return statistics.median(self.ratios)

    def __float__(self) -> float:
        return self.ratio

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for theirs, ours in zip(self.theirs, self.ours, strict=True)]

    def detail(self) -> dict[str, Any]:
        """Medians, and the spread as fastest and slowest, in seconds."""
        return {
            "theirs_s": round(self.theirs_median, 5),
            "ours_s": round(self.ours_median, 5),
            "theirs_range_s": [round(min(self.theirs), 5), round(max(self.theirs), 5)],
            "ours_range_s": [round(min(self.ours), 5), round(max(self.ours), 5)],
            "ratio_range": [round(min(self.ratios), 3), round(max(self.ratios), 3)],
            "rounds": len(self.ours),
        }


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call, by default on the wall; garbage goes beforehand, so that nobody pays for another's waste."""
    gc.collect()
    start = clock()
    work()
    return clock() - start


def alternate(
    theirs: Callable[[], object],
    ours: Callable[[], object],
    rounds: int = 5,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time both sides `rounds` times, in turns, swapping who goes first.

    In turns, because a shared machine drifts: whatever slows one side then slows the other as well.
    """
    for _ in range(warmup):
        theirs()
        ours()
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    pair = [("theirs", theirs), ("ours", ours)]
    for _ in range(rounds):
        for name, work in pair:
            times[name].append(seconds(work, clock))
        pair.reverse()
    return Timing(**times)


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc keeps freed blocks for later, how many of them is luck: between two runs of one program the peaks of a step on
SmolLM2 differed by 150 MB of 2,550. With these, blocks from 128 kB on come from the system and return to it."""


@dataclass(frozen=True)
class PeakMemory:
    baseline_bytes: int
    """Resident set after `prepare`, before the measured work."""
    peak_bytes: int
    """Largest resident set seen while the work ran."""
    result: Any

    @property
    def extra_bytes(self) -> int:
        return self.peak_bytes - self.baseline_bytes


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _measure(connection: Any, prepare: Callable[..., Any], work: Callable[[Any], Any], args: tuple) -> None:
    prepared = prepare(*args)
    gc.collect()
    baseline = resident_bytes()
    peak = baseline
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.002):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    result = work(prepared)
    finished.set()
    watcher.join()
    connection.send((baseline, max(peak, resident_bytes()), result))


def peak_memory(prepare: Callable[..., Any], work: Callable[[Any], Any], *args: Any) -> PeakMemory:
    """Peak resident memory of `work(prepare(*args))` in a fresh process.

    Both functions must be importable (top level of a module), and `work`'s result small and picklable.
    A fresh process, because an allocator that has grown once hides the next peak; and one whose allocator gives back
    what is freed (see `GIVES_BACK`). Sampled every 2 ms.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, prepare, work, args))
    before = dict(os.environ)
    os.environ.update(GIVES_BACK)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    sender.close()
    try:
        baseline, peak, result = receiver.recv()
    except EOFError:
        process.join()
        sys.exit(f"benchmark: the measured process ended with code {process.exitcode}; its error is above")
    process.join()
    return PeakMemory(baseline, peak, result)


def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; ends the benchmark with instructions when it is not there."""
    folder = Path(os.environ.get(SMOLLM2_VARIABLE, SMOLLM2_FOLDER))
    if not (folder / "config.json").is_file():
        sys.exit(f"benchmark: no model in {folder}; run scripts/get_smollm2, or point {SMOLLM2_VARIABLE} at a copy")
    return folder


def load_smollm2() -> Any:
    """(model in float32 and eval mode, tokenizer)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def tiny_model(seed: int = 0) -> Any:
    """The demo's architecture with random weights: Qwen2, 331k parameters, 18 vocabulary entries."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=18,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """One line: processor, cores this process may use, memory."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = names[0] if names else platform.machine()
    return f"{processor}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def median_interval(values: list[float]) -> Interval:
    """The median, and the pair of ordered values that holds the true one in 95 % of cases whatever the distribution.

    That many of n independent values lie below their true median is a matter of n coins. Fewer than six values cannot
    promise 95 %: for them it is the lowest and the highest one (94 % for five, 88 % for four, 75 % for three).
    """
    ordered, n = sorted(values), len(values)
    below, missed = 0, 0.5**n
    while (missed := missed + math.comb(n, below + 1) * 0.5**n) <= (1 - LEVEL) / 2:
        below += 1
    return Interval(statistics.median(ordered), ordered[below], ordered[n - 1 - below], n)


def wilson(found: float, runs: int) -> tuple[float, float]:
    """A 95 % interval of the share found/runs."""
    if not runs:
        return 0.0, 1.0
    share, z = found / runs, 1.96
    middle = (share + z * z / (2 * runs)) / (1 + z * z / runs)
    half = z * ((share * (1 - share) / runs + z * z / (4 * runs * runs)) ** 0.5) / (1 + z * z / runs)
    return max(0.0, middle - half), min(1.0, middle + half)


def relative(difference: Interval, base: float) -> Interval:
    """A paired difference to a base as a ratio over it, taking the base's mean as known."""
    mean, low, high = (1 + end / max(base, 1e-9) for end in (difference.mean, difference.low, difference.high))
    return Interval(mean, low, high, difference.count)


def emit(name: str, ratios: Mapping[str, float | Timing | Interval], detail: dict[str, Any]) -> None:
    """Print the benchmark's result: one JSON object on the last line of stdout. A `Timing` gives the median ratio of
    its rounds with the median's interval, an `Interval` its mean and ends."""
    found = {label: median_interval(r.ratios) if isinstance(r, Timing) else r for label, r in ratios.items()}
    intervals = {label: r for label, r in found.items() if isinstance(r, Interval) and not math.isnan(r.low)}
    result = {
        "name": name,
        "ratios": {label: round(r.mean if isinstance(r, Interval) else r, 3) for label, r in found.items()},
        "ranges": {label: [round(r.low, 3), round(r.high, 3)] for label, r in intervals.items()},
        "detail": detail,
        "versions": versions(),
    }
    print(json.dumps(result), flush=True)
