"""Rank a data set by how much each response helps a validation set: offline TracIn scores, as a parquet file.

    gradtrace select MODEL data.jsonl --validation val.jsonl -o ranked.parquet
    gradtrace select runs/demo runs/demo --validation val.jsonl        the rollouts of the run's last traced step
    gradtrace select runs/demo runs/demo:12 --validation runs/demo:40  those of step 12, against those of step 40

MODEL is a transformers folder, a checkpoint of a run, or a run (its policy). DATA and --validation are files with the
columns `prompt` and `response` (.jsonl, .json, .parquet) or saved rollouts, RUN[:STEP].

With a `reward` column a response counts by its advantage: its reward against the other responses to the same prompt
(against the mean of the file where it has no siblings). Without one, every response is a demonstration to be imitated.

Each row of the result has `rank`, `score`, `row` (its place in DATA), prompt, response, reward and advantage, the
best first. A positive score: a gradient step on this response lowers the validation loss. Scores are comparable within
one file; their unit is validation loss per unit of learning rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from gradtrace.algorithms import AdvantageInputs, advantage
from gradtrace.attribution import AttributionError, TrainingPass
from gradtrace.batch import RolloutBatch
from gradtrace.commands.pages import write_page
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.own_loop import batch_of_lists
from gradtrace.instruments.tracin import TRACIN, TracinConfig
from gradtrace.instruments.tracin.diagnosis import diagnose
from gradtrace.instruments.tracin.losses import has_signal, training_losses, validation_losses
from gradtrace.instruments.tracin.observer import Question, TracinObserver
from gradtrace.instruments.tracin.selector import METHODS, PARAMETERS, SIGN, UNIT
from gradtrace.runs import open_run
from gradtrace.tasks.datasets import encode, messages_of
from gradtrace.tasks.rewards import shorten
from gradtrace.tasks.sources import read_file
from gradtrace.terminal import no_foreign_bars
from gradtrace.trace.reader import RunReader
from gradtrace.training.host import PolicyHost

SAVED_KINDS = (ENTROPY_TRACE, TRACIN, INFLUENCE_TRACE)
"""Traces in which a run keeps its rollouts."""
SHOWN = 3

Item = TypeVar("Item")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a transformers folder, a checkpoint or a run")
    add("data", help="a file with prompts and responses, or RUN[:STEP]")
    add("--validation", required=True, metavar="DATA", help="what the responses should help")
    add("-o", "--output", default="ranked.parquet", help="default: ranked.parquet")
    add("--method", choices=METHODS, default="auto")
    add("--parameters", choices=PARAMETERS, default="linear")
    add("--temperature", type=float, default=1.0, help="of the log-probs (default: 1)")
    add("--token-budget", type=int, default=8192, help="tokens per pass (default: 8192)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--no-chat-template",
        action="store_true",
        help="prompts as they are, without the tokenizer's template",
    )


@dataclass(frozen=True)
class Row:
    """One response of a data set."""

    prompt_ids: list[int]
    response_ids: list[int]
    prompt: str
    response: str
    reward: float | None


def run(args: argparse.Namespace) -> int:
    no_foreign_bars()
    console = Console()
    opened = open_run(
        args.model,
        [f"model.device={args.device}", "model.attention=auto", f"rollout.temperature={args.temperature}"],
    )
    tokenizer, policy = opened.tokenizer, opened.policy(trainable=True, precision="float32")
    chat = not args.no_chat_template
    rows = read_rows(args.data, tokenizer, chat)
    data = to_batch(rows, "DATA")
    validation = to_batch(read_rows(args.validation, tokenizer, chat), "--validation")
    warn_overlap(data, validation, console)
    try:
        host = PolicyHost(policy, None, TrainingPass(), token_budget=args.token_budget)
        host.shown = shown
        observer = TracinObserver(
            host, TracinConfig(method=args.method, parameters=args.parameters, preconditioner="none")
        )
        scores, remarks = score(observer, data, validation)
    except AttributionError as error:
        raise GradtraceError(f"gradtrace select: {error}") from error
    table = ranked(rows, data, scores)
    about = {
        "model": str(opened.checkpoint().weights),
        "validation": args.validation,
        "method": observer.selector.method,
    }
    write(Path(args.output), table, {**about, "sign": SIGN, "unit": UNIT})
    show(console, table, remarks, Path(args.output))
    return 0


# ---------------------------------------------------------------- the data


def read_rows(source: str, tokenizer: Any, chat: bool) -> list[Row]:
    path, _, step = source.rpartition(":")
    if Path(source).is_dir() or (path and step.isdigit() and Path(path).is_dir()):
        opened = open_run(source if Path(source).is_dir() else path)
        return saved_rollouts(opened, None if Path(source).is_dir() else int(step), tokenizer)
    rows = read_file(Path(source), "gradtrace select")
    if not rows:
        raise GradtraceError(f"{source}: it has no rows.")
    return [file_row(row, f"{source}, row {number}", tokenizer, chat) for number, row in enumerate(rows)]


def saved_rollouts(run: RunReader, step: int | None, tokenizer: Any) -> list[Row]:
    there = {number for kind in SAVED_KINDS for number in run.steps(kind)}
    if not there or (step is not None and step not in there):
        which = "no traced step" if step is None else f"no trace of step {step}"
        raise GradtraceError(f"{run.path}: {which}. Train with trainer.entropy_trace.enable=true to save rollouts.")
    table = run.step_table(max(there) if step is None else step)
    rows = []
    for r, reward in enumerate(table.need("reward").tolist()):
        prompt, response = table.prompt(int(table.group[r])).tolist(), table.ids(r).tolist()
        texts = tokenizer.batch_decode([prompt, response])
        rows.append(Row(prompt, response, texts[0], texts[1], reward))
    return rows


def file_row(row: dict[str, Any], where: str, tokenizer: Any, chat: bool) -> Row:
    prompt, response = row.get("prompt"), row.get("response")
    messages = messages_of(prompt)
    if messages is None or not isinstance(response, str) or not response:
        raise GradtraceError(
            f"{where}: it needs `prompt` (a text or messages) and `response` (a text that is not empty); it has the "
            f"columns {', '.join(row)}."
        )
    reward = row.get("reward")
    ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    text = "\n".join(message["content"] for message in messages)
    prompt_ids = encode(tokenizer, messages, chat)
    if not prompt_ids:
        raise GradtraceError(f"{where}: the prompt is empty; there is no position that predicts the first token.")
    return Row(prompt_ids, ids, text, response, None if reward is None else float(reward))


def to_batch(rows: list[Row], name: str) -> RolloutBatch:
    """The batch with advantages: those of the rewards where there are any, else 1."""
    if not rows:
        raise GradtraceError(f"{name} is empty: there is nothing to score.")
    rewarded = [row.reward is not None for row in rows]
    if any(rewarded) and not all(rewarded):
        missing = rewarded.index(False)
        raise GradtraceError(f"{name}: row {missing} has no reward and others have: give all of them one, or none.")
    number: dict[tuple[int, ...], int] = {}
    group = [number.setdefault(tuple(row.prompt_ids), len(number)) for row in rows]
    batch = batch_of_lists(list(number), [row.response_ids for row in rows], [row.reward or 0.0 for row in rows], group)
    weights = advantages(batch.need("rewards"), batch.group, batch.response_mask)
    return batch.replace(advantages=weights if all(rewarded) else batch.response_mask.float())


def advantages(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Advantages float[R, T] against the siblings; where there are none, against the mean of all."""
    alone = torch.bincount(group)[group] < 2
    values = torch.where(mask, (rewards - rewards.mean())[:, None], 0.0)
    several = (~alone).nonzero().squeeze(-1)
    if len(several):
        inputs = AdvantageInputs(rewards[several], group[several], mask[several])
        values[several] = advantage("grpo")(inputs).advantages
    return values


