"""From the rows of another program to a run: its steps, prompts and configuration, complete or absent."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradtrace.commands.rollouts.formats import (
    FORMATS,
    BadRowError,
    Encoder,
    Rollout,
    detect,
    find_files,
    read_rows,
)
from gradtrace.config.keys import check_fields
from gradtrace.config.loader import check_reward, to_yaml
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import group_columns, response_columns
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.own_loop import batch_of_lists
from gradtrace.policy.load import load_tokenizer
from gradtrace.policy.settings import ModelConfig
from gradtrace.rollout.settings import RolloutConfig
from gradtrace.runs import IMPORTED, PROMPTS
from gradtrace.tasks.datasets import encode, messages_of
from gradtrace.tasks.settings import DataConfig, RewardConfig, TaskConfig
from gradtrace.tasks.sources import read_source
from gradtrace.terminal import Progress
from gradtrace.trace.files import atomic_directory
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter

SHOWN = 10
"""Bad rows that an error names."""


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


def import_rollouts(args: argparse.Namespace, progress: Progress) -> ImportReport:
    """Write the rollouts in a file or folder as a run, which must not exist yet. `args`: of `gradtrace trace import`,
    where its options are described."""
    source, run_dir = args.source, args.run_dir
    if not source.exists():
        raise GradtraceError(f"{source}: there is no such file or folder")
    if run_dir.exists():
        raise GradtraceError(f"{run_dir} is there already: an import makes a new run; give another name")
    files = find_files(source)
    name = args.format or detect(files[0])
    tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
    if args.append_end and tokenizer.eos_token_id is None:
        raise GradtraceError(f"--append-end: the tokenizer {args.tokenizer} has no end token")
    restored = restored_prompts(args.prompts, tokenizer) if args.prompts else {}
    encoder = Encoder(tokenizer, args.append_end, restored, reward_weights(args.reward_columns))
    report = ImportReport(name)
    rows = list(read(files, name, encoder, report, progress))
    if report.left_out and not args.skip_bad:
        refuse(report.left_out)
    if not rows:
        raise GradtraceError(f"{source}: no row is left to import")
    steps: dict[int, list[Rollout]] = {}
    for row in rows:
        steps.setdefault(row.step, []).append(row)
    grouped = {step: groups_of(steps[step]) for step in sorted(steps)}
    report.steps, report.responses = list(grouped), len(rows)
    report.tokens = sum(len(row.response) for row in rows)
    report.notes = notes(name, rows, restored, grouped, tokenizer.unk_token_id)
    config = config_of(grouped, args)
    with atomic_directory(run_dir) as folder:
        write_run(folder, grouped, config, tokenizer, {"imported_from": str(source), "format": name}, report)
    return report


def read(files: list[Path], name: str, encoder: Encoder, report: ImportReport, progress: Progress) -> Iterator[Rollout]:
    """The responses; bad rows go to the report."""
    known = FORMATS[name]
    total, done = sum(path.stat().st_size for path in files), 0
    for where, row, size in itertools.chain.from_iterable(map(read_rows, files)):
        done += size
        progress(min(done, total), total)
        try:
            if isinstance(row, BadRowError):
                raise row
            if name != "trl":  # every other column of TRL's table may be a reward
                report.unread |= set(row) - known.knows
            yield well_formed(known.read(row, where, encoder), len(encoder.tokenizer))
        except BadRowError as error:
            report.left_out.append(f"{where}: {error}")


def well_formed(row: Rollout, vocabulary: int) -> Rollout:
    if not row.prompt or not row.response:
        raise BadRowError(f"the {'response' if row.prompt else 'prompt'} has no tokens")
    for name, values in row.tokens.items():
        if len(values) != len(row.response):
            raise BadRowError(f"{name} has {len(values)} numbers, the response {len(row.response)} tokens")
    if (largest := max(*row.prompt, *row.response)) >= vocabulary:
        raise BadRowError(f"token id {largest}, and the tokenizer has {vocabulary}: is it that of these rollouts?")
    return row


def refuse(bad: list[str]) -> None:
    more = len(bad) - SHOWN
    raise GradtraceError(
        f"{len(bad)} rows cannot be imported, and nothing was written:\n  "
        + "\n  ".join(bad[:SHOWN])
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


def config_of(grouped: dict[int, list[list[Rollout]]], args: argparse.Namespace) -> Config:
    """What later commands need to know: the task is the run's own prompts, judged by the reward that was named."""
    groups = [group for step in grouped.values() for group in step]
    rows = [row for group in groups for row in group]
    reward = RewardConfig(path=args.reward) if ".py" in args.reward else RewardConfig(name=args.reward or "task")
    config = Config(
        recipe=IMPORTED,
        model=ModelConfig(path=args.tokenizer),
        task=TaskConfig(name="dataset"),
        data=DataConfig(
            train=[str(args.run_dir.absolute() / PROMPTS)],
            validation_fraction=0.0,
            max_prompt_length=max(len(row.prompt) for row in rows),
            train_batch_size=max(len(step) for step in grouped.values()),
        ),
        rollout=RolloutConfig(
            n=max(2, *(len(group) for group in groups)),
            temperature=args.temperature,
            max_new_tokens=max(len(row.response) for row in rows),
        ),
        reward=reward,
    )
    check_fields(config)
    check_reward(config)
    return config


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


def columns_of(groups: list[list[Rollout]]) -> dict[str, Any]:
    """The columns of a step's file."""
    rows = [row for group in groups for row in group]
    batch = batch_of_lists(
        [group[0].prompt for group in groups],
        [row.response for row in rows],
        [row.reward for row in rows],
        [g for g, group in enumerate(groups) for _ in group],
        [row.written or [True] * len(row.response) for row in rows],
    ).replace(finished=torch.tensor([row.finished for row in rows]))
    columns = group_columns(batch) | response_columns(batch, torch.arange(len(rows)))
    if all(row.advantage is not None for row in rows):
        columns["advantage"] = np.array([row.advantage for row in rows], np.float32)
    for name in sorted({name for row in rows for name in row.tokens}):
        parts = [row.tokens.get(name, [np.nan] * len(row.response)) for row in rows]
        columns[name] = np.concatenate(parts).astype(np.float32)
    if "log_prob" in columns and "sampler_log_prob" in columns:
        columns["ratio"] = np.exp(columns["log_prob"] - columns["sampler_log_prob"])
    return columns
