"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gradtrace.errors import GradtraceError
from gradtrace.hub import is_out_of_reach, not_loaded


def load_tokenizer(path: str | Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=is_out_of_reach(path))
    except Exception as error:  # another library reads its files, in four formats; each fails in its own way
        raise not_loaded(path, key, "tokenizer", error) from error
    if not tokenizer("1 + 2 is three")["input_ids"]:
        raise GradtraceError(
            f"{key}={path}: there are no tokenizer files, and every text would be encoded to nothing. Copy "
            "tokenizer.json and tokenizer_config.json of the model that it was made from into the folder."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
