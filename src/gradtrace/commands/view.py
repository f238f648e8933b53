"""Look at a run in the browser: curves, prompt groups, token heat maps of entropy and influence, and, where the run has
them, TracIn's scores, blame, the entropy probe and counterfactual values.

    gradtrace view                      the latest run in ./runs, live while it is still training
    gradtrace view runs/a runs/b        compare runs; every other run in ./runs can be added on the page
    gradtrace view ablations/demo       the table of an ablation (a probe's folder works as well)
    gradtrace view --demo               two short recorded runs of the demo, no training needed
    gradtrace view runs/a --resample    load its checkpoint: click a token and sample from there
    gradtrace view --no-open --port 7007

Works offline and serves this machine only. On a remote machine, run it there and use the printed `ssh -L` line
on your own. To serve other machines directly name an address; visitors then need the token in the printed link:

    gradtrace view --host 0.0.0.0

With --resample the page writes into the run (RUN/counterfactual), as `gradtrace counterfactual` does. KEY=VALUE are
then settings of the run; a reward in a file of its own is executed only if it is named so (reward.path=FILE:FUNCTION).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gradtrace.errors import GradtraceError
from gradtrace.terminal import no_foreign_bars
from gradtrace.viewer import view

if TYPE_CHECKING:
    from gradtrace.commands.resampling import Resampler
    from gradtrace.viewer.resample import Progress, Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    view.add_arguments(parser)
    parser.add_argument(
        "--resample", action="store_true", help="offer to sample continuations from a token of these runs"
    )


def run(args: argparse.Namespace) -> int:
    overrides = [word for word in args.runs if "=" in word]
    args.runs = [word for word in args.runs if "=" not in word]
    if not args.resample:
        if overrides:
            raise GradtraceError(f"{overrides[0]}: settings of a run belong to --resample")
        return view.run(args)
    if args.demo:
        raise GradtraceError(
            "--demo shows recorded runs, which have no checkpoints to sample from: leave out --resample"
        )
    no_foreign_bars()
    runs = [path.resolve() for path in view.chosen_runs(args.runs, Path(args.runs_dir))]
    return view.run(args, LiveSampling(runs, overrides))


class LiveSampling:
    """The model behind "resample from here"; see `gradtrace.viewer.resample.Sampling`."""

    def __init__(self, runs: list[Path], overrides: list[str] | None = None) -> None:
        """Load the latest weights of the first run at once: what is wrong is said before the page opens."""
        from gradtrace.commands.resampling import Resampler

        self._resamplers: dict[Path, Resampler] = {run: Resampler(run, overrides) for run in runs}
        for resampler in list(self._resamplers.values())[:1]:
            resampler.load(resampler.nearest((resampler.steps() or [1])[-1]))

    def runs(self) -> list[Path]:
        return list(self._resamplers)

    def resample(self, request: Request, most_tokens: int, progress: Progress) -> None:
        """k continuations from before and from after a token, stored as the command's are."""
        from gradtrace.instruments.counterfactual.choose import choose

        resampler = self._resamplers[request.run]
        source = resampler.group(request.step, request.group)
        limit = resampler.settings(request.step, source)["max_new_tokens"]
        if request.k * limit > most_tokens:
            raise GradtraceError(f"{request.k} continuations of up to {limit} tokens are too many for a page: lower k")
        with resampler.writing() as writer:
            found = resampler.stored(request.step, source)
            continuations = resampler.continuations(request.step, source)
            group = found or resampler.begin(request.step, source, continuations)
            measurement = group.measurement
            measurement.measure(choose(str(request.position), measurement, source.clues, [request.response]))
            stretches = measurement.stretches()
            plan = stretches.plan(0, at_least=0)
            ends = (request.position, request.position + 1)
            nodes = [measurement.tree.node(request.response, length) for length in ends]
            plan[[node for node in nodes if stretches.leaving[node] > 0]] = request.k
            if measurement.measured[0] and not stretches.count[0] and stretches.leaving[0] > 0:
                plan[0] = max(plan[0], request.k)  # V of the prompt stands on the page as well
            progress(0, int(plan.sum()))
            if plan.any():
                continuations.extend(measurement, plan, progress)
            resampler.save(writer, request.step, group)
