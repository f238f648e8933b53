"""Look at the traces of a run without a browser.

  ls      what a run has: a line per step, and what is damaged
  show    one group: its prompt, its responses, every token with its score
  export  all tokens as one table, parquet or CSV
  import  rollouts of verl, TRL, prime-rl or plain JSONL, or older traces, as a run that everything here can read

The influence of a token is in nats, and positive where training on it raised the objective.

examples:
  gradtrace trace ls runs/demo
  gradtrace trace ls runs/demo --verify                          read every step and check its sha256
  gradtrace trace show runs/demo                                 a scored group of the latest step
  gradtrace trace export runs/demo tokens.parquet
  gradtrace trace import rollouts.jsonl runs/mine --tokenizer models/mine
  gradtrace trace import old/influence_trace runs/older --format older --tokenizer models/mine

`gradtrace trace show --help` and the like have more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gradtrace.commands import add_run, opened_run
from gradtrace.commands.rollouts.legacy import import_legacy
from gradtrace.commands.trace_show import UNITS, first_scored, score_columns, show_group
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.terminal import command, progress_bar, say, titled_table
from gradtrace.trace.columns import COLUMNS, KINDS
from gradtrace.trace.reader import RunReader, StepUnreadableError
from gradtrace.trace.table import StepTable
from gradtrace.trace.token_text import TokenBytes

SHOW = """One group of a step in the terminal: its prompt, its responses, every token with its score.

  gradtrace trace show runs/demo                            a scored group of the latest step, tokens coloured
  gradtrace trace show runs/demo --step 20 --group 3 --by entropy
  gradtrace trace show runs/gsm8k --by sentence             a number for every sentence (line, turn)
  gradtrace trace show runs/demo --color never | less       a line per token, with all its numbers

The influence of a token is in nats, and positive where training on it raised the objective.
"""

EXPORT = """All tokens of a run as one table, a row per token, for pandas, polars or a spreadsheet.

  gradtrace trace export runs/demo tokens.parquet           the columns of all instruments, all steps
  gradtrace trace export runs/demo late.csv --kind entropy_trace --steps 100:
"""

IMPORT = """Make a run of rollouts that another program sampled, so that the viewer and every command here read them.

  gradtrace trace import rollouts.jsonl runs/mine --tokenizer models/mine
  gradtrace trace import rollout_data_dir runs/theirs --tokenizer Qwen/Qwen2.5-0.5B --prompts train.parquet      verl
  gradtrace trace import out/completions runs/theirs --tokenizer Qwen/Qwen2.5-0.5B --reward-columns correct      TRL

A line of a JSONL file is one response; those to the same prompt are a group:

  {"prompt": "What is 2+2?", "response": "4", "reward": 1}
  {"prompt": "What is 2+2?", "response": "5", "reward": 0}

It may say more: step, group, advantage, answer, finished, and token by token prompt_ids, response_ids, log_probs
(docs/import.md). Then `gradtrace attribute RUN --model MODEL` scores every token, `gradtrace view RUN` shows it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ls | show | export | import", required=True)
    raw = argparse.RawDescriptionHelpFormatter
    listing = actions.add_parser("ls", help="what a run has: a line per step")
    add_run(listing)
    listing.add_argument("--kind", choices=list(KINDS), help="this trace only")
    listing.add_argument("--verify", action="store_true", help="read every step and check it")

    showing = actions.add_parser(
        "show", help="one group, every token with its score", description=SHOW, formatter_class=raw
    )
    add_run(showing)
    showing.add_argument("--kind", choices=list(KINDS), help="the file of this instrument alone; default: all")
    showing.add_argument("--step", type=int, help="default: the latest, of the influence trace if there is one")
    showing.add_argument("--group", type=int, help="index of the group; default: the first scored one")
    showing.add_argument(
        "--by",
        metavar="WHAT",
        help="the column that colours the tokens, e.g. entropy; and by token, sentence, line or turn: entropy,turn",
    )
    showing.add_argument("--color", choices=["auto", "always", "never"], default="auto")

    exporting = actions.add_parser("export", help="all tokens as one table", description=EXPORT, formatter_class=raw)
    add_run(exporting)
    exporting.add_argument("target", metavar="FILE", help="its name ends in .parquet or .csv")
    exporting.add_argument("--kind", choices=list(KINDS), help="the columns of this instrument alone; default: all")
    exporting.add_argument("--steps", default=":", help="FIRST:LAST, both included, or one number; default: all")

    words = "make a run of rollouts of other programs, or of older traces"
    _add_import(actions.add_parser("import", help=words, description=IMPORT, formatter_class=raw))


