"""The README and the pages of the documentation: links hold, and the shortest example runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def printed_by_examples(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """By the two examples that run as they stand, the second after the first; the block before them is a sketch."""
    page = README.parent / "docs" / "own_loop.md"
    sketch, *examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(sketch.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    for example in examples[:2]:
        assert len(example.strip().splitlines()) <= 25
        exec(compile(example, str(page), "exec"), names)
    return capsys.readouterr().out.splitlines()


def test_the_examples_of_a_loop_of_ones_own_run_and_print_scores(capsys: pytest.CaptureFixture[str]) -> None:
    """The step raises the objective, so that its parts have a positive sum."""
    lines = printed_by_examples(capsys)
    assert [line.split()[0] for line in lines[:4]] == ["+1", "-1", "+1", "-1"]
    assert float(lines[4].split()[-2]) > 0
    assert [line.split()[0] for line in lines[5:9]] == ["accepted", "rejected", "accepted", "rejected"]
    assert "torch.Size([6, 4])" in lines[9]


MADE_BY_THE_BUILD = {"demo_report.html"}
"""Pages of the site that docs/_hooks makes; the strict build of the site checks links to them."""


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_point_at_files_that_exist(page: Path) -> None:
    for target in set(re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())) - MADE_BY_THE_BUILD:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


MEASURED = {
    "validity": {"demo_batch_spearman": ".2f", "demo_batch_baseline_spearman": ".2f"},
    "trace_overhead": {"overhead_update_default_smollm2": ".2f"},
    "verl_overhead": {"overhead_update": ".2f"},
    "trainer": {"speedup_trl_smollm2": ".1f", "speedup_trl_smollm2_apart": ".1f"},
    "rollout": {"speedup_generate_smollm2": ".1f"},
    "peers.kronfluence_scores": {"speedup_kronfluence_smollm2": ".1f"},
}
"""Figures of the README: the benchmark, its ratio, and the digits that are shown."""


@pytest.mark.parametrize("benchmark", MEASURED)
def test_the_figures_of_the_readme_are_the_last_ones_measured(benchmark: str) -> None:
    """A value with its interval, `1.26 [1.20, 1.26]`, or a median alone; zeros before the point may be left out."""
    shown = re.sub(r"(?<![\d.])0\.", ".", README.read_text())
    found = json.loads((README.parent / "benchmarks" / "results" / f"{benchmark}.json").read_text())
    for name, digits in MEASURED[benchmark].items():
        numbers = (found["ratios"][name], *found["ranges"].get(name, ()))
        value, *ends = (format(number, digits).removeprefix("0") for number in numbers)
        expected = f"{value} [{', '.join(ends)}]" if ends else value
        assert expected in shown, f"{name} is {expected}"


def test_the_coverage_of_the_probes_intervals_is_the_last_one_measured() -> None:
    found = json.loads((README.parent / "benchmarks" / "results" / "probe_accuracy.json").read_text())["ratios"]
    shares = [100 * value for name, value in found.items() if name.startswith("coverage_95_")]
    assert f"held in {min(shares):.0f} to {max(shares):.0f} % of 64 trials" in README.read_text()
