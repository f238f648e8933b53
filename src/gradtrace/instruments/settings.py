"""Settings that instruments have in common."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace.attribution.config import choice, number

PROMPT_FILES = "prompt_files"
"""In the metadata of a field: it names files with prompts, which a launcher puts where its host can read them."""


@dataclass
class FilesConfig:
    """How an instrument writes its files."""

    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    on_error: str = choice("warn", "raise")
    """What a failed write, or a step that could not be traced, does to the run."""


@dataclass
class TraceConfig(FilesConfig):
    enable: bool = False
    """Turn the instrument on."""
    write_every: int = number(1, minimum=1)
    """Steps between traces."""
