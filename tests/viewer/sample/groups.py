"""Prompt groups for the sample data: arithmetic chains, and solutions in prose."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from gradtrace.trace.token_text import Flag, Rules, TokenBytes
from tests.viewer.sample import prose

SYMBOLS = ["<pad>", "<eos>", "=", ";", "#", "+", "-", "*", *"0123456789"]


@dataclass
class SampleResponse:
    ids: list[int]
    reward: float
    entropy: np.ndarray
    log_prob: np.ndarray
    own: np.ndarray
    """What this token's own loss term is worth, before noise: the loss-term score."""
    first_wrong: int = -1


@dataclass
class SampleGroup:
    prompt: list[int]
    responses: list[SampleResponse]
    expected: list[int] = field(default_factory=list)

    @property
    def mixed(self) -> bool:
        return len({response.reward for response in self.responses}) > 1


# ---------------------------------------------------------------- arithmetic chains


def _apply(x: int, operator: str, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y}[operator] % 10


def _slip(x: int, operator: str, y: int, rng: np.random.Generator) -> int:
    """A wrong result of the kind that the demo's model makes."""
    right = _apply(x, operator, y)
    habit = {"*": (x + y) % 10, "-": (y - x) % 10, "+": (right + 1) % 10}[operator]
    return habit if habit != right and rng.random() < 0.75 else (right + 1 + int(rng.integers(2))) % 10


def arithmetic_group(rng: np.random.Generator, progress: float, responses: int) -> SampleGroup:
    """`3+7*4-2+9=` and chains of its partial results, modulo 10. `progress` 0…1: how far training has come."""
    digits = rng.integers(0, 10, 5).tolist()
    operators = rng.choice(["+", "-", "*"], 4).tolist()
    skill = float(np.clip(0.72 + 0.26 * progress + 0.12 * rng.normal(), 0.4, 0.999))
    ids = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    rest = "".join(f"{operator}{digit}" for operator, digit in zip(operators, digits[1:], strict=True))
    prompt = [ids[character] for character in f"{digits[0]}{rest}="]
    expected = _chain(digits, operators, None, rng)
    made = []
    for _ in range(responses):
        tokens = _chain(digits, operators, skill, rng)
        wrong = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), -1)
        reward = float(tokens[-2] == expected[-2])
        made.append(_arithmetic_response([ids[t] for t in tokens], tokens, wrong, reward, progress, rng))
    return SampleGroup(prompt, made, [ids[token] for token in expected])


def _chain(digits: list[int], operators: list[str], skill: float | None, rng: np.random.Generator) -> list[str]:
    """Tokens of a chain; without `skill` the right one."""
    value = digits[0]
    tokens = [str(value)]
    for operator, digit in zip(operators, digits[1:], strict=True):
        slips = skill is not None and rng.random() > skill
        value = _slip(value, operator, digit, rng) if slips else _apply(value, operator, digit)
        tokens += [operator, str(digit), "=", str(value)]
    return [*tokens, "<eos>"]


def _arithmetic_response(
    ids: list[int], tokens: list[str], wrong: int, reward: float, progress: float, rng: np.random.Generator
) -> SampleResponse:
    length = len(ids)
    entropy = np.abs(rng.normal(size=length)) * 0.018 + 0.002
    own = rng.normal(size=length) * 0.018
    for t in range(4, length, 4):
        hardness = {"*": 0.95, "-": 0.8, "+": 0.42}[tokens[t - 3]]
        entropy[t] = hardness * (1.3 - 0.95 * progress) * rng.uniform(0.45, 1.25)
        if wrong < 0:
            own[t] = (0.22 + 0.8 * entropy[t]) * rng.uniform(0.55, 1.25)
        elif t < wrong:
            own[t] = 0.18 + 0.35 * rng.random() * entropy[t]
        elif t == wrong:
            entropy[t] = max(entropy[t], rng.uniform(0.55, 1.25))
            own[t] = -rng.uniform(0.62, 1.37)
        else:
            own[t] = rng.choice([-1, 1], p=[0.55, 0.45]) * rng.uniform(0.05, 0.27)
    log_prob = -entropy * rng.uniform(0.25, 0.75, length)
    if wrong >= 0:
        log_prob[wrong] = -rng.uniform(0.9, 2.5)
    return SampleResponse(ids, reward, entropy, log_prob, own, wrong)


# ---------------------------------------------------------------- prose


