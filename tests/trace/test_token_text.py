"""Joined token texts are the decoded text, for every family of tokenizers and also where bytes are not UTF-8."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import CORPUS, FAMILIES

from gradtrace.errors import GradtraceError
from gradtrace.tasks.arithmetic import build_tokenizer
from gradtrace.trace.token_text import Flag, Rules, TokenBytes, cut_text

SMOLLM2 = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module", params=list(FAMILIES))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


def decode(tokenizer: Any, ids: list[int]) -> str:
    if hasattr(tokenizer, "id_to_piece"):  # sentencepiece
        return tokenizer.decode(ids)
    return tokenizer.decode(ids, skip_special_tokens=False)


def encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return list(encoded.ids) if hasattr(encoded, "ids") else list(encoded)


def random_sequences(tokenizer: Any, size: int, count: int = 1000, seed: int = 0) -> list[list[int]]:
    """Half are random ids, special and byte tokens included; half are encoded text, cut in the middle."""
    rng = random.Random(seed)
    sequences = []
    for number in range(count):
        if number % 2:
            sequences.append([rng.randrange(size) for _ in range(rng.randrange(1, 40))])
        else:
            ids = encode(tokenizer, " ".join(rng.sample(CORPUS, 2)))
            start = rng.randrange(len(ids))
            sequences.append(ids[start : start + rng.randrange(1, 40)])
    return sequences


def test_joined_texts_equal_the_decoded_text(tokenizer: Any) -> None:
    token_bytes = TokenBytes.from_tokenizer(tokenizer)
    for ids in random_sequences(tokenizer, len(token_bytes)):
        texts = token_bytes.texts(ids)
        assert len(texts) == len(ids)
        assert "".join(token.text for token in texts) == decode(tokenizer, ids), ids


def test_saved_and_loaded_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    built = TokenBytes.from_tokenizer(tokenizer)
    built.save(tmp_path / "token_bytes.npz")
    loaded = TokenBytes.load(tmp_path / "token_bytes.npz")
    assert len(loaded) == len(built)
    assert loaded.rules == built.rules
    for ids in random_sequences(tokenizer, len(built), count=20):
        assert loaded.texts(ids) == built.texts(ids)


@pytest.mark.skipif(not SMOLLM2.exists(), reason="scripts fetch it; not part of the repository")
def test_joined_texts_equal_the_decoded_text_for_smollm2() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    token_bytes = TokenBytes.from_tokenizer(tokenizer)
    rng = random.Random(0)
    for number in range(1000):
        if number % 2:
            ids = [rng.randrange(len(token_bytes)) for _ in range(rng.randrange(1, 60))]
        else:
            ids = tokenizer.encode(" ".join(rng.sample(CORPUS, 2)))
        expected = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert token_bytes.decode(ids) == expected, ids
    assert token_bytes.texts([tokenizer.eos_token_id])[0].special


@settings(deadline=None)  # other work shares the machine
@given(st.lists(st.binary(max_size=6), max_size=12))
def test_cutting_any_bytes_loses_and_invents_nothing(pieces: list[bytes]) -> None:
    texts, _ = cut_text(pieces)
    assert "".join(texts) == b"".join(pieces).decode(errors="replace")


@settings(deadline=None)  # other work shares the machine
@given(st.text(max_size=20), st.lists(st.integers(0, 60), max_size=10))
def test_a_split_character_goes_to_the_token_that_completes_it(text: str, cuts: list[int]) -> None:
    data = text.encode(errors="ignore")
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    texts, continuation = cut_text(pieces)
    seen = b""
    for piece, piece_text, inside in zip(pieces, texts, continuation, strict=True):
        seen += piece
        assert piece_text == "" or seen.endswith(piece_text.encode()) or inside
        assert inside == (len(seen) < len(data) and data[len(seen)] & 0xC0 == 0x80)


def test_split_emoji() -> None:
    texts, continuation = cut_text([b"a\xf0\x9f", b"\x98", b"\x80b"])
    assert texts == ["a", "", "😀b"]
    assert continuation == [True, True, False]


def test_invalid_bytes_follow_the_rule_of_the_family() -> None:
    pieces, flags = [b"\xe2", b"\x82", b"a"], [int(Flag.BYTE), int(Flag.BYTE), 0]
    shown = {
        invalid: TokenBytes(pieces, flags, Rules(invalid=invalid)).decode([0, 1, 2])
        for invalid in ("lossy", "per_byte", "whole_run")
    }
    assert shown == {"lossy": "\ufffda", "per_byte": "\ufffd\ufffda", "whole_run": "\ufffd\ufffda"}
    mixed = [0x41, 0xE2]  # whole_run also gives up the valid byte of a run that is broken elsewhere
    tokens = TokenBytes([bytes([b]) for b in mixed], [int(Flag.BYTE)] * 2, Rules(invalid="whole_run"))
    assert tokens.decode([0, 1]) == "\ufffd\ufffd"


def test_a_response_after_its_prompt_keeps_its_first_space() -> None:
    tokens = TokenBytes([b" a", b" b"], [0, 0], Rules(leading="strip", strip_left=1))
    assert tokens.decode([0, 1]) == "a b"
    assert tokens.decode([0]) + tokens.decode([1], continues=True) == "a b"


def test_ids_that_no_token_has_are_empty_and_break_nothing() -> None:
    tokens = TokenBytes([b"\xc3", b"\xa9"], [int(Flag.BYTE)] * 2, Rules(invalid="whole_run"))
    assert [token.text for token in tokens.texts([0, 999, -1, 1])] == ["", "", "", "é"]


def test_special_tokens_are_marked(tokenizer: Any) -> None:
    token_bytes = TokenBytes.from_tokenizer(tokenizer)
    specials = {token_bytes.texts([i])[0].special for i in range(3)}
    assert True in specials
    assert not token_bytes.texts([len(token_bytes) - 1])[0].special


def test_transformers_wrapper_reads_as_the_tokenizer_inside() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FAMILIES["byte_level_gpt2"](Path()), eos_token="<|endoftext|>")
    token_bytes = TokenBytes.from_tokenizer(tokenizer)
    ids = tokenizer.encode("日本語 😀 café<|endoftext|>")
    assert token_bytes.decode(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_joined_texts_equal_the_decoded_text_for_the_demo_tokenizer() -> None:
    tokenizer = build_tokenizer()
    token_bytes = TokenBytes.from_tokenizer(tokenizer)
    rng = random.Random(0)
    for _ in range(1000):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]
        expected = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert token_bytes.decode(ids) == expected
    assert token_bytes.texts([tokenizer.eos_token_id])[0].special


def test_an_unsupported_tokenizer_is_named() -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(GradtraceError, match="WordPiece"):
        TokenBytes.from_tokenizer(tokenizer)
    with pytest.raises(GradtraceError, match="int"):
        TokenBytes.from_tokenizer(3)
