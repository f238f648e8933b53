"""A task of several turns: work a chain of operations out, left to right, with a calculator that does one at a time.

    prompt    47*38-906=
    response  <calc>47*38</calc><result>1786</result><calc>1786-906</calc><result>880</result>880<eos>

What stands in <result>…</result> is the calculator's: no loss, no score. The policy decides whether to call, copies
numbers into calls, and copies the last result into its answer; the reward is 1 for the right number after the last
result. Numbers are too long for a tiny transformer to work out by itself, so calling is what there is to learn.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gradtrace.tasks import arithmetic
from gradtrace.tasks.arithmetic import exactly
from gradtrace.tasks.base import GeneratedTask, Item, Prompt, is_validation
from gradtrace.tasks.settings import CalculatorConfig

TAGS = ["<calc>", "</calc>", "<result>", "</result>"]
VOCABULARY = [*arithmetic.VOCABULARY, *TAGS]
ID = {token: index for index, token in enumerate(VOCABULARY)}
STOP, CALL_END = ID["<eos>"], ID["</calc>"]
_PIECES = re.compile("|".join(TAGS) + "|.")
_CALL = re.compile(r"<calc>(-?\d{1,12})([-+*])(-?\d{1,12})</calc>$")


def encode(text: str) -> list[int]:
    """One token for each tag and each other character."""
    return [ID[piece] for piece in _PIECES.findall(text)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = arithmetic.build_tokenizer(VOCABULARY)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


class Calculator:
    """The tool: does one operation; a call that it does not understand has an empty result."""

    name = "calc"
    stop_token_ids: tuple[int, ...] = (CALL_END,)

    def reply(self, ids: list[int]) -> tuple[list[int], str] | None:
        call = _CALL.search("".join(VOCABULARY[token] for token in ids if 0 <= token < len(VOCABULARY)))
        result = "" if call is None else str(exactly(int(call[1]), call[2], int(call[3])))
        return encode(f"<result>{result}</result>"), self.name


@dataclass(frozen=True)
class Exercise:
    numbers: tuple[int, ...]
    operators: str

    @staticmethod
    def draw(rng: random.Random, operations: int, digits: int) -> Exercise:
        numbers = tuple(rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(operations + 1))
        return Exercise(numbers, "".join(rng.choice(arithmetic.OPERATORS) for _ in range(operations)))

    @property
    def prompt(self) -> str:
        pairs = zip(self.operators, self.numbers[1:], strict=True)
        return str(self.numbers[0]) + "".join(f"{operator}{number}" for operator, number in pairs) + "="

    @property
    def answer(self) -> int:
        value = self.numbers[0]
        for operator, number in zip(self.operators, self.numbers[1:], strict=True):
            value = exactly(value, operator, number)
        return value

    def worked(self, guesses: float = 0.0, rng: random.Random | None = None) -> list[tuple[str, bool]]:
        """Parts of a response, and whether the policy writes them. With probability `guesses` an operation is done in
        the head, which goes wrong, instead of by a call."""
        value, parts = self.numbers[0], []
        for operator, number in zip(self.operators, self.numbers[1:], strict=True):
            if rng is not None and rng.random() < guesses:
                value = exactly(value, operator, number) + rng.choice((-10, -2, -1, 1, 2, 10))
                continue
            parts.append((f"<calc>{value}{operator}{number}</calc>", True))
            value = exactly(value, operator, number)
            parts.append((f"<result>{value}</result>", False))
        return [*parts, (str(value), True)]


def draw_lessons(
    config: CalculatorConfig, rng: random.Random, count: int, guesses: float = 0.0
) -> tuple[Tensor, Tensor]:
    """long[count, S], padded, prompts with worked responses; and bool[count, S], what the policy has to write."""
    rows: list[tuple[list[int], list[bool]]] = []
    while len(rows) < count:
        problem = Exercise.draw(rng, config.operations, config.digits)
        if is_validation(problem):
            continue
        ids = encode(problem.prompt)
        learnt = [False] * len(ids)
        for text, own in problem.worked(guesses, rng):
            part = encode(text)
            ids, learnt = ids + part, learnt + [own] * len(part)
        rows.append(([*ids, STOP], [*learnt, True]))
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    return tokens, torch.tensor([learnt + [False] * (longest - len(learnt)) for _, learnt in rows])


class CalculatorTask(GeneratedTask[Exercise]):
    name = "calculator"
    vocabulary = VOCABULARY
    example = "47*38-906="

    def __init__(self, config: CalculatorConfig, seed: int = 0) -> None:
        super().__init__(seed)
        self.config = config
        self.tokenizer = build_tokenizer()
        self.stop_token_ids = (STOP,)
        self.environment = Calculator()

    def draw(self, rng: random.Random) -> Exercise:
        return Exercise.draw(rng, self.config.operations, self.config.digits)

    @property
    def possible(self) -> int:
        numbers = 9 * 10 ** (self.config.digits - 1)
        return numbers ** (self.config.operations + 1) * 3**self.config.operations

    @staticmethod
    def reward(response: str, item: Item) -> float:
        """1 if what stands after the last result is the answer."""
        return float(response.rpartition("</result>")[2] == item["answer"])

    @staticmethod
    def truth(item: Item, response: list[int]) -> tuple[list[int] | None, int | None]:
        return encode(item["answer"]), None

    def parse(self, text: str) -> Prompt | None:
        if not re.fullmatch(r"\d{1,9}([-+*]\d{1,9})+=", text):
            return None
        numbers = tuple(int(number) for number in re.findall(r"\d+", text))
        return self.prompt_of(Exercise(numbers, "".join(re.findall(r"[-+*]", text))))

    def prompt_of(self, problem: Exercise) -> Prompt:
        item = {"prompt": problem.prompt, "answer": str(problem.answer), "source": self.name}
        return Prompt(encode(problem.prompt), item)
