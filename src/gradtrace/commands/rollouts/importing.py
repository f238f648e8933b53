"""From the rows of another program to a run: its steps, prompts and configuration, complete or absent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.commands.rollouts.formats import (
    FORMATS,
    BadRowError,
    Encoder,
    Rollout,
    detect,
    find_files,
    read_rows,
)
from gradtrace.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig, TaskConfig
from gradtrace.config.keys import check_fields
from gradtrace.config_loader import check_reward, to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import turn_columns
from gradtrace.tasks.datasets import encode, messages_of
from gradtrace.tasks.sources import read_source
from gradtrace.tasks.tokenizer import load_tokenizer
from gradtrace.trace.atomic import atomic_directory
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import ENTROPY_TRACE, ragged
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter

RECIPE = "imported"
PROMPTS = "prompts.jsonl"
"""The prompts of an imported run with their ids and answers: the data of its task."""
SHOWN = 10
"""Bad rows that an error names."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImportSettings:
    tokenizer: str
    format: str = ""
    """Of FORMATS; empty: by the columns of the first row."""
    temperature: float = 1.0
    reward: str = ""
    """Judges responses that are sampled later: a name, or FILE:FUNCTION."""
    append_end: bool = False
    skip_bad: bool = False
    prompts: str = ""
    """A data set with the prompts as messages, where the rows hold their text without special tokens (verl)."""
    reward_columns: str = ""
    """TRL: NAME or NAME=WEIGHT, with commas between."""


@dataclass
class ImportReport:
    format: str
    steps: list[int] = field(default_factory=list)
    responses: int = 0
    tokens: int = 0
    left_out: list[str] = field(default_factory=list)
    """Bad rows, where they may be skipped."""
    unread: set[str] = field(default_factory=set)
    """Columns that no part of a run has a place for."""
    notes: list[str] = field(default_factory=list)


def import_rollouts(source: Path, run_dir: Path, settings: ImportSettings, progress: Progress) -> ImportReport:
    """Write the rollouts in `source`, a file or folder, as run `run_dir`, which must not exist yet."""
    if not source.exists():
        raise GradtraceError(f"{source}: there is no such file or folder")
    if run_dir.exists():
        raise GradtraceError(f"{run_dir} is there already: an import makes a new run; give another name")
    files = find_files(source)
    name = settings.format or detect(files[0])
    tokenizer = load_tokenizer(settings.tokenizer, "--tokenizer")
    if settings.append_end and tokenizer.eos_token_id is None:
        raise GradtraceError(f"--append-end: the tokenizer {settings.tokenizer} has no end token")
    restored = restored_prompts(settings.prompts, tokenizer) if settings.prompts else {}
    encoder = Encoder(tokenizer, settings.append_end, restored, reward_weights(settings.reward_columns))
    report = ImportReport(name)
    rows = list(checked(read(files, name, encoder, report, progress), settings.skip_bad, report))
    if not rows:
        raise GradtraceError(f"{source}: no row is left to import")
    steps: dict[int, list[Rollout]] = {}
    for row in rows:
        steps.setdefault(row.step, []).append(row)
    grouped = {step: groups_of(steps[step]) for step in sorted(steps)}
    report.steps, report.responses = list(grouped), len(rows)
    report.tokens = sum(len(row.response) for row in rows)
    report.notes = notes(name, rows, restored, grouped, tokenizer.unk_token_id)
    config = config_of(grouped, settings, run_dir)
    with atomic_directory(run_dir) as folder:
        write_run(folder, grouped, config, tokenizer, {"imported_from": str(source), "format": name}, report)
    return report


def read(
    files: list[Path], name: str, encoder: Encoder, report: ImportReport, progress: Progress
) -> Iterator[tuple[str, Rollout | BadRowError]]:
    """(FILE:LINE, a response or what is wrong with it)."""
    known = FORMATS[name]
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        for where, row, size in read_rows(path):
            done += size
            progress(min(done, total), total)
            if isinstance(row, BadRowError):
                yield where, row
                continue
            if name != "trl":  # every other column of TRL's table may be a reward
                report.unread |= set(row) - known.knows
            try:
                yield where, well_formed(known.read(row, where, encoder), len(encoder.tokenizer))
            except BadRowError as error:
                yield where, error