def _add_import(importing: argparse.ArgumentParser) -> None:
    add = importing.add_argument
    add("source", type=Path, metavar="SOURCE", help="a file, or a folder with the files of all steps")
    add("run_dir", type=Path, metavar="RUN", help="the run to make")
    add(
        "--format",
        choices=("jsonl", "verl", "trl", "prime_rl", "older"),
        help="default: by the columns of the first row",
    )
    add("--tokenizer", metavar="MODEL", help="a transformers tokenizer: a folder or a hub name")
    add("--temperature", type=float, default=1.0, help="they were sampled at (default: 1)")
    add(
        "--reward",
        default="",
        help="judges responses that `counterfactual` samples: a name, or FILE.py:FUNCTION",
    )
    add("--append-end", action="store_true", help="add the end token to responses that are texts")
    add(
        "--prompts",
        default="",
        metavar="DATA",
        help="verl: its training data, to restore special tokens of prompts",
    )
    add(
        "--reward-columns",
        default="",
        metavar="A,B=0.2",
        help="trl: columns that are rewards, with weights (default: all)",
    )
    add("--skip-bad", action="store_true", help="leave out rows that cannot be read, and say so")
    add("--credit", choices=["position", "loss_term"], default="position", help="older: what the scores hold")


def run(args: argparse.Namespace) -> int:
    actions = {"ls": _list, "show": _show, "export": _export, "import": _import}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    run = opened_run(args)
    console = Console()
    kinds = [args.kind] if args.kind else run.kinds()
    if not kinds:
        raise GradtraceError(
            f"{run.path} has no traces; is it a run? Tracing is on with trainer.influence_trace.enable=true"
        )
    for kind in kinds:
        console.print(_step_table(run, kind))
    if args.verify:
        run.verify()
    for problem in run.problems:
        say(console, str(problem), mark="[red]damaged[/red]")
    if args.verify and not run.problems:
        console.print("every step was read and its sha256 is right")
    return 1 if run.problems else 0


def _step_table(run: RunReader, kind: str) -> Table:
    headings = ("step", "groups", "responses", "tokens", "kB", "bytes/token", "written")
    rows = [
        (
            *map(str, (entry.step, entry.groups, entry.responses, entry.tokens)),
            f"{entry.bytes / 1000:.1f}",
            f"{entry.bytes / entry.tokens:.1f}" if entry.tokens else "–",
            time.strftime("%d %b %H:%M:%S", time.localtime(entry.time)),
        )
        for entry in run.entries(kind).values()
    ]
    return titled_table(f"{run.name} · {kind}: {KINDS[kind].meaning}", *headings, rows=rows, left=0)


def _show(args: argparse.Namespace) -> int:
    run = opened_run(args)
    steps = _steps(run, args.kind)
    if not steps:
        raise GradtraceError(f"{run.path} has no steps of {args.kind or 'any trace'} yet")
    number = (run.steps(args.kind or INFLUENCE_TRACE) or steps)[-1] if args.step is None else args.step
    if number not in steps:
        raise GradtraceError(f"no step {number} in {run.path}: it has {len(steps)}, from {steps[0]} to {steps[-1]}")
    table = _table_of(run, number, args.kind)
    columns = score_columns(table)
    words = args.by.split(",") if args.by else []
    unit = next((word for word in words if word in UNITS), "token")
    by = next((word for word in words if word not in UNITS), columns[0] if columns else None)
    if by is not None and by not in columns:
        has = f"this step has {', '.join(columns)}" if columns else f"{table.first.kind} has scores of responses alone"
        raise GradtraceError(f"cannot colour by {by!r}; {has}")
    group = first_scored(table, dict.fromkeys((*columns[:1], by)) if by else ()) if args.group is None else args.group
    if not 0 <= group < table.n_groups:
        raise GradtraceError(f"no group {group}; step {table.step} has groups 0 to {table.n_groups - 1}")
    terminal = {"auto": None, "always": True, "never": False}[args.color]
    console = Console(force_terminal=terminal, highlight=False)
    for problem in table.problems:
        say(console, f"left out  {problem}")
    show_group(console, table, group, by, run.token_bytes, colour=console.is_terminal, unit=unit)
    return 0


def _steps(run: RunReader, kind: str | None) -> list[int]:
    """The steps that an instrument, or any, has a file of."""
    return sorted({step for each in ([kind] if kind else run.kinds()) for step in run.steps(each)})


def _table_of(run: RunReader, step: int, kind: str | None) -> StepTable:
    """All instruments' columns of a step; with `kind` those of its file, validation and evaluation prompts included."""
    return StepTable(step, {kind: run.step(kind, step)}, whole=True) if kind else run.step_table(step)


