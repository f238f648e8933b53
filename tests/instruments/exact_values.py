"""V of every prefix of a tiny model by enumeration: it shares no code with the estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ExactValues:
    """V(prefix) = Σ over all texts that can follow of probability · reward, for responses of up to `limit` tokens."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: list[int],
        reward: Callable[[str], float],
        limit: int,
        stop: int,
    ) -> None:
        self.tokenizer, self.reward, self.limit, self.stop = tokenizer, reward, limit, stop
        self.vocabulary = model.config.vocab_size
        self.after: dict[tuple[int, ...], list[float]] = {}
        level: list[tuple[int, ...]] = [()]
        for _ in range(limit):
            ids = torch.tensor([[*prompt, *prefix] for prefix in level])
            with torch.no_grad():
                chances = model(ids).logits[:, -1].double().softmax(-1).tolist()
            self.after.update(zip(level, chances, strict=True))
            level = [(*prefix, t) for prefix in level for t in range(self.vocabulary) if t != stop]
        self.known: dict[tuple[int, ...], float] = {}

    def __call__(self, prefix: tuple[int, ...]) -> float:
        if prefix not in self.known:
            if len(prefix) == self.limit or prefix[-1:] == (self.stop,):
                text = self.tokenizer.decode(list(prefix), skip_special_tokens=True)
                self.known[prefix] = self.reward(text)
            else:
                chances = enumerate(self.after[prefix])
                self.known[prefix] = sum(chance * self((*prefix, token)) for token, chance in chances)
        return self.known[prefix]
