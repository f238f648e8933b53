"""Rollouts as other programs write them, row by row.

  jsonl     one object for each response: prompt or prompt_ids, response or response_ids, reward; optional: log_probs
            (the sampler's, one for each token of response_ids), step, group, advantage, answer, finished
  verl      `trainer.rollout_data_dir`: STEP.jsonl with input, output, score, gts, step (and uid)
  trl       `log_completions=True`: completions/completions_STEP.parquet with prompt, completion, rewards, advantage
  prime_rl  its token export: step_N/rank_R.jsonl with token_ids, loss_mask, rewards, inference_logprobs …

A text is encoded as it stands; messages go through the tokenizer's chat template; token ids are taken as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from gradtrace.errors import GradtraceError
from gradtrace.tasks.datasets import encode, is_conversation
from gradtrace.tasks.rewards import shorten

SUFFIXES = (".jsonl", ".parquet")
JsonRow = dict[str, Any]


class BadRowError(ValueError):
    """What is wrong with one row; the reader of its file knows where it stands."""


@dataclass(frozen=True)
class Rollout:
    """One response, as it will be stored."""

    where: str
    """FILE:LINE"""
    step: int
    prompt: list[int]
    response: list[int]
    reward: float
    text: str = ""
    """The prompt, for whoever reads or judges; empty: decoded from its ids."""
    group: str | None = None
    """Names its group within the step; None: responses to the same prompt are one."""
    advantage: float | None = None
    answer: Any = None
    finished: bool = True
    tokens: Mapping[str, list[float]] = field(default_factory=dict)
    """Columns with a number for each token of the response: sampler_log_prob, log_prob, entropy."""
    written: list[bool] | None = None
    """Which tokens of the response the policy wrote; None: all."""


@dataclass(frozen=True)
class Encoder:
    tokenizer: Any
    append_end: bool = False
    """Add the tokenizer's end token to responses that are texts."""
    restored: Mapping[str, list[int]] = field(default_factory=dict)
    """Prompts whose text lost its special tokens → their ids, by that text."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """TRL's reward columns that are added up, with their weights; empty: all, with weight 1."""

    def prompt(self, value: Any) -> tuple[list[int], str]:
        """(ids, text) of a text or of messages."""
        if isinstance(value, str):
            if value in self.restored:
                return self.restored[value], value
            marked = bool(self.tokenizer.bos_token) and value.startswith(self.tokenizer.bos_token)
            return self._ids(value, add_special_tokens=not marked), value
        if not is_conversation(value):
            raise BadRowError(f"the prompt is neither a text nor a list of messages: {shorten(repr(value), 60)}")
        try:
            ids = encode(self.tokenizer, value)
        except Exception as error:  # roles that the chat template refuses
            raise BadRowError(f"the chat template refuses the prompt: {error}") from error
        return ids, "\n".join(message["content"] for message in value)

    def response(self, value: Any) -> list[int]:
        if not isinstance(value, str):
            raise BadRowError(f"the response is no text: {shorten(repr(value), 60)}")
        end = [self.tokenizer.eos_token_id] if self.append_end else []
        return self._ids(value, add_special_tokens=False) + end

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(self.tokenizer(text, **options)["input_ids"])


# ---------------------------------------------------------------- one row of each format


def plain_row(row: JsonRow, where: str, encoder: Encoder) -> Rollout:
    prompt, text = (
        (_ids(row, "prompt_ids"), _text(row.get("prompt")))
        if row.get("prompt_ids") is not None
        else encoder.prompt(_needed(row, "prompt"))
    )
    given = row.get("response_ids") is not None
    response = _ids(row, "response_ids") if given else encoder.response(_needed(row, "response"))
    tokens = {}
    if row.get("log_probs") is not None:
        tokens["sampler_log_prob"] = _numbers(row, "log_probs")
        if not given and len(tokens["sampler_log_prob"]) != len(response):
            raise BadRowError(
                f"log_probs has {len(tokens['sampler_log_prob'])} numbers and the text of the response {len(response)} "
                "tokens: give response_ids, the tokens that were sampled"
            )
    group = row.get("group")
    return Rollout(
        where,
        _step(row.get("step", 1)),
        prompt,
        response,
        _number(row, "reward"),
        text,
        None if group is None else str(group),
        None if row.get("advantage") is None else _number(row, "advantage"),
        row.get("answer"),
        bool(row.get("finished", True)),
        tokens,
    )