def well_formed(row: Rollout, vocabulary: int) -> Rollout:
    if not row.prompt or not row.response:
        raise BadRowError(f"the {'response' if row.prompt else 'prompt'} has no tokens")
    for name, values in row.tokens.items():
        if len(values) != len(row.response):
            raise BadRowError(f"{name} has {len(values)} numbers, the response {len(row.response)} tokens")
    if (largest := max(*row.prompt, *row.response)) >= vocabulary:
        raise BadRowError(f"token id {largest}, and the tokenizer has {vocabulary}: is it that of these rollouts?")
    return row


def checked(
    rows: Iterable[tuple[str, Rollout | BadRowError]], skip_bad: bool, report: ImportReport
) -> Iterator[Rollout]:
    """The responses; an error that names the bad rows, unless they may be left out."""
    for where, row in rows:
        if isinstance(row, BadRowError):
            report.left_out.append(f"{where}: {row}")
        else:
            yield row
    if report.left_out and not skip_bad:
        more = len(report.left_out) - SHOWN
        raise GradtraceError(
            f"{len(report.left_out)} rows cannot be imported, and nothing was written:\n  "
            + "\n  ".join(report.left_out[:SHOWN])
            + (f"\n  … and {more} more" if more > 0 else "")
            + "\nMend them, or leave them out with --skip-bad."
        )


def groups_of(rows: list[Rollout]) -> list[list[Rollout]]:
    """The groups of a step in the order in which they appear."""
    groups: dict[Any, list[Rollout]] = {}
    for row in rows:
        own = groups.setdefault(row.group if row.group is not None else tuple(row.prompt), [])
        if own and own[0].prompt != row.prompt:
            raise GradtraceError(
                f"{row.where}: its group {row.group!r} has another prompt at {own[0].where}: a group is the responses "
                "to one prompt. Nothing was written"
            )
        own.append(row)
    return list(groups.values())


def reward_weights(text: str) -> dict[str, float]:
    found = {}
    for word in filter(None, text.split(",")):
        name, _, weight = word.partition("=")
        try:
            found[name.strip()] = float(weight or 1.0)
        except ValueError:
            raise GradtraceError(
                f"--reward-columns {word!r}: write NAME or NAME=WEIGHT, e.g. correct,format=0.2"
            ) from None
    return found


def restored_prompts(source: str, tokenizer: Any) -> dict[str, list[int]]:
    """Prompt ids by the text that is left of them when special tokens are skipped in decoding."""
    found = {}
    for number, row in enumerate(read_source(source, "--prompts")):
        messages = messages_of(row.get("prompt"))
        if messages is None:
            raise GradtraceError(f"--prompts {source}, row {number}: it needs `prompt`, a text or messages")
        ids = encode(tokenizer, messages)
        found[tokenizer.decode(ids, skip_special_tokens=True)] = ids
    return found


def notes(
    name: str,
    rows: list[Rollout],
    restored: dict[str, list[int]],
    grouped: dict[int, list[list[Rollout]]],
    unknown_id: int | None,
) -> list[str]:
    """What a person should know about ids that were made from texts, and about groups that cannot be compared."""
    found = []
    if strange := sum(unknown_id in row.prompt or unknown_id in row.response for row in rows):
        found.append(
            f"{strange} rows have text that the tokenizer does not know (id {unknown_id}): is it the right one?"
        )
    if name == "verl":
        unknown = {row.text for row in rows} - set(restored)
        if unknown:
            found.append(
                f"{len(unknown)} prompts were encoded from their text, which verl stores without special tokens: scores"
                " under a model are those of that text. --prompts train.parquet (data.train_files) restores them."
            )
    if name in ("verl", "trl"):
        found.append(f"{name} stores responses without their end token; --append-end adds it to each.")
    groups = [group for step in grouped.values() for group in step]
    if alone := sum(len({row.reward for row in group}) < 2 for group in groups):
        found.append(f"{alone} of {len(groups)} groups have one reward only: they cannot be scored by contrast.")
    return found


# ---------------------------------------------------------------- the run


