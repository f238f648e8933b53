"""Prompts from files: jsonl, json or parquet, with a chat template for real models.

Rows are read as they are; `data.prompt_key` and `data.answer_key` say which columns matter. verl's column format
(`prompt` a list of messages, `reward_model.ground_truth`) works with `answer_key=reward_model.ground_truth`.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from gradtrace.config import DataConfig
from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Item, Prompt
from gradtrace.tasks.rewards import shorten

logger = logging.getLogger(__name__)


class DatasetTask:
    name = "dataset"

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.stop_token_ids = stop_token_ids(tokenizer)
        train = self._load(config.train, "data.train")
        if config.validation:
            self._validation = self._load(config.validation, "data.validation")
        else:
            self._validation, train = hold_out(train, config.validation_fraction)
        self._train = train
        self._order: list[int] = []
        self._epoch = 0
        self._position = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            if self._position == len(self._train):
                self._epoch, self._position = self._epoch + 1, 0
            prompts.append(self._train[self._order_of_epoch()[self._position]])
            self._position += 1
        return prompts

    def validation_prompts(self, count: int) -> list[Prompt]:
        return self._validation[:count]

    def reward(self, response: str, item: Item) -> float:
        """1 if the response, stripped, is the answer."""
        return float(response.strip() == str(item["answer"]).strip())

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = []

    def _order_of_epoch(self) -> list[int]:
        """The order of the current epoch, from the seed and the epoch alone."""
        if not self._order or self._position == 0:
            self._order = list(range(len(self._train)))
            if self.config.shuffle:
                random.Random(f"{self.seed}/{self._epoch}").shuffle(self._order)
        return self._order

    def _load(self, files: list[str], key: str) -> list[Prompt]:
        rows = [
            (file, number, row) for file in files for number, row in enumerate(read_rows(Path(file), key))
        ]
        if not rows:
            raise GradtraceError(f"{key}={files}: no rows, nothing to train on.")
        prompts = []
        dropped = 0
        for file, number, row in rows:
            prompt = self._prompt(row, f"{file}, row {number}")
            if len(prompt.ids) <= self.config.max_prompt_length:
                prompts.append(prompt)
            elif self.config.filter_overlong_prompts:
                dropped += 1
            else:
                raise GradtraceError(
                    f"{file}, row {number}: the prompt has {len(prompt.ids)} tokens, more than "
                    f"data.max_prompt_length={self.config.max_prompt_length}: {shorten(prompt.item['prompt'], 80)!r}. "
                    "Raise the limit, or drop such prompts with data.filter_overlong_prompts=true."
                )
        if not prompts:
            raise GradtraceError(
                f"{key}: all {dropped} prompts are longer than data.max_prompt_length="
                f"{self.config.max_prompt_length} tokens; none is left."
            )
        if dropped:
            logger.warning("%s: dropped %d of %d prompts that are too long", key, dropped, len(rows))
        return prompts

    def _prompt(self, row: dict[str, Any], where: str) -> Prompt:
        prompt = column(row, self.config.prompt_key, where, "data.prompt_key")
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        )
        if self.config.instruction:
            messages[-1]["content"] += self.config.instruction
        if self.config.system_prompt:
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        item = {
            **row,
            "prompt": "\n".join(message["content"] for message in messages),
            "answer": column(row, self.config.answer_key, where, "data.answer_key"),
            "source": str(row.get("data_source", self.name)),
        }
        return Prompt(self._encode(messages), item)

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        if self.config.chat_template and self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"]


def hold_out(prompts: list[Prompt], fraction: float) -> tuple[list[Prompt], list[Prompt]]:
    """(validation, training): a share of the distinct prompts, and all rows with other prompts, in order.

    The choice does not depend on the run's seed, so that all seeds validate on the same prompts.
    """
    distinct = {prompt.item["prompt"]: prompt for prompt in prompts}
    chosen = set(random.Random("held out").sample(sorted(distinct), round(len(distinct) * fraction)))
    validation = [prompt for text, prompt in distinct.items() if text in chosen]
    return validation, [prompt for prompt in prompts if prompt.item["prompt"] not in chosen]


def read_rows(file: Path, key: str) -> list[dict[str, Any]]:
    """The rows of a .jsonl, .json (a list) or .parquet file."""
    if not file.is_file():
        raise GradtraceError(f"{key}: there is no file {file.absolute()}.")
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file).to_pylist()
    if file.suffix not in (".jsonl", ".json"):
        raise GradtraceError(f"{key}: {file} must be .jsonl, .json or .parquet.")
    try:
        if file.suffix == ".json":
            rows = json.loads(file.read_text())
        else:
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except ValueError as error:
        raise GradtraceError(f"{key}: {file} is not valid JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise GradtraceError(f"{key}: {file} must hold objects, one per prompt.")
    return rows


def column(row: dict[str, Any], path: str, where: str, key: str) -> Any:
    """row["a"]["b"] for the path a.b."""
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise GradtraceError(
                f"{where} has no '{path}'. Set {key} to one of its columns: {', '.join(row)}."
            )
        value = value[name]
    return value


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End of text, and end of turn where the chat template has one of its own."""
    vocabulary = tokenizer.get_vocab()
    ends = [tokenizer.eos_token_id]
    for token in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>"):
        if token in vocabulary:
            ends.append(vocabulary[token])
    return tuple(sorted({end for end in ends if end is not None}))