def verl_row(row: JsonRow, where: str, encoder: Encoder) -> Rollout:
    prompt, text = encoder.prompt(_needed(row, "input"))
    uid = row.get("uid")  # SAMPLE_ROLLOUT_OUTPUT, where the trainer writes it
    return Rollout(
        where,
        _step(row.get("step")),
        prompt,
        encoder.response(_needed(row, "output")),
        _number(row, "score"),
        text,
        None if uid is None else str(uid).rsplit("_", 2)[0],
        answer=row.get("gts"),
    )


TRL_OWN = ("step", "prompt", "completion", "advantage", "image", "images")


def trl_row(row: JsonRow, where: str, encoder: Encoder) -> Rollout:
    prompt, text = encoder.prompt(_needed(row, "prompt"))
    completion = _needed(row, "completion")
    if isinstance(completion, list):
        if len(completion) != 1 or completion[0].get("role") != "assistant":
            raise BadRowError(
                f"the completion has {len(completion)} messages, and TRL's table does not say which of their tokens "
                "the policy wrote: trace such a run while it trains (docs/trl.md)"
            )
        completion = completion[0].get("content")
    weights = encoder.reward_weights or {
        name: 1.0
        for name, value in row.items()
        if name not in TRL_OWN and isinstance(value, int | float) and not isinstance(value, bool)
    }
    numbers = {name: float(row[name]) for name in weights if isinstance(row.get(name), int | float)}
    # A function may pass over a row.
    given = [weights[name] * value for name, value in numbers.items() if not math.isnan(value)]
    if not given:
        raise BadRowError(f"no reward among its columns: {', '.join(row)}; name them with --reward-columns")
    return Rollout(
        where,
        _step(row.get("step")),
        prompt,
        encoder.response(completion),
        sum(given),
        text,
        advantage=None if row.get("advantage") is None else _number(row, "advantage"),
    )


def prime_rl_row(row: JsonRow, where: str, encoder: Encoder) -> Rollout:
    """The response is what stands between the first and the last trained token; gaps in it are others' turns."""
    ids, mask = _ids(row, "token_ids"), [bool(own) for own in _needed(row, "loss_mask")]
    if len(mask) != len(ids) or not any(mask):
        raise BadRowError(f"{len(ids)} token_ids and a loss_mask of {len(mask)}, {sum(mask)} of them trained")
    first, end = mask.index(True), len(mask) - mask[::-1].index(True)
    own = slice(first, end)
    names = {"inference_logprobs": "sampler_log_prob", "trainer_logprobs": "log_prob", "entropy": "entropy"}
    tokens = {
        column: [value if wrote else math.nan for value, wrote in zip(_numbers(row, name), mask, strict=True)][own]
        for name, column in names.items()
        if row.get(name) and len(row[name]) == len(ids)
    }
    values = {
        name: row[name][first] if isinstance(row.get(name), list) and len(row[name]) == len(ids) else None
        for name in ("rewards", "advantages")
    }
    reward = values["advantages"] if values["rewards"] is None else values["rewards"]
    if not isinstance(reward, int | float):
        raise BadRowError("it has neither rewards nor advantages of its tokens")
    return Rollout(
        where,
        _step(row.get("step")),
        ids[:first],
        ids[own],
        float(reward),
        advantage=values["advantages"] if isinstance(values["advantages"], int | float) else None,
        tokens=tokens,
        written=mask[own],
    )


