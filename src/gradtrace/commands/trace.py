"""Look at the traces of a run without a browser.

  ls      what a run has: a line per step, and what is damaged
  show    one group: its prompt, its responses, every token with its score
  export  all tokens as one table, parquet or CSV
  import  rollouts of verl, TRL, prime-rl or plain JSONL, or older traces, as a run that everything here can read

A score is positive where a step along the token's gradient helps the accepted responses against the rejected ones.

examples:
  gradtrace trace ls runs/demo
  gradtrace trace ls runs/demo --verify                          read every step and check its sha256
  gradtrace trace show runs/demo                                 a scored group of the latest step
  gradtrace trace show runs/demo --step 20 --group 3 --by entropy
  gradtrace trace show runs/gsm8k --by sentence                  a number for every sentence (line, turn)
  gradtrace trace show runs/demo --color never | less            a line per token
  gradtrace trace export runs/demo tokens.parquet
  gradtrace trace export runs/demo late.csv --kind entropy_trace --steps 100:
  gradtrace trace import rollouts.jsonl runs/mine --tokenizer models/mine
                                                                 prompt, response, reward (log_probs, step, group …)
  gradtrace trace import rollout_data_dir runs/theirs --tokenizer Qwen/Qwen2.5-0.5B --prompts train.parquet
  gradtrace trace import old/influence_trace runs/older --format older --tokenizer models/mine
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradtrace.errors import GradtraceError
from gradtrace.program import command
from gradtrace.terminal import progress_bar, say, settings_from, titled_table
from gradtrace.trace import schema
from gradtrace.trace.export import export_tokens
from gradtrace.trace.legacy import import_legacy
from gradtrace.trace.reader import Run, open_run
from gradtrace.trace.show import best_column, score_columns, show_group
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.units import UNITS

SHOW = """One group of a step in the terminal: its prompt, its responses, every token with its score.

  gradtrace trace show runs/demo                            a scored group of the latest step, tokens coloured
  gradtrace trace show runs/demo --step 20 --group 3 --by entropy
  gradtrace trace show runs/gsm8k --by sentence             a number for every sentence (line, turn)
  gradtrace trace show runs/demo --color never | less       a line per token, with all its numbers

A score is positive where a step along the token's gradient helps the accepted responses against the rejected ones.
"""

EXPORT = """All tokens of a run as one table, a row per token, for pandas, polars or a spreadsheet.

  gradtrace trace export runs/demo tokens.parquet           of the influence trace, all steps
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
    _add_run(listing)
    listing.add_argument("--kind", choices=list(schema.KINDS), help="this trace only")
    listing.add_argument("--verify", action="store_true", help="read every step and check it")

    showing = actions.add_parser(
        "show", help="one group, every token with its score", description=SHOW, formatter_class=raw
    )
    _add_run(showing)
    showing.add_argument("--kind", choices=list(schema.KINDS), help="default: influence_trace if the run has one")
    showing.add_argument("--step", type=int, help="default: the latest")
    showing.add_argument("--group", type=int, help="index of the group in the file; default: the first scored one")
    showing.add_argument(
        "--by",
        metavar="WHAT",
        help="the column that colours the tokens, e.g. entropy; and by token, sentence, line or turn: entropy,turn",
    )
    showing.add_argument("--color", choices=["auto", "always", "never"], default="auto")

    exporting = actions.add_parser("export", help="all tokens as one table", description=EXPORT, formatter_class=raw)
    _add_run(exporting)
    exporting.add_argument("target", metavar="FILE", help="its name ends in .parquet or .csv")
    exporting.add_argument("--kind", choices=list(schema.KINDS), help="default: influence_trace if the run has one")
    exporting.add_argument("--steps", default=":", help="FIRST:LAST, both included, or one number; default: all")

    words = "make a run of rollouts of other programs, or of older traces"
    _add_import(actions.add_parser("import", help=words, description=IMPORT, formatter_class=raw))


