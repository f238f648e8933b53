"""Load a model, sample, judge, summarise, save; and two evaluations of the same problems, prompt by prompt."""

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
from gradtrace.config import ModelConfig
from gradtrace.errors import GradtraceError
from gradtrace.evaluation.statistics import Paired, mean_rewards, paired, pass_rates, scores
from gradtrace.intervals import Interval
from gradtrace.policy.policy import load_with_adapters
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.tasks.datasets import stop_token_ids
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.tasks.tokenizer import load_tokenizer
from gradtrace.trace.atomic import atomic_write
from gradtrace.training.checkpoint import model_of

VALUES_AT_ONCE = 2**23
"""Responses × tokens sampled before they are judged: bounds the memory."""
RESPONSES = "responses.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: PreTrainedTokenizerBase
    path: str
    """The place that the weights were loaded from."""


def load(name: str, device: str = "auto") -> Loaded:
    """The model that a user means: a transformers folder, a hub name, a run, or a checkpoint of a run."""
    path = model_of(name)
    config = ModelConfig(path=path, device=device)
    return Loaded(load_with_adapters(path, config, trainable=False).eval(), load_tokenizer(path), path)


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
    progress: Callable[[int, int], None] = lambda done, total: None,
    max_batch_tokens: int = 32_768,
) -> Result:
    """Same prompts and settings: same random numbers, so that two models meet the same luck.

    `progress(responses so far, all)` is called as responses end.
    """
    if not prompts:
        raise GradtraceError("there are no problems to evaluate on.")
    tokenizer = loaded.tokenizer
    sampler = Sampler(loaded.model, tokenizer.pad_token_id, max_batch_tokens)
    params = SamplingParams.of(settings, stop_token_ids(tokenizer))
    at_once = max(1, VALUES_AT_ONCE // (params.n * params.max_new_tokens))
    lines: list[dict[str, Any]] = []

    def tell(ended: int, _: int) -> None:
        progress(len(lines) + ended, len(prompts) * params.n)

    for start in range(0, len(prompts), at_once):
        part = list(prompts[start : start + at_once])
        generator = torch.Generator().manual_seed(1_000_003 * settings.seed + start)
        ids = [prompt.ids for prompt in part]
        batch = sampler.generate(ids, params, generator=generator, progress=tell)
        lines += judged(batch, part, tokenizer, reward)
    return Result(settings, loaded.path, source, lines)


def judged(
    batch: RolloutBatch, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, reward: RewardFunction
) -> list[dict[str, Any]]:
    texts = tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)
    items = [prompts[group].item for group in batch.group.tolist()]
    rewards = reward(texts, items)
    return [
        {
            # names the problem in files that are compared
            "key": hashlib.sha256(item["prompt"].encode()).hexdigest()[:16],
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


def compare(first: Result, second: Result, ks: list[int]) -> dict[str, Paired]:
    """{`mean@n`: B − A, `pass@k`: …}; refuses evaluations that differ in more than the model."""
    check_comparable(first, second)
    a, b = first.rewards(), second.rewards()
    keys = list(a)
    rewards_a, rewards_b = [a[key] for key in keys], [b[key] for key in keys]
    found = {f"mean@{first.settings.n}": paired(mean_rewards(rewards_a), mean_rewards(rewards_b))}
    for k in ks:
        found[f"pass@{k}"] = paired(pass_rates(rewards_a, k), pass_rates(rewards_b, k))
    return found


def check_comparable(first: Result, second: Result) -> None:
    a, b = dataclasses.asdict(first.settings), dataclasses.asdict(second.settings)
    different = [f"{name} is {a[name]} in one and {b[name]} in the other" for name in a if a[name] != b[name]]
    if different:
        raise GradtraceError(
            f"the two evaluations cannot be compared: {'; '.join(different)}. Evaluate both the same way."
        )
    keys_a, keys_b = first.rewards().keys(), second.rewards().keys()
    only_a, only_b = keys_a - keys_b, keys_b - keys_a
    if only_a or only_b:
        raise GradtraceError(
            f"the two evaluations have different problems: {len(only_a)} are in the first only, {len(only_b)} in the "
            "second only. Evaluate both with the same --source and --limit."
        )
