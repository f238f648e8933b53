"""Sample, judge, summarise, save."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gradtrace import __version__
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.evaluation.model import Loaded
from gradtrace.evaluation.statistics import scores
from gradtrace.intervals import Interval
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.tasks.datasets import stop_token_ids
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.trace.atomic import atomic_write

VALUES_AT_ONCE = 2**23
"""Responses × tokens sampled before they are judged: bounds the memory."""
RESPONSES = "responses.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Settings:
    """What two evaluations must share to be comparable."""

    task: str
    n: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0
    reward: str = ""


@dataclass(frozen=True)
class Result:
    settings: Settings
    model: str
    source: str
    responses: list[dict[str, Any]]
    """One record per response: prompt, key, response, reward, length, finished."""

    def rewards(self) -> dict[str, list[float]]:
        """{key of a prompt: its rewards}, in the order of the prompts."""
        found: dict[str, list[float]] = {}
        for line in self.responses:
            found.setdefault(line["key"], []).append(line["reward"])
        return found


def evaluate(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    reward: RewardFunction,
    settings: Settings,
    source: str = "",
    progress: Callable[[int], None] | None = None,
    max_batch_tokens: int = 32_768,
) -> Result:
    """Same prompts and settings: same random numbers, so that two models meet the same luck.

    `progress(responses so far)` is called as responses end.
    """
    if not prompts:
        raise GradtraceError("there are no problems to evaluate on.")
    tokenizer = loaded.tokenizer
    sampler = Sampler(loaded.model, tokenizer.pad_token_id, max_batch_tokens)
    params = SamplingParams.of(settings, stop_token_ids(tokenizer))
    at_once = max(1, VALUES_AT_ONCE // (params.n * params.max_new_tokens))
    lines: list[dict[str, Any]] = []
    for start in range(0, len(prompts), at_once):
        part = list(prompts[start : start + at_once])
        generator = torch.Generator().manual_seed(1_000_003 * settings.seed + start)
        batch = sampler.generate(
            [prompt.ids for prompt in part],
            params,
            generator=generator,
            progress=counting(progress, len(lines)),
        )
        lines += judged(batch, part, tokenizer, reward)
    return Result(settings, loaded.path, source, lines)


def counting(progress: Callable[[int], None] | None, before: int) -> Callable[[int, int], None] | None:
    """The sampler's progress, with the responses `before` it counted too."""
    return None if progress is None else lambda ended, all_of_them: progress(before + ended)


def judged(
    batch: RolloutBatch, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, reward: RewardFunction
) -> list[dict[str, Any]]:
    texts = tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)
    items = [prompts[group].item for group in batch.group.tolist()]
    rewards = reward(texts, items)
    return [
        {
            "key": key_of(item["prompt"]),
            "prompt": item["prompt"],
            "answer": item["answer"],
            "response": text,
            "reward": value,
            "length": length,
            "finished": finished,
        }
        for item, text, value, length, finished in zip(
            items, texts, rewards, batch.response_lengths.tolist(), batch.finished.tolist(), strict=True
        )
    ]


def key_of(prompt: str) -> str:
    """Names a prompt in files that are compared."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def summarise(result: Result, ks: list[int]) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Scores with intervals, and the same with all settings as JSON."""
    found = scores(list(result.rewards().values()), ks)
    lines = result.responses
    return found, {
        "gradtrace": __version__,
        "model": result.model,
        "source": result.source,
        "settings": dataclasses.asdict(result.settings),
        "problems": len(result.rewards()),
        "responses": len(lines),
        "scores": {k: {"value": v.mean, "low": v.low, "high": v.high} for k, v in found.items()},
        "interval": "95 %, over problems; near 0 and 1 as Agresti and Coull do",
        "mean_length": sum(line["length"] for line in lines) / len(lines),
        "finished": sum(line["finished"] for line in lines) / len(lines),
    }


def save(folder: Path, result: Result, summary: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in result.responses)
    atomic_write(folder / RESPONSES, text.encode())
    atomic_write(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False).encode())


def load_result(folder: Path) -> Result:
    try:
        summary = json.loads((folder / SUMMARY).read_text())
        lines = [json.loads(line) for line in (folder / RESPONSES).read_text().split("\n") if line]
        return Result(Settings(**summary["settings"]), summary["model"], summary["source"], lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GradtraceError(
            f"{folder} is not the result of an evaluation ({SUMMARY}, {RESPONSES}): {type(error).__name__}: {error}"
        ) from None
