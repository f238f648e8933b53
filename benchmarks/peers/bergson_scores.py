"""Per-token scores against bergson: same model, batch, layers, dtype and threads; equal numbers first.

bergson's way: one pass that collects every response's gradient, then a pass that scores every token's gradient against
them (`attribute_tokens`, in memory, no projection, no normaliser). Ours: one backward pass and `score`.

bergson lives in an environment of its own, build/peers/bergson, made by this command. Its metadata asks for
torchvision, torchaudio and bitsandbytes, which this computation does not touch and which we keep out: it is installed
with --no-deps and the few dependencies that it imports here, on top of our environment's torch and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import REPOSITORY, Timing, alternate, emit, machine, parse_arguments, peak_memory
from benchmarks.peers._case import (
    SMOLLM2,
    TINY,
    TINY_QUICK,
    Sizes,
    difference,
    make_case,
    our_scores,
    our_total,
)

ENVIRONMENT = REPOSITORY / "build" / "peers" / "bergson"
PACKAGES = [
    "bergson==2.5.1",
    "simple-parsing==0.1.9",
    "docstring-parser==0.18.0",
    "ml_dtypes==0.6.0",
    "petname==2.9",
    "jaxtyping==0.3.11",
]
TOLERANCE = 1e-3


class Theirs:
    """bergson on the case's model and batch."""

    def __init__(self, sizes: Sizes) -> None:
        from bergson import IndexConfig
        from datasets import Dataset

        logging.disable(logging.INFO)
        self.case = make_case(sizes)
        self.folder = tempfile.TemporaryDirectory()
        labels = torch.where(self.case.tokens, self.case.ids, -100)
        self.data = Dataset.from_dict({"input_ids": self.case.ids.tolist(), "labels": labels.tolist()})
        path = f"{self.folder.name}/run"
        os.makedirs(f"{path}.part")
        self.whole = IndexConfig(run_path=path, projection_dim=0, loss_reduction="sum")
        self.tokens = IndexConfig(run_path=path, projection_dim=0, loss_reduction="sum", attribute_tokens=True)
        self.modules = {name.removeprefix("model.") for name in self.case.modules}

    def _collect(self, config: Any, scorer: Any = None) -> Any:
        from bergson import CollectorComputer, GradientProcessor, InMemoryCollector

        model: Any = self.case.model
        collector = InMemoryCollector(
            model=model.base_model,
            data=self.data,
            cfg=config,
            processor=GradientProcessor(),
            target_modules=self.modules,
            scorer=scorer,
        )
        batches = [list(range(len(self.data)))]
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            computer = CollectorComputer(model, self.data, collector=collector, batches=batches, cfg=config)
            computer.run_with_collector_hooks()
        model.zero_grad()
        return collector

    def scores(self) -> Tensor:
        """[R, T, R], as ours."""
        from bergson import Scorer
        from bergson.score.score_writer import InMemoryTokenScoreWriter

        gradients = self._collect(self.whole).gradients
        writer = InMemoryTokenScoreWriter(self.data, num_scores=len(self.data))
        scorer = Scorer(gradients, list(gradients), writer, torch.device("cpu"), torch.float32, attribute_tokens=True)
        found = self._collect(self.tokens, scorer).scores  # a [rows, R] for each response
        # Rows of positions whose loss counts nothing may be left out by bergson: the responses' are the last ones.
        return torch.stack([part[-self.case.sizes.length :] for part in found])


def their_total(theirs: Theirs) -> float:
    return float(theirs.scores().sum())


def compare(sizes: Sizes) -> tuple[dict[str, float | Timing], dict[str, Any]]:
    theirs, case = Theirs(sizes), make_case(sizes)
    error = difference(theirs.scores(), our_scores(case))
    if error > TOLERANCE:
        sys.exit(f"benchmark: scores differ by {error:.1e}: times would compare different things")
    timing = alternate(theirs.scores, lambda: our_scores(case), rounds=sizes.rounds, warmup=0)  # both ran just now
    their_memory = peak_memory(Theirs, their_total, sizes)
    our_memory = peak_memory(make_case, our_total, sizes)
    ratios: dict[str, float | Timing] = {
        f"speedup_bergson_{sizes.name}": timing,
        f"memory_bergson_{sizes.name}": their_memory.extra_bytes / max(1, our_memory.extra_bytes),
    }
    return ratios, timing.detail() | {
        "relative_difference": error,
        "theirs_peak_bytes": their_memory.extra_bytes,
        "ours_peak_bytes": our_memory.extra_bytes,
        "responses": sizes.responses,
        "tokens": sizes.responses * sizes.length,
        "layers": len(case.modules),
    }


def prepare_environment() -> Path:
    """Python of an environment that has bergson, and torch and the rest from ours."""
    python = ENVIRONMENT / "bin" / "python"
    marker = ENVIRONMENT / "ready"
    if not marker.exists() or marker.read_text() != "\n".join(PACKAGES):
        venv.create(ENVIRONMENT, with_pip=False, clear=True)
        site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(site),
            *PACKAGES,
        ]
        subprocess.run(pip, check=True)
        # Behind its own packages, so that it sees ours where it has none.
        (site / "gradtrace_environment.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        marker.write_text("\n".join(PACKAGES))
    return python


def inside(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, inside)
    if not args.inside:
        words = sys.argv[1:] if arguments is None else arguments
        python = prepare_environment()
        source = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src")])}
        done = subprocess.run(
            [str(python), "-m", "benchmarks.peers.bergson_scores", "--inside", *words],
            cwd=REPOSITORY,
            env=os.environ | source,
        )
        sys.exit(done.returncode)
    ratios: dict[str, float | Timing] = {}
    details: dict[str, Any] = {"machine": machine(), "bergson": PACKAGES[0]}
    for sizes in [TINY_QUICK] if args.quick else [TINY, SMOLLM2]:
        more, details[sizes.name] = compare(sizes)
        ratios |= more
    emit("peers.bergson_scores", ratios, details)


if __name__ == "__main__":
    main()
