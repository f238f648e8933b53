"""Components of pages in docs/ that benchmarks write."""

from __future__ import annotations

import fcntl
from pathlib import Path


def between_marks(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Studies that run side by side may
    have parts of the same page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    with page.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before, found, rest = file.read().partition(begin)
        if not found or end not in rest:
            raise SystemExit(f"{page} has no {begin} … {end}")
        file.seek(0)
        file.write(f"{before}{begin}\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")
        file.truncate()
