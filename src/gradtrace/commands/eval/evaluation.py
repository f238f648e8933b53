"""An evaluation: the problems of a task, a model's responses to them, what these are worth, and what is left on disk;
and two evaluations prompt by prompt. A prompt is what counts as one: its responses are not independent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from gradtrace import __version__
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.intervals import DIFFERENCE, SHARE, Interval, bounded_interval, mean_interval
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.runs import Run
from gradtrace.tasks.base import Prompt
from gradtrace.tasks.datasets import PromptReader, stop_token_ids
from gradtrace.tasks.prepare.prepare import read_examples, with_prompts
from gradtrace.tasks.prepare.recipes import PREPARATIONS
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.tasks.settings import DataConfig
from gradtrace.tasks.sources import read_source
from gradtrace.terminal import Progress
from gradtrace.trace.files import atomic_write
from gradtrace.training.experience import pass_at_k

RESPONSES = "responses.jsonl"
SUMMARY = "summary.json"
VALUES_AT_ONCE = 2**23
"""Responses × tokens sampled before they are judged: bounds the memory."""
MAX_BATCH_TOKENS = 32_768
PREPARED = ("test.parquet", "validation.parquet")
"""Files of a prepared folder that can be evaluated on, best first; what was trained on is never among them."""
Floats = NDArray[numpy.float64]


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
        rewards: dict[str, list[float]] = {}
        for line in self.responses:
            rewards.setdefault(line["key"], []).append(line["reward"])
        return rewards


# ---------------------------------------------------------------- sampling


def evaluate(
    run: Run,
    prompts: Sequence[Prompt],
    reward: RewardFunction,
    settings: Settings,
    source: str = "",
    progress: Progress = lambda done, total: None,
) -> Result:
    """Sample from the run's policy and judge. Same prompts and settings give the same random numbers.

    `progress(responses so far, all)` is called as responses end.
    """
    if not prompts:
        raise GradtraceError("there are no problems to evaluate on.")
    tokenizer = run.tokenizer
    sampler = Sampler(run.policy(precision="float32").model, tokenizer.pad_token_id, MAX_BATCH_TOKENS)
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
    return Result(settings, str(run.checkpoint().weights), source, lines)


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


def find_source(task: str, source: str) -> str:
    """`source`, or data/TASK as `gradtrace data prepare` leaves it, or the test data on the hub."""
    if source and not Path(source).is_dir():
        return source
    folder = Path(source or f"data/{task}")
    for name in PREPARED:
        if (folder / name).is_file():
            return str(folder / name)
    if source:
        return source
    preparation = PREPARATIONS[task]
    hub = preparation.test_source or preparation.default_source
    if hub.startswith("hf:") and (preparation.test_source or task.startswith(("math", "aime"))):
        return hub
    raise GradtraceError(
        f"--task {task}: there is no {folder / PREPARED[0]} or {PREPARED[1]}. Make them with "
        f"`gradtrace data prepare {task}`, or name a file: --source FILE."
    )


def load_prompts(
    task: str,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int = 0,
    instruction: str | None = None,
    system_prompt: str | None = None,
) -> list[Prompt]:
    """The first `limit` (0: all) problems of `source`. Rows of a prepared file keep their prompts as they are."""
    preparation = with_prompts(PREPARATIONS[task], instruction, system_prompt)
    rows = read_source(source, "--source")
    if not all(is_prepared(row, task) for row in rows):
        examples = read_examples(preparation, rows, source)
        rows = [preparation.row(example, "test", index) for index, example in enumerate(examples)]
    elif instruction is not None or system_prompt is not None:
        raise GradtraceError(
            f"{source} is prepared: its prompts have their instruction already. Leave --instruction and "
            "--system-prompt to `gradtrace data prepare`, or give the original data."
        )
    reader = PromptReader(DataConfig(answer_key="reward_model.ground_truth"), tokenizer)
    rows = rows[:limit] if limit else rows
    return [reader.prompt(row, f"{source}, row {number}") for number, row in enumerate(rows)]


def is_prepared(row: dict[str, object], task: str) -> bool:
    extra = row.get("extra_info")
    return row.get("data_source") == task and isinstance(extra, dict) and "question" in extra


# ---------------------------------------------------------------- on disk, and compared


def summarise(result: Result, ks: list[int]) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Scores with intervals, and the same with all settings as JSON."""
    rewards, lines = list(result.rewards().values()), result.responses
    scores = {name: estimate(values) for name, values in measures(rewards, ks).items()}
    return scores, {
        "gradtrace": __version__,
        "model": result.model,
        "source": result.source,
        "settings": dataclasses.asdict(result.settings),
        "problems": len(rewards),
        "responses": len(lines),
        "scores": {k: {"value": v.mean, "low": v.low, "high": v.high} for k, v in scores.items()},
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
    of_first, of_second = measures(list(a.values()), ks), measures([b[key] for key in a], ks)
    return {name: paired(values, of_second[name]) for name, values in of_first.items()}


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


# ---------------------------------------------------------------- statistics


def estimate(per_prompt: Floats, imagined: dict[float, float] | None = None) -> Interval:
    """float[P], one value per prompt → their mean. Values within the bounds of `imagined` (by default 0 and 1) have an
    interval that holds near the bounds, too; rewards on another scale have Student's."""
    imagined = imagined or SHARE
    if per_prompt.min() < min(imagined) or per_prompt.max() > max(imagined):
        return mean_interval(per_prompt.tolist())
    return bounded_interval(per_prompt.tolist(), imagined)


def measures(rewards: list[list[float]], ks: list[int]) -> dict[str, Floats]:
    """{`mean@n`: float[P], `pass@k`: float[P] for each k} of the rewards of P prompts."""
    means = numpy.array([numpy.mean(row) for row in rewards])
    return {f"mean@{len(rewards[0])}": means} | {f"pass@{k}": pass_rates(rewards, k) for k in ks}


def pass_rates(rewards: list[list[float]], k: int) -> Floats:
    """float[P]: the unbiased pass@k of each prompt."""
    return numpy.array([pass_at_k(len(row), sum(r >= 1.0 for r in row), k) for row in rewards])


@dataclass(frozen=True)
class Paired:
    """B minus A, prompt by prompt."""

    difference: Interval
    better: int
    """Prompts on which B is better."""
    worse: int
    equal: int


def paired(first: Floats, second: Floats) -> Paired:
    """Compare two float[P] over the same prompts in the same order."""
    difference = second - first
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    return Paired(estimate(difference, DIFFERENCE), better, worse, len(difference) - better - worse)
