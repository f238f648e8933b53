"""Prompts from data sets, with a chat template for real models: the task `dataset`.

Sources are files, folders or hub data sets (see `sources`). Rows are read as they are; `data.prompt_key` and
`data.answer_key` say which columns matter. verl's column format (`prompt` a list of messages,
`reward_model.ground_truth`) needs no setting: the ground truth is the answer where a row has no `answer`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Item, Prompt, Task
from gradtrace.tasks.rewards import shorten
from gradtrace.tasks.settings import DataConfig
from gradtrace.tasks.sources import Row, read_source

logger = logging.getLogger(__name__)

Message = dict[str, str]
VERL_ANSWER = "reward_model.ground_truth"
DEFAULT_ANSWER = DataConfig().answer_key


class DatasetTask(Task):
    name = "dataset"

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.stop_token_ids = stop_token_ids(tokenizer)
        reader = PromptReader(config, tokenizer)
        train = reader.read(config.train, "data.train")
        if config.validation:
            self._validation = reader.read(config.validation, "data.validation")
            refuse_overlap(train, self._validation)
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

    def read_prompts(self, files: list[str], key: str) -> list[Prompt]:
        return PromptReader(self.config, self.tokenizer).read(files, key)

    def known_items(self) -> list[Item]:
        return [prompt.item for prompt in (*self._train, *self._validation)]

    def find(self, ids: list[int]) -> Item | None:
        found = [prompt.item for prompt in (*self._train, *self._validation) if prompt.ids == ids]
        if any(item["answer"] != found[0]["answer"] for item in found):
            rows = ", ".join(str(item.get("row")) for item in found[:5])
            raise GradtraceError(f"rows with the same prompt have different answers: {rows}; which one is meant?")
        return found[0] if found else None

    @staticmethod
    def reward(response: str, item: Item) -> float:
        """1 if the response, stripped, is the answer; a row without one is an error, or silence would be right."""
        if item["answer"] is None or not str(item["answer"]).strip():
            raise GradtraceError(f"{item.get('row', 'a row')} has an empty answer: no response can be judged by it.")
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


class PromptReader:
    """Rows become prompts: columns chosen, instruction and system prompt added, template applied, length checked."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def read(self, sources: Sequence[str], key: str) -> list[Prompt]:
        """The prompts of all `sources`, in order; `key` is the setting that named them."""
        rows = [(source, number, row) for source in sources for number, row in enumerate(read_source(source, key))]
        if not rows:
            raise GradtraceError(f"{key}={list(sources)}: no rows, nothing to train on.")
        prompts = []
        dropped = 0
        for source, number, row in rows:
            prompt = self.prompt(row, f"{source}, row {number}")
            if len(prompt.ids) <= self.config.max_prompt_length:
                prompts.append(prompt)
            elif self.config.filter_overlong_prompts:
                dropped += 1
            else:
                raise GradtraceError(
                    f"{source}, row {number}: the prompt has {len(prompt.ids)} tokens, more than "
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

    def prompt(self, row: Row, where: str) -> Prompt:
        messages = self._messages(row, where)
        item = {
            "row": where,  # for messages; a column of this name wins
            **row,
            "prompt": "\n".join(message["content"] for message in messages),
            "answer": self._answer(row, where),
            "source": str(row.get("data_source", DatasetTask.name)),
        }
        try:  # imported prompts have the ids that they were sampled with
            ids = row.get("prompt_ids") or encode(self.tokenizer, messages, self.config.chat_template)
        except Exception as error:  # a lone surrogate, roles that the chat template refuses
            raise GradtraceError(f"{where}: the prompt cannot be encoded: {error}") from error
        return Prompt(ids, item)

    def _messages(self, row: Row, where: str) -> list[Message]:
        prompt = column(row, self.config.prompt_key, where, "data.prompt_key")
        messages = messages_of(prompt)
        if messages is None:
            raise GradtraceError(
                f"{where}: '{self.config.prompt_key}' must be a text or a list of {{role, content}} messages, "
                f"and is {shorten(repr(prompt), 80)}."
            )
        messages = [dict(message) for message in messages]
        if self.config.instruction:
            asked = [message for message in messages if message["role"] != "assistant"] or messages
            asked[-1]["content"] += self.config.instruction
        if self.config.system_prompt:  # instead of the row's own: chat templates take one at most
            own = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.config.system_prompt}, *own]
        return messages

    def _answer(self, row: Row, where: str) -> Any:
        path = self.config.answer_key
        if not path:
            return None
        verl = row.get("reward_model")
        if path == DEFAULT_ANSWER and path not in row and isinstance(verl, dict) and "ground_truth" in verl:
            path = VERL_ANSWER
        return column(row, path, where, "data.answer_key")


def messages_of(prompt: Any) -> list[Message] | None:
    """A prompt as messages: a text is the user's; None if it is neither a text nor messages."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if is_conversation(messages) else None


def is_conversation(messages: Any) -> bool:
    def is_message(message: Any) -> bool:
        return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))

    return isinstance(messages, list) and len(messages) > 0 and all(map(is_message, messages))


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[Message], chat_template: bool = True) -> list[int]:
    """Token ids of a conversation up to where the model is to answer. If the last words are the assistant's, it is
    to go on from there."""
    if chat_template and tokenizer.chat_template:
        goes_on = messages[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer("\n".join(message["content"] for message in messages))["input_ids"]


def refuse_overlap(train: list[Prompt], validation: list[Prompt]) -> None:
    shared = {prompt.item["prompt"] for prompt in train} & {prompt.item["prompt"] for prompt in validation}
    if shared:
        raise GradtraceError(
            f"data.train and data.validation share {len(shared)} prompts, e.g. {shorten(min(shared), 80)!r}: "
            "validation would measure memory. Take them out of one (`gradtrace data prepare` does), or leave "
            "data.validation empty and let data.validation_fraction hold some out."
        )


def hold_out(prompts: list[Prompt], fraction: float) -> tuple[list[Prompt], list[Prompt]]:
    """(validation, training): a share of the distinct prompts, and all rows with other prompts, in order.

    The choice does not depend on the run's seed, so that all seeds validate on the same prompts.
    """
    distinct = {prompt.item["prompt"]: prompt for prompt in prompts}
    chosen = set(random.Random("held out").sample(sorted(distinct), round(len(distinct) * fraction)))
    validation = [prompt for text, prompt in distinct.items() if text in chosen]
    return validation, [prompt for prompt in prompts if prompt.item["prompt"] not in chosen]


def column(row: Row, path: str, where: str, key: str) -> Any:
    """row["a"]["b"] for the path a.b."""
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise GradtraceError(f"{where} has no '{path}'. Set {key} to one of its columns: {', '.join(row)}.")
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
