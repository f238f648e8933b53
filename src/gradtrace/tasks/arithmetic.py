"""The demo's task: evaluate a chain of single-digit operations from left to right, mod 10.

    prompt    3+7*4-2+9=
    response  3+7=0*4=0-2=8+9=7<eos>

The one correct response follows from the prompt, so the first wrong token of any response is known by rule and
attribution can be judged against the truth. The reward is 1 for that response and 0 for every other: a single
number at the end, as verifiers give it, that says nothing about where a response went wrong.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gradtrace.tasks.base import GeneratedTask, Item, Prompt
from gradtrace.tasks.settings import ArithmeticConfig

OPERATORS = "+-*"
VOCABULARY = ["<pad>", "<eos>", "<unk>", "\n", *"0123456789", *OPERATORS, "="]
STOP = VOCABULARY.index("<eos>")


def exactly(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def apply(left: int, operator: str, right: int) -> int:
    return exactly(left, operator, right) % 10


def misapply(left: int, operator: str, right: int) -> int:
    """A plausible habit: `*` done as `+`, `-` the wrong way round, one too many after a carry."""
    if operator == "*":
        return (left + right) % 10
    if operator == "-":
        return (right - left) % 10
    return (left + right + 1) % 10 if left + right >= 10 else left + right


@dataclass(frozen=True)
class Chain:
    digits: tuple[int, ...]
    operators: str

    @staticmethod
    def draw(rng: random.Random, operations: int) -> Chain:
        digits = tuple(rng.randrange(10) for _ in range(operations + 1))
        return Chain(digits, "".join(rng.choice(OPERATORS) for _ in range(operations)))

    @property
    def prompt(self) -> str:
        pairs = zip(self.operators, self.digits[1:], strict=True)
        return str(self.digits[0]) + "".join(f"{operator}{digit}" for operator, digit in pairs) + "="

    def solution(self, corruption: float = 0.0, rng: random.Random | None = None) -> str:
        """The worked chain; each step goes wrong with probability `corruption` and the next goes on from there."""
        value = self.digits[0]
        text = str(value)
        for operator, digit in zip(self.operators, self.digits[1:], strict=True):
            wrong = rng is not None and rng.random() < corruption
            value = (misapply if wrong else apply)(value, operator, digit)
            text += f"{operator}{digit}={value}"
        return text


def build_tokenizer(vocabulary: list[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


class ArithmeticTask(GeneratedTask[Chain]):
    name = "arithmetic"
    vocabulary = VOCABULARY
    example = "3+7*4-2+9="

    def __init__(self, config: ArithmeticConfig, seed: int = 0) -> None:
        super().__init__(seed)
        self.config = config
        self.tokenizer: PreTrainedTokenizerBase = build_tokenizer()
        self.stop_token_ids: tuple[int, ...] = (STOP,)

    def draw(self, rng: random.Random) -> Chain:
        return Chain.draw(rng, self.config.operations)

    @property
    def possible(self) -> int:
        return 10 ** (self.config.operations + 1) * 3**self.config.operations

    @staticmethod
    def reward(response: str, item: Item) -> float:
        """1 if the whole chain is right."""
        return float(response == item["expected"])

    @staticmethod
    def truth(item: Item, response: list[int]) -> tuple[list[int] | None, int | None]:
        return ArithmeticTask.encode(item["expected"]), ArithmeticTask.first_wrong_token(item, response)

    @staticmethod
    def first_wrong_token(item: Item, response_ids: list[int]) -> int | None:
        """Index of the first token that differs from the one correct response; None if every token is right."""
        expected = [*ArithmeticTask.encode(item["expected"]), STOP]
        for index, token in enumerate(response_ids):
            if index >= len(expected) or token != expected[index]:
                return index
        return None

    @staticmethod
    def encode(text: str) -> list[int]:
        return [VOCABULARY.index(character) for character in text]

    def parse(self, text: str) -> Prompt | None:
        if not re.fullmatch(r"\d([-+*]\d)+=", text):
            return None
        return self.prompt_of(Chain(tuple(int(digit) for digit in text[:-1:2]), text[1:-1:2]))

    def prompt_of(self, problem: Chain) -> Prompt:
        expected = problem.solution()
        item = {"prompt": problem.prompt, "answer": expected[-1], "expected": expected, "source": self.name}
        return Prompt(self.encode(problem.prompt), item)
