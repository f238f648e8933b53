"""The run's prompts as the parquet files that verl reads, in the order in which the embedded loop would take them; and
the run's reward as verl calls it: one response, with what was written here about its prompt.

verl loads this file by its path (`reward.custom_reward_function`), in its reward workers.
"""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Prompt, Task, task_class
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.training.components import build_reward

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template for verl: prompts in the files are complete, the model's own template is applied already."""


def write_prompts(path: Path, prompts: list[Prompt], task: Task) -> None:
    tokenizer = task.tokenizer
    rows = []
    for index, prompt in enumerate(prompts):
        text = tokenizer.decode(prompt.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != prompt.ids:
            raise GradtraceError(
                f"prompt {index} does not survive decoding and encoding with this tokenizer, so verl would train on "
                f"another one: {text[:80]!r}"
            )
        item = json.dumps(prompt.item, default=str)
        rows.append(
            {
                "data_source": str(prompt.item.get("source", task.name)),
                "prompt": [{"role": "user", "content": text}],
                "ability": task.name,
                "reward_model": {"style": "rule", "ground_truth": str(prompt.item.get("answer", ""))},
                "extra_info": {"index": index, "gradtrace_item": item},
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


_loading = threading.Lock()


@functools.cache
def reward_of(config_file: str) -> RewardFunction:
    config: Config = load_config([f"recipe={config_file}"])
    reward = build_reward(config.reward)
    if reward is not None:
        return reward
    name = config.task.name
    return RewardFunction(f"{name}.reward", task_class(name).reward)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    config: str,
    **more: Any,
) -> float:
    item = json.loads(extra_info["gradtrace_item"])
    with _loading:  # verl calls from several threads, and composing a configuration is not made for that
        reward = reward_of(config)
    return reward([solution_str], [item])[0]
