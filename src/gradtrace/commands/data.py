"""Make data sets ready for training.

  gradtrace data prepare gsm8k                                    from the Hugging Face hub, into data/gsm8k
  gradtrace data prepare gsm8k --source gsm8k/train.jsonl         from a file
  gradtrace data prepare dapo_math --source dapo/train.parquet --test math500.parquet --drop-overlap
  gradtrace data prepare countdown --numbers 2 3 --count 2000     generated: no source needed
  gradtrace data prepare mbpp --source sanitized-mbpp.json --validation 60

Normalises rows to verl's columns, removes duplicates and problems whose answers contradict each other, drops prompts
that are too long, sets some aside for validation, and refuses training data that is also in the test data. Writes
train.parquet, validation.parquet (and test.parquet), report.json and README.md, a data card. The same input gives the
same files, and the same problems go to validation however the rows are ordered.

A source is a .jsonl, .json or .parquet file, a folder, or hf:OWNER/NAME[:CONFIG][:SPLIT].
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from gradtrace.terminal import say, settings_from, titled_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    prepare = commands.add_parser("prepare", help="clean, split and write a data set", description=__doc__)
    prepare.formatter_class = argparse.RawDescriptionHelpFormatter
    names = ["gsm8k", "dapo_math", "countdown", "mbpp", "math500", "aime24", "aime25"]
    add = prepare.add_argument
    add("name", choices=names, help="which data set")
    add("--source", help="file, folder or hf:… (default: its place on the hub)")
    add("--test", nargs="*", default=[], help="test data: may not be trained on, written as test.parquet")
    add("--output", type=Path, help="folder to write (default: data/NAME)")
    add("--validation", type=float, default=0.02, help="problems to set aside: a share below 1, or how many")
    add("--tokenizer", help="model whose tokens are counted (default: characters are)")
    add(
        "--max-prompt-length",
        type=int,
        help="drop longer prompts; in tokens with --tokenizer (default 1024), else in characters (default 4096)",
    )
    add("--drop-overlap", action="store_true", help="drop training problems that are in the test data")
    add("--instruction", help="text appended to every question instead of the usual one")
    add("--system-prompt", help="system message of every prompt")
    add("--shots", type=int, default=0, help="solved examples before every question, for small models (0)")
    gsm8k = prepare.add_argument_group("gsm8k")
    gsm8k.add_argument(
        "--max-operations", type=int, help="only problems whose solution has at most so many calculations"
    )
    gsm8k.add_argument(
        "--max-number", type=int, help="only problems of whole numbers up to this, in question and solution"
    )
    gsm8k.add_argument(
        "--steps-left",
        type=int,
        default=0,
        help="begin the answer with the solution up to its last so many calculations; the model goes on from there (0: "
        "from nothing)",
    )
    gsm8k.add_argument(
        "--calculation-left",
        action="store_true",
        help="begin the answer with the solution up to its last calculation, in the middle of a sentence",
    )
    countdown = prepare.add_argument_group("countdown, where it is generated")
    countdown.add_argument("--numbers", type=int, nargs="+", default=[3, 4], help="how many numbers, in turn (3 4)")
    countdown.add_argument("--count", type=int, default=10_000, help="how many problems (10000)")
    countdown.add_argument("--largest", type=int, default=100, help="numbers from 1 to this (100)")
    countdown.add_argument("--operators", default="+-*/", help="operators that solutions are made with (+-*/)")
    countdown.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gradtrace.tasks.prepare.prepare import Request, prepare

    output = args.output or Path("data") / args.name
    if args.tokenizer:
        from gradtrace.policy.load import load_tokenizer

        args.tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
    request = settings_from(args, Request, output=output, command=f"gradtrace {shlex.join(sys.argv[1:])}")
    console = Console()
    with console.status(f"preparing {args.name}"):
        report = prepare(request)
    table = titled_table(f"{args.name}: {report['source']}", "step", "problems left")
    for entry in report["funnel"]:
        table.add_row(entry["step"], f"{entry['left']:,}")
    for split, count in report["splits"].items():
        if count:
            table.add_row(f"→ {split}", f"{count:,}", style="bold")
    console.print(table)
    say(console, f"Written to {request.output}; {request.output / 'README.md'} describes it.")
    return 0
