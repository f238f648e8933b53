"""Exact text of single tokens, from the bytes of the vocabulary, without a tokenizer.

Decoding ids one at a time is wrong: a character may be split over tokens, and SentencePiece drops the space in
front of whatever it decodes. Here every id has its bytes, and `texts` cuts the decoded text of a whole sequence
into one piece per token:

    token_bytes = TokenBytes.load("runs/demo/token_bytes.npz")
    "".join(token.text for token in token_bytes.texts(ids)) == tokenizer.decode(ids)    # skip_special_tokens=False

- A character split over tokens goes to the token that completes it; the tokens before it have
  `continuation` set (and often an empty text).
- Bytes that are not UTF-8 become U+FFFD just as the tokenizer does it, which differs by family: `Rules.invalid`.
- SentencePiece families take away the space that they had put in front of a text. That is for the first token
  of a *sequence*: a response shown after its prompt continues one, so pass `continues=True` to keep its space.
"""

from __future__ import annotations

import enum
import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradtrace.trace.columns import FORMAT_VERSION, offsets_of
from gradtrace.trace.files import atomic_write
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError, dump_npz

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Flag(enum.IntFlag):
    SPECIAL = 1
    """A control token such as end-of-text."""
    ADDED = 2
    """Added to the vocabulary after it was trained."""
    BYTE = 4
    """A byte-fallback token (`<0xE2>`)."""
    LITERAL_SPACE = 8
    """Holds a space that is not SentencePiece's ▁, so the rule for the first token leaves it alone."""
    MISSING = 16
    """No token has this id; decoders skip it."""


_SPECIAL, _BYTE, _LITERAL_SPACE, _MISSING = map(int, (Flag.SPECIAL, Flag.BYTE, Flag.LITERAL_SPACE, Flag.MISSING))


@dataclass(frozen=True)
class Rules:
    """How a family turns the bytes of a sequence into its text."""

    invalid: Literal["lossy", "per_byte", "whole_run"] = "lossy"
    """What becomes U+FFFD: `lossy`, each maximal invalid part (byte-level BPE); `per_byte`, each invalid byte
    (sentencepiece); `whole_run`, every byte token of a run of them that is not valid as a whole (tokenizers'
    ByteFallback)."""
    separator: str = ""
    """What is put between tokens: a space for a tokenizer without decoder."""
    leading: Literal["keep", "strip", "first_token", "sentencepiece", "sentencepiece_all"] = "keep"
    """Spaces taken away at the start of a sequence: `strip`, up to `strip_left` (Llama); `first_token`, all of the
    first token (T5 and other Metaspace decoders); `sentencepiece`, the first piece's one; `sentencepiece_all`,
    one of every piece until there is text."""
    strip_left: int = 0


@dataclass(frozen=True)
class TokenText:
    text: str
    """The part of the decoded text that this token stands for."""
    special: bool
    continuation: bool
    """Ends inside a character that a later token completes."""
    raw: bytes
    """The token's bytes in the vocabulary."""


