"""The bytes of every token of a tokenizer, read from its vocabulary and its decoder's settings.

Families: byte-level BPE (GPT-2, Qwen, Llama 3, SmolLM2), SentencePiece through `tokenizers` (Llama 2, Gemma, T5)
or through `sentencepiece` itself, and tokenizers whose tokens are plain text (characters or words).
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.trace.token_text import Flag, Rules

Vocabulary = tuple[list[bytes], list[int], Rules]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_SYMBOL = "▁"


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """(bytes per id, flags per id, rules)."""
    if hasattr(tokenizer, "backend_tokenizer"):
        return _from_tokenizers(tokenizer.backend_tokenizer)
    if hasattr(tokenizer, "sp_model"):
        return _from_slow(tokenizer)
    if hasattr(tokenizer, "id_to_piece") and hasattr(tokenizer, "serialized_model_proto"):
        return _from_sentencepiece(tokenizer)
    if hasattr(tokenizer, "id_to_token") and hasattr(tokenizer, "get_added_tokens_decoder"):
        return _from_tokenizers(tokenizer)
    raise GradtraceError(
        f"cannot read the vocabulary of a {type(tokenizer).__name__}; give a fast transformers tokenizer, "
        "a tokenizers.Tokenizer or a sentencepiece.SentencePieceProcessor"
    )


def _from_tokenizers(tokenizer: Any) -> Vocabulary:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    reader = _DecoderSettings(decoder)
    added = tokenizer.get_added_tokens_decoder()
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens |= {token_id: token.content for token_id, token in added.items()}
    size = 1 + max(tokens, default=-1)
    pieces, flags = [b""] * size, [int(Flag.MISSING)] * size
    for token_id, token in tokens.items():
        pieces[token_id], flags[token_id] = reader.read(token)
    for token_id, token in added.items():
        flags[token_id] |= int(Flag.ADDED | (Flag.SPECIAL if token.special else Flag(0)))
    return pieces, flags, reader.rules


class _DecoderSettings:
    """What a decoder of `tokenizers` does to one token, and what it does to the sequence (`rules`)."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.byte_level = False
        self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.space_symbol: str | None = None
        rules: dict[str, Any] = {} if decoder else {"separator": " "}
        parts = _flatten(decoder)
        if any(part["type"] == "ByteLevel" for part in parts):
            # GGUF conversions put ByteFallback, Fuse and Replace ▁ in front of it: nothing they look for occurs
            # in a vocabulary of the byte alphabet
            self.byte_level, parts = True, []
        fused = False
        for part in parts:
            kind = part["type"]
            if kind == "ByteFallback" and not fused:
                self.byte_fallback = True
                rules["invalid"] = "whole_run"
            elif kind == "Replace" and not fused and "String" in part["pattern"]:
                self.replacements.append((part["pattern"]["String"], part["content"]))
            elif kind == "Metaspace" and not fused:
                self.space_symbol = part["replacement"]
                if part.get("prepend_scheme", "always") != "never":
                    rules["leading"] = "first_token"
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and part["content"] == " " and part["stop"] == 0:
                rules.update(leading="strip", strip_left=part["start"])
            else:
                raise GradtraceError(
                    f"token texts of a tokenizer with decoder {json.dumps(part)} are not supported; supported are "
                    "ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip as Llama and Gemma use them"
                )
        self.rules = Rules(**rules)

    def read(self, token: str) -> tuple[bytes, int]:
        """(its bytes, its flags)."""
        if self.byte_level:
            return _byte_level(token), 0
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if match:
            return bytes.fromhex(match[1]), int(Flag.BYTE)
        if self.space_symbol is None:
            return token.encode(), 0
        flag = int(Flag.LITERAL_SPACE) if " " in token else 0
        return token.replace(self.space_symbol, " ").encode(), flag


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [leaf for part in decoder["decoders"] for leaf in _flatten(part)]
    return [decoder]


@cache
def _characters_to_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def _byte_level(token: str) -> bytes:
    """A token outside the alphabet (an added one with a space, say) is its own text."""
    try:
        return bytes(map(_characters_to_bytes().__getitem__, token))
    except KeyError:
        return token.encode()


def _from_sentencepiece(processor: Any) -> Vocabulary:
    """A `SentencePieceProcessor`. Control tokens decode to nothing and an unknown one to " ⁇ ", as it does it."""
    pieces, flags = [], []
    for token_id in range(processor.get_piece_size()):
        piece = processor.id_to_piece(token_id)
        if processor.is_control(token_id):
            pieces.append(b"")
            flags.append(int(Flag.SPECIAL))
        elif processor.is_unknown(token_id):
            pieces.append(processor.decode([token_id]).encode())
            flags.append(int(Flag.SPECIAL))
        elif processor.is_byte(token_id):
            pieces.append(bytes.fromhex(piece[3:5]))
            flags.append(int(Flag.BYTE))
        else:
            pieces.append(piece.replace(_SPACE_SYMBOL, " ").encode())
            flags.append(0)
    return pieces, flags, Rules(invalid="per_byte", leading=_leading_rule(processor))


def _leading_rule(processor: Any) -> Any:
    """Probe it with a piece that starts with ▁: whether the space goes depends on the model's normalizer."""
    for token_id in range(processor.get_piece_size()):
        piece = processor.id_to_piece(token_id)
        if piece.startswith(_SPACE_SYMBOL) and len(piece) > 1 and piece[1] != _SPACE_SYMBOL:
            if processor.decode([token_id]).startswith(" "):
                return "keep"
            lone = processor.piece_to_id(_SPACE_SYMBOL)
            twice = processor.decode([lone, token_id]) if not processor.is_unknown(lone) else " "
            return "sentencepiece" if twice.startswith(" ") else "sentencepiece_all"
    return "keep"


def _from_slow(tokenizer: Any) -> Vocabulary:
    """A slow transformers tokenizer: its SentencePiece model, and tokens added on top as plain text. Its own
    `decode` may also strip the whole text; that loses information and is not repeated here."""
    pieces, flags, rules = _from_sentencepiece(tokenizer.sp_model)
    special = set(tokenizer.all_special_ids)
    for token_id, added in tokenizer.added_tokens_decoder.items():
        while len(pieces) <= token_id:
            pieces.append(b"")
            flags.append(int(Flag.MISSING))
        pieces[token_id] = str(added.content).encode()
        flags[token_id] = int(Flag.ADDED | (Flag.SPECIAL if token_id in special else Flag(0)))
    return pieces, flags, rules
