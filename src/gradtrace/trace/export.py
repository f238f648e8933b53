"""A trace as one table of tokens: parquet or CSV."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.trace import schema
from gradtrace.trace.reader import Run
from gradtrace.trace.step import Step
from gradtrace.trace.token_text import TokenBytes


def export_tokens(run: Run, kind: str, steps: Iterable[int], target: Path) -> int:
    """Write the tokens of these steps, a row each; the number of rows. Steps that cannot be read are left out (see
    `run.problems`). A column that some steps lack is null there."""
    import pyarrow
    from pyarrow import csv, parquet

    writers = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}
    if target.suffix not in writers:
        raise GradtraceError(f"cannot export to {target.name}: its name must end in .parquet or .csv")
    token_bytes = run.token_bytes
    steps = list(steps)
    columns = _all_columns(run.readable_steps(kind, steps))
    if columns is None:
        raise GradtraceError(f"none of these steps of {kind} can be read in {run.path}")
    layout = _layout(columns, has_text=token_bytes is not None)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    rows = 0
    try:
        with writers[target.suffix](str(temporary), layout) as writer:
            for step in run.readable_steps(kind, steps):
                table = _table(step, token_bytes)
                arrays = [
                    pyarrow.array(table[field.name], field.type)
                    if field.name in table
                    else pyarrow.nulls(step.n_tokens, field.type)
                    for field in layout
                ]
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=layout))
                rows += step.n_tokens
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _all_columns(steps: Iterable[Step]) -> list[str] | None:
    """Columns of any of the steps, what there is one of per token last; None if there is no step."""
    found = [set(step.columns) for step in steps]
    present = set().union(*found)
    known = [name for name in schema.COLUMNS if name in present]
    return sorted(known, key=lambda name: schema.COLUMNS[name].level == "token") if found else None


def _layout(columns: list[str], has_text: bool) -> Any:
    import pyarrow

    fields = [(name, pyarrow.int64()) for name in ("step", "group_id", "response", "position")]
    if has_text:
        fields.append(("text", pyarrow.string()))
    for name in columns:
        column = schema.COLUMNS[name]
        flat = column.level == "token" or (column.level == "response" and not column.is_offsets and name != "group")
        if flat:
            kind = pyarrow.string() if column.values else pyarrow.from_numpy_dtype(np.dtype(column.dtype))
            fields.append((name, kind))
    return pyarrow.schema(fields)


def _table(step: Step, token_bytes: TokenBytes | None) -> dict[str, Any]:
    """The token table with names in place of the numbers of enums, and the text of every token."""
    table: dict[str, Any] = step.token_table()
    for name in table:
        values = schema.COLUMNS[name].values if name in schema.COLUMNS else None
        if values:
            names = np.array([value.name.lower() for value in values])
            table[name] = names[table[name]]
    if token_bytes is not None:
        table["text"] = [
            token.text
            for r in range(step.n_responses)
            for token in token_bytes.texts(step.tokens(r)["token_id"], continues=True)
        ]
    return table
