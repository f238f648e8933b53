"""A prepared data set on disk: parquet files, report.json, and README.md, its data card."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from gradtrace import __version__
from gradtrace.tasks.prepare.base import Example, Preparation
from gradtrace.tasks.prepare.pipeline import Cleaned
from gradtrace.trace.atomic import atomic_write


def write(folder: Path, preparation: Preparation, cleaned: Cleaned, origin: dict[str, str]) -> dict[str, Any]:
    """Write the data set; returns its report. `origin`: what was asked for, enough to make it again."""
    folder.mkdir(parents=True, exist_ok=True)
    report = make_report(preparation, cleaned, origin)
    for split in ("train", "validation", "test"):
        examples: list[Example] = getattr(cleaned, split)
        file = folder / f"{split}.parquet"
        if examples:
            atomic_write(file, parquet(preparation, examples, split))
        else:
            file.unlink(missing_ok=True)  # of an earlier preparation: it would not belong to this report
    atomic_write(folder / "report.json", json.dumps(report, indent=2, ensure_ascii=False).encode())
    atomic_write(folder / "README.md", data_card(preparation, cleaned, report).encode())
    return report


def parquet(preparation: Preparation, examples: list[Example], split: str) -> bytes:
    rows = [preparation.row(example, split, index) for index, example in enumerate(examples)]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, compression="zstd")
    return buffer.getvalue()


def make_report(preparation: Preparation, cleaned: Cleaned, origin: dict[str, str]) -> dict[str, Any]:
    return {
        "data_set": preparation.name,
        "gradtrace": __version__,
        **origin,
        "funnel": [{"step": step, "left": left} for step, left in cleaned.funnel],
        "splits": {split: len(getattr(cleaned, split)) for split in ("train", "validation", "test")},
        "reward": preparation.reward,
        "licence": preparation.licence,
        "homepage": preparation.homepage,
        "dropped_because_in_test": cleaned.overlap,
    }


def data_card(preparation: Preparation, cleaned: Cleaned, report: dict[str, Any]) -> str:
    """Markdown with the header that the Hugging Face hub reads."""
    first = preparation.messages(cleaned.train[0] if cleaned.train else cleaned.test[0])
    files = "\n".join(
        f"  - split: {split}\n    path: {split}.parquet" for split, count in report["splits"].items() if count
    )
    funnel = "\n".join(f"| {entry['step']} | {entry['left']:,} |" for entry in report["funnel"])
    splits = "\n".join(f"| {split} | {count:,} |" for split, count in report["splits"].items())
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in first)
    return f"""---
configs:
- config_name: default
  data_files:
{files}
---
# {preparation.name}, prepared by gradtrace {report["gradtrace"]}

Made with `{report["command"]}` from `{report["source"]}`.
Original: {preparation.homepage}, licence {preparation.licence}.

| split | problems |
|---|---|
{splits}

| step of the preparation | left |
|---|---|
{funnel}

Lengths are of the whole prompt, in {report["length_unit"]}. Problems with contradictory answers are left out.
Training and test data are compared by words and numbers alone, so that a change of punctuation does not hide a copy;
{len(report["dropped_because_in_test"])} problems were dropped from training for being in the test data.

Columns are verl's: `data_source`, `prompt` (messages, instruction included), `ability`, `reward_model.ground_truth`,
`extra_info`. Answers are judged with `reward.name={preparation.reward}`. The first prompt:

```
{conversation}
```
"""
