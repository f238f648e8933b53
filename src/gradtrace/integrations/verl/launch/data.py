"""The run's prompts as the parquet files that verl reads, in the order in which the embedded loop would take them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Prompt, Task

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