def _add_run(action: argparse.ArgumentParser) -> None:
    action.add_argument("run_dir", metavar="RUN", help="a run folder, or a name in --runs-dir")
    action.add_argument("--runs-dir", default="runs", help="where runs are looked up by name (default: runs)")


def _opened(args: argparse.Namespace) -> Run:
    from gradtrace.viewer.view import chosen_runs

    return open_run(chosen_runs([args.run_dir], Path(args.runs_dir))[0])


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
    run = _opened(args)
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


def _step_table(run: Run, kind: str) -> Table:
    headings = ("step", "groups", "responses", "tokens", "kB", "bytes/token", "written")
    table = titled_table(f"{run.name} · {kind}: {schema.KINDS[kind].meaning}", *headings, left=0)
    for entry in run.entries(kind).values():
        per_token = f"{entry.bytes / entry.tokens:.1f}" if entry.tokens else "–"
        written = time.strftime("%d %b %H:%M:%S", time.localtime(entry.time))
        counts = (entry.step, entry.groups, entry.responses, entry.tokens)
        table.add_row(*map(str, counts), f"{entry.bytes / 1000:.1f}", per_token, written)
    return table


def _show(args: argparse.Namespace) -> int:
    run = _opened(args)
    kind = _choose_kind(run, args.kind)
    steps = run.steps(kind)
    if not steps:
        raise GradtraceError(f"{kind} of {run.path} has no steps yet")
    step = run.step(kind, steps[-1] if args.step is None else args.step)
    columns = score_columns(step)
    first = min(step["group"].tolist(), default=0)  # the first with responses; others were skipped
    group = first if args.group is None else args.group
    if not 0 <= group < step.n_groups:
        raise GradtraceError(f"no group {group}; step {step.step} has groups 0 to {step.n_groups - 1}")
    words = args.by.split(",") if args.by else []
    unit = next((word for word in words if word in UNITS), "token")
    chosen = [word for word in words if word not in UNITS]
    by = chosen[0] if chosen else (best_column(step, group) if columns else None)
    if by is not None and by not in columns:
        has = f"this step has {', '.join(columns)}" if columns else f"{kind} has scores of responses alone"
        raise GradtraceError(f"cannot colour by {by!r}; {has}")
    terminal = {"auto": None, "always": True, "never": False}[args.color]
    console = Console(force_terminal=terminal, highlight=False)
    show_group(console, step, group, by, run.token_bytes, colour=console.is_terminal, unit=unit)
    return 0


def _choose_kind(run: Run, wanted: str | None) -> str:
    kinds = [kind for kind in run.kinds() if run.steps(kind)]
    if wanted is not None:
        return wanted
    if not kinds:
        raise GradtraceError(f"{run.path} has no traces")
    return schema.INFLUENCE_TRACE if schema.INFLUENCE_TRACE in kinds else kinds[0]


def _export(args: argparse.Namespace) -> int:
    run = _opened(args)
    kind = _choose_kind(run, args.kind)
    steps = _between(run.steps(kind), args.steps)
    rows = export_tokens(run, kind, steps, Path(args.target))
    console = Console()
    console.print(f"{rows} tokens of {len(steps)} steps in {args.target}", markup=False)
    for problem in run.problems:
        say(console, f"left out  {problem}")
    return 1 if run.problems else 0


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
    from gradtrace.commands.rollouts.importing import ImportSettings, import_rollouts

    with progress_bar(console, "reading") as progress:
        settings = settings_from(args, ImportSettings)
        report = import_rollouts(args.source, args.run_dir, settings, progress)
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
        from gradtrace.tasks.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
        TokenBytes.from_tokenizer(tokenizer).save(args.run_dir / "token_bytes.npz")
    console.print(f"{len(report.steps)} steps imported into {args.run_dir}", markup=False)
    for file, reason in report.refused.items():
        say(console, f"refused  {file}: {reason}")
    return 1 if report.refused else 0
