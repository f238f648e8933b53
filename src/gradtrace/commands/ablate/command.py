"""Score one rollout (same tokens, same weights) with every combination of influence settings, and compare.

  gradtrace ablate recipe=demo sweep.influence.hessian_mode=inverse,identity sweep.influence.credit=position,loss_term
  gradtrace ablate --checkpoint runs/demo/checkpoints/step_000020 sweep.influence.projection_dim_factor=0,8,32
  gradtrace ablate collect ablations/demo            the table again, of what is there so far

`sweep.influence.KEY=a,b,c` varies trainer.influence_trace.KEY; several make a grid. Other KEY=VALUE words are settings
of all cells, as in `gradtrace train`. Weights are those the recipe starts with (after the demo's warm start), or a
checkpoint's. Each cell is one file, complete or absent: the same command again goes on where it stopped.

The table: seconds and memory of a training pass with the trace on, scores made, how well scores separate accepted from
rejected responses (AUC), how they rank the first wrong token where the task knows it, and how far cells agree
(Spearman). It is written as ablation.md, ablation.csv and ablation.json; `gradtrace view` shows it too. Columns:
docs/ablation.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SHOWN_CELLS = 8
"""Agreement of more cells than this does not fit into a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="+", metavar="WORD", help="settings and sweeps; or: collect FOLDER [FOLDER …]")
    add(
        "--checkpoint",
        type=Path,
        help="take the weights from this checkpoint of a run, or from the latest of this run",
    )
    add("--out", type=Path, help="where the cells go (default: ablations/RECIPE)")
    add("--repeat", type=int, default=3, help="timed passes per cell (default: 3)")


def run(args: argparse.Namespace) -> int:
    from gradtrace.commands.ablate.results import agreement, collect, costs_and_ranks
    from gradtrace.commands.ablate.session import ablate, parse_grid
    from gradtrace.errors import GradtraceError
    from gradtrace.terminal import no_foreign_bars

    if args.words[0] == "collect":
        folders = [Path(word) for word in args.words[1:]]
        if not folders:
            raise GradtraceError("gradtrace ablate collect needs a folder, e.g. ablations/demo.")
    else:
        if args.repeat < 1:
            raise GradtraceError(f"--repeat {args.repeat}: every cell is timed at least once.")
        no_foreign_bars()
        grid = parse_grid(args.words)
        out = args.out or Path("ablations") / Path(grid.base.recipe).stem
        ablate(grid, out, args.checkpoint, args.repeat)
        folders = [out]
    for folder in folders:
        result = collect(folder)
        print(costs_and_ranks(result))
        if len(result["agreement"]["names"]) <= SHOWN_CELLS:
            print(agreement(result))
        print(f"Written: {folder}/ablation.md (with how far cells agree), .csv, .json.")
        print(f"The same in the browser: gradtrace view {folder}")
    return 0
