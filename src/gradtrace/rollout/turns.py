"""Responses of several turns: the policy writes until it calls a tool, the result is appended, the policy goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.batch import Environment
from gradtrace.segments import Segment


@dataclass
class Responses:
    """What has been sampled so far, one row per response in the caller's order; R rows, T = max_new_tokens."""

    tokens: Tensor
    """long[R, T], pad after the end."""
    log_probs: Tensor
    """float32[R, T]; zero where the policy did not write the token."""
    lengths: Tensor
    """long[R]."""
    finished: Tensor
    """bool[R]."""
    written: Tensor | None = None
    """bool[R, T]: the policy wrote the token; None: all up to `lengths`."""
    segments: list[list[Segment]] | None = None
    """R lists: who wrote which part, where there is an environment."""


@dataclass(frozen=True)
class Start:
    """Where responses begin: what stands before them, how many they are, how long they may become."""

    ids: list[int]
    n: int
    limit: int
    """A response without a stop token ends after this many tokens, those of others included."""
    banned: tuple[int, ...] = ()
    """Tokens that none of its responses begins with; the first token is drawn from the others, in proportion."""
    turn: int = 0
    """Turns of the policy that `ids` holds already, the one that it breaks off in not counted."""


@dataclass(eq=False)
class Conversation:
    """A response that is being made."""

    start: Start
    turn: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finished: bool = False

    def add(self, tokens: list[int], log_probs: list[float] | None, role: str, tool: str = "") -> None:
        self.segments.append(Segment(len(self.tokens), self.turn, role, tool))
        self.tokens += tokens
        self.written += [log_probs is not None] * len(tokens)
        self.log_probs += log_probs or [0.0] * len(tokens)

    def goes_on(self, environment: Environment, max_turns: int) -> bool:
        """Append the reply to the call that the last turn ended with; False if the response is over."""
        if self.tokens[-1] not in environment.stop_token_ids or self.turn + 1 >= max_turns:
            return False
        answer = environment.reply(self.start.ids + self.tokens)
        if answer is None:
            return False
        room = self.start.limit - len(self.tokens)
        if answer[0] and room:
            self.add(answer[0][:room], None, "tool", answer[1])
        self.turn += 1
        return len(self.tokens) < self.start.limit


def in_turns(
    respond: Callable[[list[Start]], Responses],
    starts: list[Start],
    environment: Environment,
    max_turns: int,
    pad_token_id: int,
) -> Responses:
    """Responses to all starts, turn by turn; `respond` samples one turn, up to a stop token or a call."""
    open_ones = [Conversation(start, start.turn) for start in starts for _ in range(start.n)]
    everyone, again = list(open_ones), starts
    while open_ones:
        sampled = respond(again)
        rows = zip(
            sampled.tokens.tolist(),
            sampled.log_probs.tolist(),
            sampled.lengths.tolist(),
            sampled.finished.tolist(),
            strict=True,
        )
        for one, (tokens, log_probs, length, stopped) in zip(open_ones, rows, strict=True):
            one.add(tokens[:length], log_probs[:length], "assistant")
            one.finished = stopped and tokens[length - 1] not in environment.stop_token_ids
        open_ones = [one for one in open_ones if one.goes_on(environment, max_turns)]
        again = [Start(one.start.ids + one.tokens, 1, one.start.limit - len(one.tokens)) for one in open_ones]
    shape = len(everyone), max(start.limit for start in starts)
    found = Responses(
        tokens=torch.full(shape, pad_token_id),
        log_probs=torch.zeros(shape),
        lengths=torch.tensor([len(one.tokens) for one in everyone]),
        finished=torch.tensor([one.finished for one in everyone]),
        written=torch.zeros(shape, dtype=torch.bool),
        segments=[one.segments for one in everyone],
    )
    assert found.written is not None
    for row, one in enumerate(everyone):
        length = len(one.tokens)
        found.tokens[row, :length] = torch.tensor(one.tokens)
        found.log_probs[row, :length] = torch.tensor(one.log_probs)
        found.written[row, :length] = torch.tensor(one.written)
    return found
