"""The commands that the documentation shows, with what a reader is told that they need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"\s*(?:\.venv/bin/)?gradtrace (.+)")
UNFINISHED = re.compile(r"…|\.\.\.|COMMAND|KEY=VALUE|=NAME|\w ?\\?\| ?\w|\[[A-Z-]")
"""The form of a command, not one to be typed."""
NEEDS = re.compile(r"\bneeds? (?!no )(.+)")


@dataclass(frozen=True)
class Documented:
    page: str
    words: tuple[str, ...]
    needs: str
    """What it takes beside a run of the demo: from the comment behind the command ("# needs a GPU", or in a sentence
    "(needs a GPU)"), or from a line **Needs:** above it in its section (above the first section: for the whole page).
    Empty: nothing."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def documented(path: Path) -> Iterator[Documented]:
    """All commands of a page, in code blocks and inside of its sentences."""
    page_needs = section_needs = language = ""
    in_block, is_page = False, True
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            in_block = not in_block
            language = line.strip("` ") if in_block else ""
            continue
        if not in_block and line.startswith("## "):
            section_needs, is_page = "", False
        if not in_block and (found := re.match(r"\*\*Needs:\*\* (.+)", line)):
            page_needs, section_needs = (found[1], "") if is_page else (page_needs, found[1])
        shown = [re.split(r"\s+#\s|\s{3,}\(", line, maxsplit=1)] if in_block else []
        if not in_block:  # what follows the command in its line may say in brackets what it needs
            shown = [[found[1], line[found.end() :]] for found in re.finditer(r"`(gradtrace [^`]+)`", line)]
        for command, *comment in shown if language in ("", "bash", "sh") else ():
            if (match := COMMAND.fullmatch(command.rstrip())) is None or UNFINISHED.search(command):
                continue
            own = NEEDS.search("".join(comment)) if in_block else re.search(r"\(needs ([^)]+)\)", "".join(comment))
            yield Documented(path.name, tuple(shlex.split(match[1])), own[1] if own else section_needs or page_needs)


def all_commands() -> list[Documented]:
    found = [command for page in PAGES for command in documented(page)]
    return list(dict.fromkeys(found))
