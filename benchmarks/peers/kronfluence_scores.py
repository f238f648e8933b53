"""Per-token pairwise scores against kronfluence (identity strategy): same model, batch, layers, dtype and threads.

Both sides give, for every token and every response, the inner product of their gradients; the benchmark stops if they
differ. Time is theirs of `compute_pairwise_scores`, in batches of all responses, ours of forward, backward and
score; memory is the largest resident set above that with model and data loaded, in a fresh process.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Timing, alternate, emit, machine, parse_arguments, peak_memory
from benchmarks.peers._case import (
    SMOLLM2,
    TINY,
    TINY_QUICK,
    Case,
    Sizes,
    difference,
    make_case,
    our_scores,
    our_total,
    token_log_probs,
)

TOLERANCE = 1e-3


class Theirs:
    """kronfluence on the case's model and batch."""

    def __init__(self, sizes: Sizes) -> None:
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments
        from kronfluence.task import Task

        logging.disable(logging.WARNING)
        case = make_case(sizes)
        self.case = case

        class Objective(Task):
            def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
                return token_log_probs(model, batch[0], sizes.prompt).sum()

            def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
                return self.compute_train_loss(batch, model)

            def get_influence_tracked_modules(self) -> list[str]:
                return case.modules

        task = Objective()
        self.folder = tempfile.TemporaryDirectory()
        self.analyzer = Analyzer(
            "peer",
            prepare_model(case.model, task),
            task,
            cpu=True,
            output_dir=self.folder.name,
            disable_tqdm=True,
            log_level=logging.ERROR,
        )
        self.data = torch.utils.data.TensorDataset(case.ids)
        self.analyzer.fit_all_factors(
            "identity", self.data, factor_args=FactorArguments(strategy="identity"), overwrite_output_dir=True
        )

    def scores(self) -> Tensor:
        """[R, T, R], as ours."""
        from kronfluence.arguments import ScoreArguments

        responses = self.case.sizes.responses
        self.analyzer.compute_pairwise_scores(
            "scores",
            "identity",
            query_dataset=self.data,
            train_dataset=self.data,
            per_device_query_batch_size=responses,
            per_device_train_batch_size=responses,
            score_args=ScoreArguments(compute_per_token_scores=True),
            overwrite_output_dir=True,
        )
        found = self.analyzer.load_pairwise_scores("scores")["all_modules"]  # [query, train, position]
        start = self.case.sizes.prompt - 1  # the position that predicts the first response token
        return found[:, :, start : start + self.case.sizes.length].permute(1, 2, 0)


def their_total(theirs: Theirs) -> float:
    return float(theirs.scores().sum())


def compare(sizes: Sizes) -> tuple[dict[str, float | Timing], dict[str, Any]]:
    theirs, case = Theirs(sizes), make_case(sizes)
    error = difference(theirs.scores(), our_scores(case))
    if error > TOLERANCE:
        sys.exit(f"benchmark: scores of {sizes.name} differ by {error:.1e}: times would compare different things")
    timing = alternate(theirs.scores, lambda: our_scores(case), rounds=sizes.rounds, warmup=0)  # both ran just now
    their_memory = peak_memory(Theirs, their_total, sizes)
    our_memory = peak_memory(make_case, our_total, sizes)
    ratios: dict[str, float | Timing] = {
        f"speedup_kronfluence_{sizes.name}": timing,
        f"memory_kronfluence_{sizes.name}": their_memory.extra_bytes / max(1, our_memory.extra_bytes),
    }
    detail = timing.detail() | {
        "relative_difference": error,
        "theirs_peak_bytes": their_memory.extra_bytes,
        "ours_peak_bytes": our_memory.extra_bytes,
        **describe(case),
    }
    return ratios, detail


def describe(case: Case) -> dict[str, Any]:
    sizes = case.sizes
    return {
        "responses": sizes.responses,
        "tokens": sizes.responses * sizes.length,
        "prompt": sizes.prompt,
        "layers": len(case.modules),
    }


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    ratios: dict[str, float | Timing] = {}
    details: dict[str, Any] = {"machine": machine()}
    for sizes in [TINY_QUICK] if args.quick else [TINY, SMOLLM2]:
        more, details[sizes.name] = compare(sizes)
        ratios |= more
    emit("peers.kronfluence_scores", ratios, details)


if __name__ == "__main__":
    main()
