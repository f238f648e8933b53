"""Parts of pages in docs/ that benchmarks write."""

from __future__ import annotations

from pathlib import Path


def between_marks(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{page} has no {begin} … {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")
