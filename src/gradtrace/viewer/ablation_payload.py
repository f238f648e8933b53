"""The table of `gradtrace ablate` for the viewer, as far as it is what docs/ablation.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.trace.atomic import DamagedError, unseal
from gradtrace.trace.confined import RefusedError, read_confined, size_confined
from gradtrace.viewer.catalog import ABLATION

MOST_BYTES = 16 << 20
_PARTS: dict[str, type] = {
    "name": str,
    "recipe": str,
    "rollout": dict,
    "sweep": dict,
    "baseline": dict,
    "columns": list,
    "cells": list,
    "agreement": dict,
}


class AblationUnreadableError(GradtraceError):
    """ablation.json is there and is not a table."""


def ablation_payload(folder: Path) -> dict[str, Any] | None:
    """None if the folder has no ablation."""
    try:
        if size_confined(folder, ABLATION) is None:
            return None
        data = read_confined(folder, ABLATION, limit=MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise AblationUnreadableError(f"{ABLATION} is larger than {MOST_BYTES >> 20} MB")
        table = unseal(data, strict=False)
    except (RefusedError, DamagedError, OSError) as error:
        raise AblationUnreadableError(f"{ABLATION} cannot be read: {error}") from error
    for name, kind in _PARTS.items():
        if not isinstance(table.get(name), kind):
            raise AblationUnreadableError(f"{ABLATION} has no {name}; `gradtrace ablate collect` writes it anew")
    agreement = table["agreement"]
    names, matrix = agreement.get("names"), agreement.get("matrix")
    square = isinstance(names, list) and isinstance(matrix, list) and len(names) == len(matrix)
    if not square or any(not isinstance(row, list) or len(row) != len(matrix) for row in matrix):
        raise AblationUnreadableError(f"{ABLATION}: the agreement is no square table of its names")
    if not all(isinstance(entry, dict) for entry in [*table["cells"], *table["columns"]]):
        raise AblationUnreadableError(f"{ABLATION}: cells and columns must be objects")
    return table