class ProseVocabulary:
    """Ids for pieces of text, handed out as they are met. The character ≤ is cut in two, as byte vocabularies do."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = [b"<|im_start|>", b"<|im_end|>"]
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}

    def id(self, piece: bytes) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self.ids[piece]

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in prose.pieces(text):
            if piece.endswith("≤"):
                data = piece.encode()
                ids += [self.id(data[:-1]), self.id(data[-1:])]
            else:
                ids.append(self.id(piece.encode()))
        return ids

    def token_bytes(self) -> TokenBytes:
        flags = [Flag.SPECIAL if index < 2 else 0 for index in range(len(self.pieces))]
        return TokenBytes(self.pieces, flags, Rules())


def full_prose_vocabulary() -> ProseVocabulary:
    """Every piece that any sample solution can hold, in a fixed order."""
    vocabulary = ProseVocabulary()
    everything = [value for name, value in vars(prose).items() if name.isupper()]
    for value in everything:
        for text in [value] if isinstance(value, str) else value if isinstance(value, tuple) else []:
            for part in _marked(text):
                vocabulary.encode(part[1])
    for text in (
        "user\n",
        "\n",
        "\n\n",
        *(str(digit) for digit in range(10)),
        " + 100 - ",
        " = ",
        ", so \\boxed{",
        "}.",
    ):
        vocabulary.encode(text)
    return vocabulary


def _marked(text: str) -> list[tuple[str, str]]:
    """[(mark, text)] with mark "", "+", "-" or "*"; a space before a marked word belongs to the word."""
    parts = [("", text)]
    found = re.split(r"( ?\{[+\-*][^}]*\})", text)
    if len(found) > 1:
        parts = []
        for part in found:
            match = re.fullmatch(r"( ?)\{([+\-*])([^}]*)\}", part)
            if match:
                space, mark, body = match.groups()
                if space and body[0].isdigit():
                    parts += [("", " "), (mark, body)]
                else:
                    parts.append((mark, space + body))
            elif part:
                parts.append(("", part))
    return parts


def _solution(kind: int, rng: np.random.Generator) -> str:
    """kind 0 is right; 1 rounds up; 2 takes the product for the lcm; 3 removes every multiple of 15; 4 = 2 and 3."""

    def pick(options: tuple[str, ...]) -> str:
        return options[int(rng.integers(len(options)))]

    sixes, overlap, removed = (
        167 if kind == 1 else 166,
        16 if kind in (2, 4) else 33,
        66 if kind in (3, 4) else 33,
    )
    union = sixes + 100 - overlap
    answer = union - removed
    union_text = f"{sixes} + 100 - {overlap} = {{{'+' if union == 233 else '-'}{union}}}"
    sign = "+" if kind == 0 else "-"
    answer_text = f"{union} - {removed} = {{{sign}{answer}}}, so \\boxed{{{{{sign}{answer}}}}}"
    paragraphs = [
        pick(prose.OPENINGS),
        pick(prose.SIXES_WRONG if kind == 1 else prose.SIXES),
        pick(prose.TENS),
        pick(prose.OVERLAP_WRONG if kind in (2, 4) else prose.OVERLAP),
        pick(prose.UNION).replace("{U}", union_text),
        pick(prose.REMOVE_WRONG if kind in (3, 4) else prose.REMOVE),
        pick(prose.CHECKS if kind == 0 else prose.CHECKS_WRONG),
        pick(prose.ENDINGS).replace("{A}", answer_text),
    ]
    return "\n\n".join(paragraphs)


def prose_response(
    kind: int, vocabulary: ProseVocabulary, rng: np.random.Generator, at_least: int = 0
) -> SampleResponse:
    """One solution as tokens; with `at_least` it reasons on and on until it is that long."""
    ids: list[int] = []
    entropy: list[float] = []
    own: list[float] = []
    text = _solution(kind, rng)
    while True:
        for mark, part in _marked(text):
            for position, token in enumerate(vocabulary.encode(part)):
                ids.append(token)
                h, v = _prose_numbers(mark, position == 0, part, kind, rng)
                entropy.append(h)
                own.append(v)
        if len(ids) >= at_least - 1:
            break
        text = "\n\n" + _solution(kind, rng)
    if at_least:
        ids, entropy, own = ids[: at_least - 1], entropy[: at_least - 1], own[: at_least - 1]
    ids.append(1)
    entropy.append(float(rng.uniform(0.03, 0.2)))
    own.append(float(rng.normal() * 0.03))
    nats = np.array(entropy)
    log_prob = -nats * rng.uniform(0.25, 1.15, len(nats)) - 0.001
    return SampleResponse(ids, float(kind == 0), nats, log_prob, np.array(own))


def _prose_numbers(mark: str, first: bool, text: str, kind: int, rng: np.random.Generator) -> tuple[float, float]:
    """(entropy, own worth) of a token."""
    lucky = 5.0 if rng.random() < 0.16 else 1.0
    entropy, own = abs(rng.normal()) * 0.13 * lucky, rng.normal() * 0.012
    if mark == "*":
        entropy = 1.45 * np.exp(0.32 * rng.normal())
        own = (1 if rng.random() < 0.82 else -1) * (1 if kind == 0 else -0.6) * 0.09 * np.exp(0.75 * rng.normal())
    elif mark == "+":
        entropy = 0.34 * np.exp(0.62 * rng.normal()) if first else 0.04 * np.exp(0.8 * rng.normal())
        own = (0.34 if kind == 0 else 0.11) * np.exp(0.5 * rng.normal()) if first else 0.12 * rng.random()
    elif mark == "-":
        entropy = 0.85 * np.exp(0.4 * rng.normal()) if first else 0.06 * np.exp(0.8 * rng.normal())
        own = -0.5 * np.exp(0.42 * rng.normal()) if first else -0.3 * rng.random()
    elif text.startswith("\n") and first:
        entropy = rng.uniform(0.2, 0.8)
    return float(entropy), float(own)


def prose_group(
    rng: np.random.Generator,
    vocabulary: ProseVocabulary,
    responses: int,
    prompt: str,
    pass_rate: float,
    at_least: int = 0,
) -> SampleGroup:
    kinds = [0 if rng.random() < pass_rate else int(rng.integers(1, 5)) for _ in range(responses)]
    user = [vocabulary.id(b"<|im_start|>"), *vocabulary.encode("user\n")]
    end = [vocabulary.id(b"<|im_end|>"), *vocabulary.encode("\n")]
    made = [prose_response(kind, vocabulary, rng, at_least) for kind in kinds]
    expected = vocabulary.encode(prose.ANSWER) if prompt == prose.PROMPT else []
    return SampleGroup([*user, *vocabulary.encode(prompt), *end], made, expected)
