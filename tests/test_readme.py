"""The README and the pages of the documentation: links hold, and the shortest example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_prints_scores(capsys: pytest.CaptureFixture[str]) -> None:
    page = README.parent / "docs" / "own_loop.md"
    example = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]
    assert len(example.strip().splitlines()) <= 25
    exec(compile(example, str(page), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["accepted", "rejected", "accepted", "rejected"]
    assert "torch.Size([6, 4])" in lines[4]


MADE_BY_THE_BUILD = {"demo_report.html"}
"""Pages of the site that docs/_hooks makes; the strict build of the site checks links to them."""


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_point_at_files_that_exist(page: Path) -> None:
    for target in set(re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())) - MADE_BY_THE_BUILD:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
