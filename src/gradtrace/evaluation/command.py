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
from typing import TYPE_CHECKING

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from rich.console import Console

    from gradtrace.evaluation.run import Result
    from gradtrace.tasks.rewards import RewardFunction

TASKS = ("gsm8k", "math500", "aime24", "aime25", "dapo_math", "mbpp", "countdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="+", metavar="MODEL", help="a model, run or checkpoint; or: compare A B"
    )
    parser.add_argument("--task", choices=TASKS, help="what to evaluate on")
    parser.add_argument(
        "--source", default="", help="problems: a file, a prepared folder, or hf:… (data/TASK)"
    )
    parser.add_argument("--n", type=int, default=4, help="responses per problem (4)")
    parser.add_argument("--k", type=int, nargs="+", help="k of pass@k, each ≤ n (1 and n)")
    parser.add_argument("--limit", type=int, default=0, help="only the first so many problems")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="longest response (1024)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--reward", default="", help="a reward's name, or FILE:FUNCTION (default: the task's)"
    )
    parser.add_argument("--instruction", help="text appended to every question (original data only)")
    parser.add_argument("--system-prompt", help="system message of every prompt (original data only)")
    parser.add_argument("--against", help="a second model to compare with, or the folder of its evaluation")
    parser.add_argument("--output", type=Path, help="folder for responses and summary (evals/TASK-MODEL)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def run(args: argparse.Namespace) -> int:
    import transformers
    from rich.console import Console

    from gradtrace.evaluation.run import load_result
    from gradtrace.evaluation.show import show_comparison

    transformers.utils.logging.disable_progress_bar()  # "Loading weights", before our own
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
            load_result(Path(args.against))
            if saved.is_file()
            else evaluate_and_save(console, args, args.against, None)
        )
        show_comparison(console, other, result, ks_of(args, args.n))
    return 0


def ks_of(args: argparse.Namespace, n: int) -> list[int]:
    ks = args.k or sorted({1, n})
    if wrong := [k for k in ks if not 1 <= k <= n]:
        raise GradtraceError(f"--k {wrong[0]}: pass@{wrong[0]} cannot be estimated from --n {n} responses.")
    return ks


def evaluate_and_save(console: Console, args: argparse.Namespace, model: str, output: Path | None) -> Result:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from gradtrace.evaluation.model import load
    from gradtrace.evaluation.run import Settings, evaluate, save, summarise
    from gradtrace.evaluation.show import show_scores
    from gradtrace.evaluation.tasks import find_source, load_prompts
    from gradtrace.tasks.prepare import PREPARATIONS

    ks = ks_of(args, args.n)
    source = find_source(args.task, args.source)
    reward_name = args.reward or PREPARATIONS[args.task].reward
    reward = find_reward(reward_name)
    with console.status(f"loading {model}"):
        loaded = load(model, args.device)
        prompts = load_prompts(
            args.task, source, loaded.tokenizer, args.limit, args.instruction, args.system_prompt
        )
    settings = Settings(
        args.task, args.n, args.temperature, args.top_p, args.max_new_tokens, args.seed, reward_name
    )
    columns = (
        TextColumn("[bold]responses[/bold]"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(prompts) * args.n)
        result = evaluate(
            loaded, prompts, reward, settings, source, lambda done: bar.update(task, completed=done)
        )
    found, summary = summarise(result, ks)
    folder = output or Path("evals") / f"{args.task}-{folder_name(model)}"
    save(folder, result, summary)
    show_scores(console, f"{args.task}, {summary['problems']} problems × {args.n}: {model}", found, summary)
    console.print(f"Responses and summary are in {folder}.", highlight=False)
    return result


def find_reward(name: str) -> RewardFunction:
    from gradtrace.tasks.rewards import load_user_reward, named_reward

    return load_user_reward(name) if ".py" in name else named_reward(name)


def folder_name(model: str) -> str:
    """`runs/x/checkpoints/step_000020` → `x-step_000020`: what tells models apart, fit for a file name."""
    skipped = ("", ".", "..", "runs", "models", "checkpoints", "policy")
    parts = [part for part in Path(model).parts if part not in (*skipped, "/")]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts[-2:])) or "model"
