"""The examples run as a reader would run them, and leave a run that the reader and the viewer open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gradtrace
from gradtrace.viewer.catalog import RunCatalog
from gradtrace.viewer.group import group_payload

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(("name", "steps"), [("plain_pytorch", 20), ("hf_trainer", 8), ("trl_grpo", 20)])
def test_the_example_runs_and_its_run_opens(name: str, steps: int, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "gradtrace view" in done.stdout
    run = gradtrace.open_run(tmp_path / "run")
    assert run.verify() == [] and run.steps("influence_trace") == list(range(1, steps + 1))
    assert len(run.metrics()[0]) == steps
    step = run.step("influence_trace", steps)
    scores = step["influence"]
    assert len(scores) > 0 and (scores != 0).any()
    catalog = RunCatalog([run.path], None)
    served = catalog.refresh()[0]
    view = catalog.step_view(served, 1)
    assert view is not None
    group = group_payload(view, 0, served.vocabulary)
    assert group["responses"] and "influence" in group["channels"]


def test_the_plain_loop_fits_on_a_screen() -> None:
    assert len((EXAMPLES / "plain_pytorch.py").read_text().splitlines()) <= 48
