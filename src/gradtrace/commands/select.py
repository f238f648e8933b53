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
from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.config import ModelConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin.diagnosis import diagnose
from gradtrace.instruments.tracin.losses import has_signal, training_losses, validation_losses
from gradtrace.instruments.tracin.model_scorer import ModelScorer
from gradtrace.instruments.tracin.scores import score_parts
from gradtrace.instruments.tracin.selector import METHODS, PARAMETERS, SIGN, UNIT, TracInSelector
from gradtrace.policy.policy import Policy, load_with_adapters
from gradtrace.tasks.datasets import encode, messages_of
from gradtrace.tasks.rewards import shorten
from gradtrace.tasks.sources import read_file
from gradtrace.tasks.tokenizer import load_tokenizer
from gradtrace.terminal import no_foreign_bars
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.reader import Run, open_run
from gradtrace.trace.schema import ENTROPY_TRACE, INFLUENCE_TRACE, TRACIN, TracinReason
from gradtrace.training.checkpoint import model_of

SAVED_KINDS = (ENTROPY_TRACE, TRACIN, INFLUENCE_TRACE)
"""Traces in which a run keeps its rollouts, the most complete first."""
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
    folder = model_of(args.model)
    tokenizer = load_tokenizer(folder)
    model = load_with_adapters(folder, ModelConfig(device=args.device), trainable=True)
    policy = Policy(model, next(model.parameters()).device, args.temperature)
    chat = not args.no_chat_template
    rows = read_rows(args.data, tokenizer, chat)
    data = to_batch(rows, "DATA")
    validation = to_batch(read_rows(args.validation, tokenizer, chat), "--validation")
    warn_overlap(data, validation, console)
    try:
        selector = TracInSelector(model, args.method, args.parameters)
        scores, remarks = score(policy, selector, data, validation, args.token_budget)
    except AttributionError as error:
        raise GradtraceError(f"gradtrace select: {error}") from error
    table = ranked(rows, data, scores)
    about = {"model": folder, "validation": args.validation, "method": selector.method}
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


def saved_rollouts(run: Run, step: int | None, tokenizer: Any) -> list[Row]:
    kinds = [kind for kind in SAVED_KINDS if run.steps(kind) and (step is None or step in run.steps(kind))]
    if not kinds:
        which = "no traced step" if step is None else f"no trace of step {step}"
        raise GradtraceError(f"{run.path}: {which}. Train with trainer.entropy_trace.enable=true to save rollouts.")
    saved = run.step(kinds[0], run.steps(kinds[0])[-1] if step is None else step)
    rows = []
    prompts = [saved.group(g).prompt_ids.tolist() for g in range(saved.n_groups)]
    for r in range(saved.n_responses):
        if "reason" in saved and saved["reason"][r] == int(TracinReason.VALIDATION):
            continue
        prompt, response = prompts[saved["group"][r]], saved.tokens(r)["token_id"].tolist()
        texts = tokenizer.batch_decode([prompt, response])
        rows.append(Row(prompt, response, texts[0], texts[1], float(saved["reward"][r])))
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
    index = {tuple(row.prompt_ids): 0 for row in rows}
    index = {prompt: number for number, prompt in enumerate(index)}
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    responses = torch.zeros(mask.shape, dtype=torch.long)
    responses[mask] = torch.tensor([token for row in rows for token in row.response_ids])
    group = torch.tensor([index[tuple(row.prompt_ids)] for row in rows])
    rewards = torch.tensor([0.0 if row.reward is None else row.reward for row in rows])
    weights = advantages(rewards, group, mask) if all(rewarded) else mask.float()
    return RolloutBatch(
        prompts=[list(prompt) for prompt in index],
        group=group,
        responses=responses,
        response_mask=mask,
        finished=torch.ones(len(rows), dtype=torch.bool),
        sampler_log_probs=torch.zeros(mask.shape),
        rewards=rewards,
        advantages=weights,
    )


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


def score(
    policy: Policy, selector: TracInSelector, data: RolloutBatch, validation: RolloutBatch, budget: int
) -> tuple[Tensor, list[str]]:
    """(scores float64[R] of the responses of `data` against the validation set, what is notable about them)."""
    if not has_signal(validation):
        raise GradtraceError("--validation says nothing: no prompt of it has responses with different rewards.")
    train = training_losses(data, lambda mask: mask.float())
    host = ModelScorer(policy, selector, budget, shown=shown)
    found, measures = score_parts(host, train, [validation_losses(validation)], measure=False)
    scores = torch.zeros(len(data), dtype=torch.float64)
    scores[train.rows] = found[0]
    return scores, diagnose(scores.numpy(), measures.val_norm, val_prompts=len(validation.prompts))


def shown(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with a progress bar in a terminal."""
    collected = list(items)
    return iter(track(collected, what, transient=True, disable=not Console().is_terminal))


# ---------------------------------------------------------------- the result


def ranked(rows: list[Row], data: RolloutBatch, scores: Tensor) -> pyarrow.Table:
    """Order the responses, best first; those that could not be scored come last."""
    order = torch.argsort(scores.nan_to_num(nan=-torch.inf), descending=True, stable=True).tolist()
    chosen = [rows[index] for index in order]
    columns: dict[str, Any] = {
        "rank": list(range(1, len(order) + 1)),
        "score": [float(scores[index]) for index in order],
        "row": order,
        "prompt": [row.prompt for row in chosen],
        "response": [row.response for row in chosen],
        "reward": [row.reward for row in chosen],
        "advantage": [float(data.need("advantages")[index, 0]) for index in order],
    }
    return pyarrow.table(columns)


def write(path: Path, table: pyarrow.Table, about: dict[str, str]) -> None:
    table = table.replace_schema_metadata({f"gradtrace.{key}": value for key, value in about.items()})
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer)
    try:
        atomic_write(path, buffer.getvalue().to_pybytes())
    except OSError as error:
        raise GradtraceError(f"-o {path}: it cannot be written: {error}") from error


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
