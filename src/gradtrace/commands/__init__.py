"""The commands of `gradtrace`, and the argument RUN of those that read one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtrace.runs import Run


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="a run folder, or a name in --runs-dir")
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where runs are looked up by name (default: runs)"
    )


def opened_run(args: argparse.Namespace) -> Run:
    from gradtrace.runs import open_run
    from gradtrace.viewer.catalog import chosen_runs

    return open_run(chosen_runs([args.run_dir], args.runs_dir)[0])
