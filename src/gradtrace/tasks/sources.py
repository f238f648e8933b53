"""Rows of a data set, from wherever they are:

    train.jsonl, rows.json, train.parquet      a file
    data/gsm8k                                 a folder: parquet or JSON files, or one that `datasets` saved
    hf:openai/gsm8k:main:train                 a data set of the Hugging Face hub, its configuration and split
    hf:BytedTsinghua-SIA/DAPO-Math-17k         … without them: the default configuration, split `train`

Files need nothing but the core install; `hf:` and folders that `datasets` saved need the package `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet

from gradtrace.errors import GradtraceError, install

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
HUB = "hf:"


def read_source(source: str, key: str) -> list[Row]:
    """The rows of a file, a folder or a hub data set; `key` is the setting that named it."""
    if source.startswith(HUB):
        return read_hub(source, key)
    path = Path(source).expanduser()
    if path.is_dir():
        return read_folder(path, key)
    return read_file(path, key)


def read_file(file: Path, key: str) -> list[Row]:
    """The rows of a .jsonl, .json (a list) or .parquet file."""
    if not file.is_file():
        raise GradtraceError(f"{key}: there is no file {file.absolute()}.{hint(file)}")
    if file.suffix not in SUFFIXES:
        raise GradtraceError(f"{key}: {file} must be .jsonl, .json or .parquet.")
    if file.suffix == ".parquet":
        try:
            return pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise GradtraceError(f"{key}: {file} is not a readable parquet file: {error}") from None
    try:
        text = file.read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if file.suffix == ".json"
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (ValueError, RecursionError, OSError) as error:
        raise GradtraceError(f"{key}: {file} is not valid JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise GradtraceError(f"{key}: {file} must hold objects, one per prompt.")
    return rows


def hint(file: Path) -> str:
    """The command that makes a missing file, where it looks like one of ours: data/NAME/train.parquet."""
    from gradtrace.tasks.prepare.recipes import PREPARATIONS

    name = file.parent.name
    return f" Make it with: gradtrace data prepare {name}" if name in PREPARATIONS else ""


def read_folder(folder: Path, key: str) -> list[Row]:
    """A folder written by `datasets.save_to_disk`, or files with rows, in the order of their names."""
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved = _datasets(key).load_from_disk(str(folder))
        if isinstance(saved, dict):
            raise GradtraceError(
                f"{key}: {folder} holds the splits {', '.join(saved)}; name one: {folder}/{next(iter(saved))}."
            )
        return _rows(saved)
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise GradtraceError(f"{key}: {folder} holds no {', '.join(SUFFIXES)} file.")
    return [row for file in files for row in read_file(file, key)]


def read_hub(source: str, key: str) -> list[Row]:
    """`hf:NAME[:CONFIG][:SPLIT]`; two parts are name and split, unless the split then does not exist."""
    name, *parts = source.removeprefix(HUB).split(":")
    split = parts.pop() if parts else "train"
    configuration = parts.pop() if parts else None
    if parts or not name:
        raise GradtraceError(
            f"{key}: {source}: write hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT."
        )
    datasets = _datasets(key)
    try:
        return _rows(datasets.load_dataset(name, configuration, split=split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GradtraceError(
            f"{key}: {source} cannot be loaded: {first_line}\n"
            "Check the name, the split and the network, or download it and give the path of a file."
        ) from error


def _rows(data_set: Iterable[Row]) -> list[Row]:
    return [dict(row) for row in data_set]


def _datasets(key: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise GradtraceError(
            f"{key}: this source needs the package `datasets`: {install('hub')}, "
            "or give a .jsonl, .json or .parquet file."
        ) from None
    datasets.disable_progress_bars()
    return datasets
