"""What a model is evaluated on: problems of a known data set, in the form that `gradtrace data prepare` gives them."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from gradtrace.config import DataConfig
from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Prompt
from gradtrace.tasks.datasets import PromptReader
from gradtrace.tasks.prepare import PREPARATIONS
from gradtrace.tasks.prepare.pipeline import read_examples
from gradtrace.tasks.prepare.prepare import with_prompts
from gradtrace.tasks.sources import read_source

PREPARED = ("test.parquet", "validation.parquet")
"""Files of a prepared folder that can be evaluated on, best first; what was trained on is never among them."""


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