def _needed(row: JsonRow, name: str) -> Any:
    if row.get(name) is None:
        raise BadRowError(f"it has no {name}; its columns are {', '.join(row)}")
    return row[name]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _step(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRowError(f"step is {value!r}, not a number of a step")
    return value


def _number(row: JsonRow, name: str) -> float:
    value = _needed(row, name)
    if not isinstance(value, int | float) or (isinstance(value, bool) and name != "reward") or not math.isfinite(value):
        raise BadRowError(f"{name} is {value!r}, not a finite number")
    return float(value)


def _numbers(row: JsonRow, name: str) -> list[float]:
    """Null, where a program could not write a number, becomes NaN."""
    values = _needed(row, name)
    if not isinstance(values, list) or not all(v is None or isinstance(v, int | float) for v in values):
        raise BadRowError(f"{name} is no list of numbers")
    return [math.nan if value is None else float(value) for value in values]


def _ids(row: JsonRow, name: str) -> list[int]:
    values = _needed(row, name)
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**31 for v in values):
        raise BadRowError(f"{name} is no list of token ids")
    return values


# ---------------------------------------------------------------- formats and files


@dataclass(frozen=True)
class Format:
    columns: frozenset[str]
    """What its rows have and rows of other formats have not, all together."""
    read: Callable[[JsonRow, str, Encoder], Rollout]
    knows: frozenset[str]
    """Columns that are read; others are named, and left aside."""


FORMATS = {
    "prime_rl": Format(
        frozenset({"token_ids", "loss_mask"}),
        prime_rl_row,
        frozenset({"step", "token_ids", "loss_mask", "advantages", "rewards", "inference_logprobs", "trainer_logprobs",
                   "entropy"}),
    ),
    "verl": Format(
        frozenset({"input", "output", "score"}),
        verl_row,
        frozenset({"input", "output", "gts", "score", "step", "uid"}),
    ),
    "trl": Format(frozenset({"prompt", "completion"}), trl_row, frozenset(TRL_OWN)),
    "jsonl": Format(
        frozenset(),
        plain_row,
        frozenset({"prompt", "prompt_ids", "response", "response_ids", "reward", "log_probs", "step", "group",
                   "advantage", "answer", "finished"}),
    ),
}  # fmt: skip


def find_files(source: Path) -> list[Path]:
    """The files with rows in a file's or folder's path, those of earlier steps first."""
    if source.is_file():
        found = [source]
    else:
        found = [path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    if not found or any(path.suffix not in SUFFIXES for path in found):
        raise GradtraceError(f"{source}: there is no {' or '.join(SUFFIXES)} file to import")
    return sorted(found, key=lambda path: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", str(path))])


def read_rows(path: Path) -> Iterator[tuple[str, JsonRow | BadRowError, int]]:
    """(FILE:LINE, row or what is wrong with the line, bytes or rows that were read) of a file, one at a time."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    row = BadRowError("is no JSON object")
            except (ValueError, RecursionError) as error:
                row = BadRowError(f"is not valid JSON: {error}")
            yield f"{path}:{number}", row, len(line)


def _parquet_rows(path: Path) -> Iterator[tuple[str, JsonRow | BadRowError, int]]:
    try:
        table = pyarrow.parquet.ParquetFile(path)
        size = path.stat().st_size / max(1, table.metadata.num_rows)
        number = 0
        for batch in table.iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row, round(size)
    except (pyarrow.ArrowException, OSError) as error:
        raise GradtraceError(f"{path} is not a readable parquet file: {error}") from None


def detect(path: Path) -> str:
    """The format of a file, by the columns of its first row."""
    for _, row, _ in read_rows(path):
        if isinstance(row, BadRowError):
            continue
        for name, known in FORMATS.items():
            if known.columns and known.columns <= set(row):
                return name
        if {"prompt", "prompt_ids"} & set(row) and {"response", "response_ids"} & set(row):
            return "jsonl"
        raise GradtraceError(
            f"{path}: its rows have the columns {', '.join(row)}, which are those of no known format: say which it is "
            f"with --format ({', '.join(FORMATS)}), or write one with prompt, response and reward"
        )
    raise GradtraceError(f"{path} has no rows that can be read")