def _export(args: argparse.Namespace) -> int:
    run = opened_run(args)
    steps = _between(_steps(run, args.kind), args.steps)
    rows, problems = export_tokens(run, args.kind, steps, Path(args.target))
    console = Console()
    console.print(f"{rows} tokens of {len(steps)} steps in {args.target}", markup=False)
    damaged = [str(problem) for problem in run.problems]
    damaged += [each for each in problems if not any(problem in each for problem in damaged)]
    for problem in damaged:
        say(console, f"left out  {problem}")
    return 1 if damaged else 0


def _between(steps: list[int], wanted: str) -> list[int]:
    first, colon, last = wanted.partition(":")
    try:
        low = int(first) if first else 0
        high = (int(last) if last else None) if colon else low
    except ValueError:
        raise GradtraceError(f"--steps {wanted!r} is not FIRST:LAST, FIRST:, :LAST or one number") from None
    return [step for step in steps if step >= low and (high is None or step <= high)]


def _import(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if args.format == "older" or (args.format is None and any(args.source.glob("**/*.npz"))):
        return _import_older(args, console)
    if not args.tokenizer:
        raise GradtraceError("--tokenizer is missing: whose tokens are these? Give a model's folder or hub name")
    from gradtrace.commands.rollouts.importing import import_rollouts

    with progress_bar(console, "reading") as progress:
        report = import_rollouts(args, progress)
    say(
        console,
        f"{report.responses} responses, {report.tokens} tokens, {len(report.steps)} steps of {report.format} imported "
        f"into {args.run_dir}",
    )
    unread = [f"Columns left aside: {', '.join(sorted(report.unread))}."] if report.unread else []
    for line in (*report.notes, *unread, *(f"left out  {bad}" for bad in report.left_out)):
        say(console, line)
    say(console, f"Look at it: {command()} view {args.run_dir}")
    return 0


def _import_older(args: argparse.Namespace, console: Console) -> int:
    report = import_legacy(args.source, args.run_dir, args.credit)
    if args.tokenizer:
        from gradtrace.policy.load import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
        TokenBytes.from_tokenizer(tokenizer).save(args.run_dir / "token_bytes.npz")
    console.print(f"{len(report.steps)} steps imported into {args.run_dir}", markup=False)
    for file, reason in report.refused.items():
        say(console, f"refused  {file}: {reason}")
    return 1 if report.refused else 0


def export_tokens(run: RunReader, kind: str | None, steps: list[int], target: Path) -> tuple[int, list[str]]:
    """Write the tokens of these steps, a row each: the number of rows, and what the step tables left out. Steps that
    cannot be read are left out, too (see `run.problems`). A column that some steps lack is null there."""
    import pyarrow
    from pyarrow import csv, parquet

    writers = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}
    if target.suffix not in writers:
        raise GradtraceError(f"cannot export to {target.name}: its name must end in .parquet or .csv")
    schemas = [_token_table(table).schema for table in _readable(run, kind, steps)]
    if not schemas:
        raise GradtraceError(f"none of these steps of {kind or 'any instrument'} can be read in {run.path}")
    # A column of whole numbers is wider in a step that has gaps in it.
    schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
    if (token_bytes := run.token_bytes) is not None:
        schema = schema.insert(PLACES, pyarrow.field("text", pyarrow.string()))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    rows, problems = 0, []
    try:
        with writers[target.suffix](str(temporary), schema) as writer:
            for step in _readable(run, kind, steps):
                table = _token_table(step)
                if token_bytes is not None:
                    table = table.append_column("text", [_texts(step, token_bytes)])
                whole = pyarrow.concat_tables([schema.empty_table(), table], promote_options="permissive")
                writer.write_table(whole.combine_chunks())
                rows += step.n_tokens
                problems += step.problems
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return rows, problems


def _readable(run: RunReader, kind: str | None, steps: list[int]) -> Iterator[StepTable]:
    for step in steps:
        with contextlib.suppress(StepUnreadableError):
            yield _table_of(run, step, kind)


PLACES = 4
"""The first columns of the table say which token it is."""


def _token_table(step: StepTable) -> Any:
    """The token table with names in place of the numbers of enums; columns per token come last."""
    import pyarrow

    table: dict[str, Any] = step.token_table()
    for name in table:
        if name in COLUMNS and (values := COLUMNS[name].values):
            names = np.array([*(value.name.lower() for value in values), None])  # None: a gap, -1
            table[name] = pyarrow.array(names[table[name]], "string")
    places, others = list(table)[:PLACES], list(table)[PLACES:]
    others.sort(key=lambda name: COLUMNS[name].level == "token")
    return pyarrow.table({name: table[name] for name in (*places, *others)})


def _texts(step: StepTable, token_bytes: TokenBytes) -> Any:
    import pyarrow

    ids = [step.ids(r) for r in range(step.n_responses)]
    return pyarrow.array([token.text for own in ids for token in token_bytes.texts(own, continues=True)], "string")