def config_of(grouped: dict[int, list[list[Rollout]]], settings: ImportSettings, run_dir: Path) -> Config:
    """What later commands need to know: the task is the run's own prompts, judged by the reward that was named."""
    groups = [group for step in grouped.values() for group in step]
    rows = [row for group in groups for row in group]
    reward = (
        RewardConfig(path=settings.reward) if ".py" in settings.reward else RewardConfig(name=settings.reward or "task")
    )
    config = Config(
        recipe=RECIPE,
        model=ModelConfig(path=settings.tokenizer),
        task=TaskConfig(name="dataset"),
        data=DataConfig(
            train=[str(run_dir.absolute() / PROMPTS)],
            validation_fraction=0.0,
            max_prompt_length=max(len(row.prompt) for row in rows),
            train_batch_size=max(len(step) for step in grouped.values()),
        ),
        rollout=RolloutConfig(
            n=max(2, *(len(group) for group in groups)),
            temperature=settings.temperature,
            max_new_tokens=max(len(row.response) for row in rows),
        ),
        reward=reward,
    )
    check_fields(config)
    check_reward(config)
    return config


def at_home(config: Config, run_dir: Path) -> Config:
    """The settings of a run; an imported one has its prompts beside them, wherever it was moved."""
    if config.recipe != RECIPE or not (run_dir / PROMPTS).is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=[str(run_dir.absolute() / PROMPTS)]))


def write_run(
    folder: Path,
    grouped: dict[int, list[list[Rollout]]],
    config: Config,
    tokenizer: Any,
    origin: dict[str, str],
    report: ImportReport,
) -> None:
    """Everything that a run has on disk: settings, texts of tokens, a trace file for each step, metrics and prompts."""
    meta = {**origin, "task": "imported", "temperature": config.rollout.temperature}
    with RunFiles(folder) as files, TraceWriter(folder, ENTROPY_TRACE, on_error="raise") as writer:
        files.write_config(to_yaml(config))
        files.write_token_bytes(TokenBytes.from_tokenizer(tokenizer))
        for line in (*report.notes, *(f"left out: {bad}" for bad in report.left_out)):
            files.messages.tell(line)
        for step, groups in grouped.items():
            rows = [row for group in groups for row in group]
            writer.write(step, columns_of(groups), meta)
            files.log(
                step,
                {
                    "critic/rewards/mean": float(np.mean([row.reward for row in rows])),
                    "response_length/mean": float(np.mean([len(row.response) for row in rows])),
                },
            )
        prompts = {
            (tuple(row.prompt), json.dumps(row.answer, sort_keys=True, default=str)): row
            for groups in grouped.values()
            for group in groups
            for row in group[:1]
        }
        with (folder / PROMPTS).open("w", encoding="utf-8") as file:
            for row in prompts.values():
                text = row.text or tokenizer.decode(row.prompt)
                record = {"prompt": text, "prompt_ids": row.prompt, "answer": row.answer, "row": row.where}
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")


def batch_of(rows: list[Rollout], number: torch.Tensor) -> RolloutBatch:
    """The responses with their loss masks, for what is made of these alone."""
    lengths = torch.tensor([len(row.response) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    for r, row in enumerate(rows):
        mask[r, : len(row.response)] = torch.tensor(row.written or [True] * len(row.response))
    unused = torch.zeros(mask.shape)
    return RolloutBatch([], number, unused.long(), mask, number >= 0, unused, lengths=lengths)


def columns_of(groups: list[list[Rollout]]) -> dict[str, Any]:
    """The columns of a step's file."""
    rows = [dataclasses.replace(row, group=str(g)) for g, group in enumerate(groups) for row in group]
    number = torch.tensor([int(row.group or 0) for row in rows])
    rewards = torch.tensor([row.reward for row in rows])
    columns: dict[str, Any] = {
        "group_id": np.arange(len(groups)),
        "group": number.numpy(),
        "row": np.arange(len(rows)),
        "reward": rewards.numpy(),
        "accepted": accepted(rewards, number).numpy(),
        "length": np.array([len(row.response) for row in rows]),
        "finished": np.array([row.finished for row in rows]),
        "token_id": np.concatenate([row.response for row in rows]),
    }
    if not all(all(row.written or [True]) for row in rows):
        columns |= turn_columns(batch_of(rows, number))
    columns["prompt_ids"], columns["prompt_offsets"] = ragged([group[0].prompt for group in groups])
    if all(row.advantage is not None for row in rows):
        columns["advantage"] = np.array([row.advantage for row in rows], np.float32)
    for name in sorted({name for row in rows for name in row.tokens}):
        parts = [row.tokens.get(name, [np.nan] * len(row.response)) for row in rows]
        columns[name] = np.concatenate(parts).astype(np.float32)
    if "log_prob" in columns and "sampler_log_prob" in columns:
        columns["ratio"] = np.exp(columns["log_prob"] - columns["sampler_log_prob"])
    return columns
