"""Text of tokens for the viewer: bytes by id, from the run's token_bytes.npz. Without that file ids are shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradtrace.trace.reader import RunReader
from gradtrace.trace.token_text import Flag, TokenBytes

TOKEN_BYTES = "token_bytes.npz"


class Vocabulary:
    def __init__(self, token_bytes: TokenBytes | None, problem: str | None = None) -> None:
        self.token_bytes = token_bytes
        self.problem = problem
        """Why there is no text, in words."""

    def text(self, ids: Iterable[int]) -> str:
        """The text of a prompt."""
        if self.token_bytes is None:
            return " ".join(f"⟨{token_id}⟩" for token_id in ids)
        return self.token_bytes.decode(ids)

    def words(self, ids: Iterable[int]) -> str:
        """The text of a response as a reward sees it: without control tokens."""
        known = self.token_bytes
        return self.text([i for i in ids if known is None or not known.flags(i) & Flag.SPECIAL])

    def entries(self, ids: list[int]) -> dict[str, Any]:
        """{ids, bytes: hex of each (null if unknown), special: indices of control tokens}."""
        hexes: list[str | None] = [None] * len(ids)
        special = []
        if self.token_bytes is not None:
            separator = self.token_bytes.rules.separator.encode()
            for index, token_id in enumerate(ids):
                flags = self.token_bytes.flags(token_id)
                if flags & Flag.MISSING:
                    continue
                hexes[index] = (separator + self.token_bytes[token_id]).hex()
                if flags & Flag.SPECIAL:
                    special.append(index)
        return {"ids": ids, "bytes": hexes, "special": special}


def load_vocabulary(run: RunReader) -> Vocabulary:
    token_bytes = run.token_bytes
    if token_bytes is not None:
        return Vocabulary(token_bytes)
    reason = next((problem.what for problem in run.problems if problem.where == TOKEN_BYTES), "it is missing")
    return Vocabulary(None, f"No text for tokens, so they are shown by their ids: {TOKEN_BYTES}: {reason}")
