"""Small tokenizers of every family, trained here: the tests need no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "12 + 30 = 42; 7 * 6 = 42\n\tindented  twice",
    "naïve café – “quoted” … Straße",
    "日本語のテキスト、絵文字😀👩‍👩‍👧も",
    "Привет, мир! Γειά σου Κόσμε",
] * 20


def _byte_level(add_prefix_space: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["added with spaces", AddedToken("日本", special=False), "é"])
    return tokenizer


def _unigram_metaspace(prepend_scheme: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["added with spaces"])
    return tokenizer


def _byte_fallback(strip: bool) -> Any:
    """As Llama 2 (strip) and Gemma (no strip) have it: BPE over ▁-text, bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] if strip else parts)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _characters(with_decoder: bool) -> Any:
    """The demo's: one character a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for character in "0123456789+-*/= abcdefé":
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if with_decoder:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    return tokenizer


def _sentencepiece(folder: Path, **options: Any) -> Any:
    import sentencepiece

    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "model"),
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "model.model"))


BPE_OPTIONS = {
    "vocab_size": 420,
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.98,
    "normalization_rule_name": "identity",
}
FAMILIES = {
    "byte_level_gpt2": lambda folder: _byte_level(add_prefix_space=False),
    "byte_level_prefix_space": lambda folder: _byte_level(add_prefix_space=True),
    "metaspace_always": lambda folder: _unigram_metaspace("always"),
    "metaspace_never": lambda folder: _unigram_metaspace("never"),
    "llama_byte_fallback": lambda folder: _byte_fallback(strip=True),
    "gemma_byte_fallback": lambda folder: _byte_fallback(strip=False),
    "characters": lambda folder: _characters(with_decoder=True),
    "no_decoder": lambda folder: _characters(with_decoder=False),
    "sentencepiece_llama": lambda folder: _sentencepiece(folder, **BPE_OPTIONS, remove_extra_whitespaces=False),
    "sentencepiece_default": lambda folder: _sentencepiece(folder, vocab_size=97, model_type="unigram"),
    "sentencepiece_no_prefix": lambda folder: _sentencepiece(
        folder, **BPE_OPTIONS, remove_extra_whitespaces=False, add_dummy_prefix=False
    ),
}