class TokenBytes:
    """id → bytes, and the rules that make text of them."""

    def __init__(self, pieces: Sequence[bytes], flags: Sequence[int], rules: Rules) -> None:
        if len(pieces) != len(flags):
            raise ValueError(f"{len(pieces)} tokens, {len(flags)} flags")
        self._flat = b"".join(pieces)
        self._offsets = offsets_of(np.array([len(piece) for piece in pieces], dtype=np.int64))
        self._flags = np.array(flags, dtype=np.uint8)
        self.rules = rules

    def __len__(self) -> int:
        return len(self._flags)

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of one token; nothing for an id that the vocabulary lacks (padded embeddings have such)."""
        if not 0 <= token_id < len(self):
            return b""
        return self._flat[self._offsets[token_id] : self._offsets[token_id + 1]]

    def flags(self, token_id: int) -> Flag:
        return Flag(self._flag(token_id))

    def _flag(self, token_id: int) -> int:
        """The flag as a plain number: enum arithmetic is slow where it is done for every token."""
        return int(self._flags[token_id]) if 0 <= token_id < len(self) else _MISSING

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        return "".join(token.text for token in self.texts(ids, continues))

    def texts(self, ids: Iterable[int], continues: bool = False) -> list[TokenText]:
        """One `TokenText` per id; joined, their texts are the decoded text. `continues`: the ids follow others
        (a response after its prompt), so the rule for the start of a sequence does not apply."""
        ids = [int(token_id) for token_id in ids]
        flags = [self._flag(token_id) for token_id in ids]
        pieces = [self[token_id] for token_id in ids]
        present = [i for i, flag in enumerate(flags) if not flag & _MISSING]
        shown = [b""] * len(ids)
        for number, i in enumerate(present):
            follows = number > 0 or continues
            shown[i] = self.rules.separator.encode() + pieces[i] if follows else pieces[i]
        if not continues:
            self._strip_leading(shown, flags, present)
        texts, continuation = self._cut(shown, flags)
        return [
            TokenText(text, bool(flag & _SPECIAL), inside, raw)
            for text, flag, inside, raw in zip(texts, flags, continuation, pieces, strict=True)
        ]

    def _strip_leading(self, shown: list[bytes], flags: list[int], present: list[int]) -> None:
        rule = self.rules.leading
        if rule == "first_token" and present and not flags[present[0]] & _LITERAL_SPACE:
            shown[present[0]] = shown[present[0]].replace(b" ", b"")
        elif rule == "strip":
            left = self.rules.strip_left
            for i in present:
                while left and shown[i].startswith(b" "):
                    shown[i] = shown[i][1:]
                    left -= 1
                if shown[i]:
                    break
        elif rule.startswith("sentencepiece"):
            for i in present:
                if flags[i] & (_SPECIAL | _BYTE):
                    if shown[i]:
                        break
                    continue
                stripped = shown[i].startswith(b" ")
                shown[i] = shown[i][1:] if stripped else shown[i]
                if shown[i] or (stripped and rule == "sentencepiece"):
                    break

    def _cut(self, pieces: list[bytes], flags: list[int]) -> tuple[list[str], list[bool]]:
        """Texts per token, and whether each ends inside a character."""
        if self.rules.invalid == "lossy":
            return cut_text(pieces)
        texts = [piece.decode(errors="replace") for piece in pieces]
        continuation = [False] * len(pieces)
        for run in _byte_runs(flags):
            run_pieces = [pieces[i] for i in run]
            if self.rules.invalid == "whole_run" and not _is_utf8(b"".join(run_pieces)):
                run_texts, inside = [REPLACEMENT] * len(run), [False] * len(run)
            else:
                run_texts, inside = cut_text(run_pieces, per_byte=True)
            for i, text, is_inside in zip(run, run_texts, inside, strict=True):
                texts[i], continuation[i] = text, is_inside
        return texts, continuation

    def dump(self) -> bytes:
        """The content of `token_bytes.npz`."""
        return dump_npz(
            {
                "format_version": np.array([FORMAT_VERSION], np.int32),
                "rules_json": np.frombuffer(json.dumps(asdict(self.rules)).encode(), np.uint8),
                "token_bytes": np.frombuffer(self._flat, np.uint8),
                "token_offsets": self._offsets,
                "token_flags": self._flags,
            }
        )

    def save(self, path: str | os.PathLike[str], fsync: bool = False) -> None:
        atomic_write(Path(path), self.dump(), fsync)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TokenBytes:
        return cls.parse(Path(path).read_bytes())

    @classmethod
    def parse(cls, data: bytes) -> TokenBytes:
        """Read the content of `token_bytes.npz`; an `UnsafeNpzError` says that it is damaged."""
        arrays = SafeNpz(data)
        for name, dtype in _LAYOUT.items():
            if name not in arrays or arrays.members[name].dtype != dtype or arrays[name].ndim != 1:
                raise UnsafeNpzError(f"{name} is missing or not flat {dtype}")
        if arrays["format_version"].tolist() != [FORMAT_VERSION]:
            raise UnsafeNpzError(f"format_version is {arrays['format_version'].tolist()}: upgrade gradtrace")
        offsets, flags = arrays["token_offsets"], arrays["token_flags"]
        whole = len(offsets) == len(flags) + 1 and offsets[0] == 0 and offsets[-1] == len(arrays["token_bytes"])
        if not whole or (np.diff(offsets) < 0).any():
            raise UnsafeNpzError("token_offsets do not cut token_bytes")
        try:
            rules = Rules(**json.loads(arrays["rules_json"].tobytes()))
        except (ValueError, TypeError) as error:
            raise UnsafeNpzError(f"rules_json: {error}") from None
        loaded = cls([], [], rules)
        loaded._flat, loaded._offsets, loaded._flags = arrays["token_bytes"].tobytes(), offsets, flags
        return loaded

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenBytes:
        """Read a transformers tokenizer, a `tokenizers.Tokenizer` or a `sentencepiece.SentencePieceProcessor`."""
        from gradtrace.trace.vocabulary import read_vocabulary

        pieces, flags, rules = read_vocabulary(tokenizer)
        return cls(pieces, flags, rules)


_LAYOUT = {
    "format_version": "int32",
    "rules_json": "uint8",
    "token_bytes": "uint8",
    "token_offsets": "int64",
    "token_flags": "uint8",
}


def cut_text(pieces: list[bytes], per_byte: bool = False) -> tuple[list[str], list[bool]]:
    """The decoded text of all `pieces` joined, cut into one text per piece, and whether each piece ends inside a
    character. Every maximal invalid part becomes one U+FFFD, or every invalid byte does (`per_byte`); it goes to
    the piece that holds its last byte."""
    data = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    texts = [""] * len(pieces)
    continuation = [False] * len(pieces)
    token = 0
    start = 0
    while start < len(data):
        stop, bad = len(data), None
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            stop = start + error.start
            bad = start + (error.start + 1 if per_byte else error.end)
        while token < len(pieces) and ends[token] <= stop:  # pieces that end in this valid stretch
            end = ends[token]
            while end > start and end < stop and data[end] & 0xC0 == 0x80:  # back to the start of a character
                end -= 1
            texts[token] += data[start:end].decode()
            continuation[token] = end != ends[token]
            start = end
            token += 1
        if token < len(pieces):
            texts[token] += data[start:stop].decode()
        start = stop
        if bad is not None:
            while ends[token] < bad:
                continuation[token] = True
                token += 1
            texts[token] += REPLACEMENT
            start = bad
    return texts, continuation


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_runs(flags: list[int]) -> list[list[int]]:
    """Indices of byte tokens, by run. An id that no token has does not end a run: decoders do not see it."""
    runs: list[list[int]] = []
    open_run = False
    for i, flag in enumerate(flags):
        if flag & _BYTE:
            if not open_run:
                runs.append([])
            runs[-1].append(i)
            open_run = True
        elif not flag & _MISSING:
            open_run = False
    return runs


def visible(text: str) -> str:
    """`text` with everything that a terminal would act on made visible: escape sequences, controls, direction marks."""
    shown = []
    for character in text:
        if character in "\n\t":
            shown.append("↵\n" if character == "\n" else "⇥")
        elif ord(character) < 0x20:
            shown.append(chr(0x2400 + ord(character)))
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            shown.append(f"⟨{ord(character):X}⟩")
        else:
            shown.append(character)
    return "".join(shown)


def pieces(ids: Iterable[int], token_bytes: TokenBytes | None, continues: bool = False) -> list[str]:
    """What to show for every token: its text; "·" for a part of a character; its id where texts are not known."""
    if token_bytes is None:
        return [f"[{token_id}]" for token_id in ids]
    tokens = token_bytes.texts(ids, continues)
    return [visible(token.text) or ("·" if token.raw else "∅") for token in tokens]
