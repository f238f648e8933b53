"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gradtrace.errors import GradtraceError


def load_tokenizer(path: str | Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # another library reads its files, in four formats; each fails in its own way
        raise GradtraceError(f"{key}={path}: the tokenizer cannot be loaded. {error}") from error
    if not tokenizer("1 + 2 is three")["input_ids"]:
        raise GradtraceError(
            f"{key}={path}: there are no tokenizer files, and every text would be encoded to nothing. Copy "
            "tokenizer.json and tokenizer_config.json of the model that it was made from into the folder."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