def warn_overlap(data: RolloutBatch, validation: RolloutBatch, console: Console) -> None:
    shared = {tuple(prompt) for prompt in data.prompts} & {tuple(prompt) for prompt in validation.prompts}
    if shared:
        console.print(
            f"[yellow]{len(shared)} prompts are in DATA and in --validation: responses to them score high because they "
            "are alike, not because they help in general.[/]"
        )


# ---------------------------------------------------------------- scores


def score(observer: TracinObserver, data: RolloutBatch, validation: RolloutBatch) -> tuple[Tensor, list[str]]:
    """(scores float64[R] of the responses of `data` against the validation set, what is notable about them)."""
    if not has_signal(validation):
        raise GradtraceError("--validation says nothing: no prompt of it has responses with different rewards.")
    train = training_losses(data, lambda mask: mask.float())
    found = observer.answer(Question(train, [validation_losses(validation)], measure=False))
    scores = torch.zeros(len(data), dtype=torch.float64)
    for row, own in found.columns["scores"].items():
        scores[row] = own
    return scores, diagnose(scores.numpy(), found.facts["measures"]["val_norm"], val_prompts=len(validation.prompts))


def shown(items: Iterable[Item]) -> Iterator[Item]:
    """The items, with a progress bar in a terminal."""
    collected = list(items)
    return iter(track(collected, "passes", transient=True, disable=not Console().is_terminal))


# ---------------------------------------------------------------- the result


def ranked(rows: list[Row], data: RolloutBatch, scores: Tensor) -> pyarrow.Table:
    """Order the responses, best first; those that could not be scored come last."""
    order = torch.argsort(scores.nan_to_num(nan=-torch.inf), descending=True, stable=True)
    chosen = [rows[index] for index in order.tolist()]
    columns: dict[str, Any] = {
        "rank": list(range(1, len(order) + 1)),
        "score": scores[order].tolist(),
        "row": order.tolist(),
        **{name: [getattr(row, name) for row in chosen] for name in ("prompt", "response", "reward")},
        "advantage": data.need("advantages")[order, 0].double().tolist(),
    }
    return pyarrow.table(columns)


def write(path: Path, table: pyarrow.Table, about: dict[str, str]) -> None:
    table = table.replace_schema_metadata({f"gradtrace.{key}": value for key, value in about.items()})
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer)
    write_page(path, buffer.getvalue().to_pybytes())


def show(console: Console, table: pyarrow.Table, remarks: list[str], path: Path) -> None:
    rows = table.to_pylist()
    positive = sum(row["score"] > 0 for row in rows)
    console.print(f"{len(rows)} responses, {positive} with a positive score ({SIGN}).")
    shown_rows = rows if len(rows) <= 2 * SHOWN else rows[:SHOWN] + rows[-SHOWN:]
    out = Table("rank", "score", "reward", "advantage", "prompt", "response")
    for row in shown_rows:
        reward = "–" if row["reward"] is None else f"{row['reward']:g}"
        texts = [shorten(row[name], 40) for name in ("prompt", "response")]
        out.add_row(str(row["rank"]), f"{row['score']:.3g}", reward, f"{row['advantage']:+.2f}", *texts)
    console.print(out)
    for sentence in remarks:
        console.print(f"[yellow]{sentence}[/]")
    console.print(f"Written: {path}")
