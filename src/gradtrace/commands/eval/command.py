"""How good is a model at a task? And is a checkpoint better than another?

  gradtrace eval runs/demo-gsm8k --task gsm8k                        a run: its final policy, or its last checkpoint
  gradtrace eval Qwen/Qwen2.5-1.5B-Instruct --task math500 --n 4     a hub name or a folder
  gradtrace eval runs/x/checkpoints/step_000020 --task countdown --against models/base
  gradtrace eval compare evals/a evals/b                             two evaluations that are there already

Samples --n responses per problem and prints mean@n and pass@k with 95 % intervals (bootstrap over problems). Problems
come from data/TASK, as `gradtrace data prepare TASK` leaves it (test.parquet, else validation.parquet), or from
--source. Responses and summary are saved to evals/TASK-MODEL. A comparison is paired, problem by problem, with the same
random numbers on both sides; a difference is B − A, so positive means that the second (with --against: MODEL itself)
is better.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError
from gradtrace.terminal import no_foreign_bars, progress_bar, say, settings_from, titled_table

if TYPE_CHECKING:
    from rich.console import Console

    from gradtrace.commands.eval.evaluation import Result
    from gradtrace.intervals import Interval
    from gradtrace.tasks.rewards import RewardFunction

TASKS = ("gsm8k", "math500", "aime24", "aime25", "dapo_math", "mbpp", "countdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="+", metavar="MODEL", help="a model, run or checkpoint; or: compare A B")
    add("--task", choices=TASKS, help="what to evaluate on")
    add("--source", default="", help="problems: a file, a prepared folder, or hf:… (data/TASK)")
    add("--n", type=int, default=4, help="responses per problem (4)")
    add("--k", type=int, nargs="+", help="k of pass@k, each ≤ n (1 and n)")
    add("--limit", type=int, default=0, help="only the first so many problems")
    add("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    add("--top-p", type=float, default=1.0)
    add("--max-new-tokens", type=int, default=1024, help="longest response (1024)")
    add("--seed", type=int, default=0)
    add("--reward", default="", help="a reward's name, or FILE:FUNCTION (default: the task's)")
    add("--instruction", help="text appended to every question (original data only)")
    add("--system-prompt", help="system message of every prompt (original data only)")
    add("--against", help="a second model to compare with, or the folder of its evaluation")
    add("--output", type=Path, help="folder for responses and summary (evals/TASK-MODEL)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gradtrace.commands.eval.evaluation import load_result

    no_foreign_bars()
    console = Console()
    if args.model[0] == "compare":
        if len(args.model) != 3:
            raise GradtraceError("write: gradtrace eval compare A B, with the folders of two evaluations.")
        first, second = (load_result(Path(name)) for name in args.model[1:])
        show_comparison(console, first, second, ks_of(args, first.settings.n))
        return 0
    if len(args.model) != 1 or not args.task:
        raise GradtraceError("write: gradtrace eval MODEL --task TASK, or: gradtrace eval compare A B.")
    result = evaluate_and_save(console, args, args.model[0], args.output)
    if args.against:
        saved = Path(args.against) / "responses.jsonl"
        other = (
            load_result(Path(args.against)) if saved.is_file() else evaluate_and_save(console, args, args.against, None)
        )
        show_comparison(console, other, result, ks_of(args, args.n))
    return 0


def ks_of(args: argparse.Namespace, n: int) -> list[int]:
    ks = args.k or sorted({1, n})
    if wrong := [k for k in ks if not 1 <= k <= n]:
        raise GradtraceError(f"--k {wrong[0]}: pass@{wrong[0]} cannot be estimated from --n {n} responses.")
    return ks


def evaluate_and_save(console: Console, args: argparse.Namespace, model: str, output: Path | None) -> Result:
    from gradtrace.commands.eval.evaluation import Settings, evaluate, find_source, load_prompts, save, summarise
    from gradtrace.runs import open_run
    from gradtrace.tasks.prepare.recipes import PREPARATIONS

    ks = ks_of(args, args.n)
    source = find_source(args.task, args.source)
    reward_name = args.reward or PREPARATIONS[args.task].reward
    reward = find_reward(reward_name)
    with console.status(f"loading {model}"):
        opened = open_run(model, [f"model.device={args.device}", "model.attention=auto"])
        prompts = load_prompts(args.task, source, opened.tokenizer, args.limit, args.instruction, args.system_prompt)
        reward.check(prompt.item for prompt in prompts)
    settings = settings_from(args, Settings, reward=reward_name)
    with progress_bar(console, "responses") as progress:
        result = evaluate(opened, prompts, reward, settings, source, progress)
    scores, summary = summarise(result, ks)
    folder = output or Path("evals") / f"{args.task}-{folder_name(model)}"
    save(folder, result, summary)
    show_scores(console, f"{args.task}, {summary['problems']} problems × {args.n}: {model}", scores, summary)
    say(console, f"Responses and summary are in {folder}.")
    return result


def show_scores(console: Console, title: str, scores: dict[str, Interval], summary: dict[str, Any]) -> None:
    rows = [(name, f"{value.mean:.3f}", f"{value.low:.3f} … {value.high:.3f}") for name, value in scores.items()]
    rows += [
        ("finished", f"{summary['finished']:.3f}", ""),
        ("mean length, tokens", f"{summary['mean_length']:.1f}", ""),
    ]
    console.print(titled_table(title, "score", "value", "95 % interval", rows=rows))


def show_comparison(console: Console, first: Result, second: Result, ks: list[int]) -> None:
    from gradtrace.commands.eval.evaluation import compare

    pairs = compare(first, second, ks)
    problems = len(first.rewards())
    say(console, f"A: {first.model}\nB: {second.model}")
    title = f"{first.settings.task}, B − A on the same {problems} problems: positive = B is better"
    table = titled_table(title, "score", "B − A", "95 % interval", "better", "worse", "equal")
    for name, pair in pairs.items():
        change = pair.difference
        ends = f"{change.low:+.3f} … {change.high:+.3f}" + ("" if change.excludes_zero else "  (holds 0)")
        counts = map(str, (pair.better, pair.worse, pair.equal))
        table.add_row(name, f"{change.mean:+.3f}", ends, *counts)
    console.print(table)


def find_reward(name: str) -> RewardFunction:
    from gradtrace.tasks.rewards import load_user_reward, named_reward

    return load_user_reward(name) if ".py" in name else named_reward(name)


def folder_name(model: str) -> str:
    """`runs/x/checkpoints/step_000020` → `x-step_000020`: what tells models apart, fit for a file name."""
    skipped = ("", ".", "..", "runs", "models", "checkpoints", "policy")
    parts = [part for part in Path(model).parts if part not in (*skipped, "/")]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts[-2:])) or "model"
