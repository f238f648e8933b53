"""The instrument of CONTRIBUTING in a package of its own: installed, it is configured, trained with in all three hosts,
stored, listed, exported and shown, without a change to our code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.e2e.test_viewer_command import viewing
from tests.integrations.verl import harness
from tests.training import small
from tests.viewer.serving import Watched, chromium

ROOT = Path(__file__).parents[1]
PROJECT = """
[project]
name = "gradtrace-sway"
version = "1.0"
[project.entry-points."gradtrace.instruments"]
sway = "gradtrace_sway"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[tool.setuptools]
py-modules = ["gradtrace_sway"]
"""
COMMON = (
    *("trainer.sway.enable=true", "trainer.sway.on_error=raise", "trainer.blame.enable=true"),
    *("trainer.blame.write_every=1", "trainer.entropy_trace.enable=true", "trainer.validation.every=0"),
)
TRL = """
import sys
from pathlib import Path
from gradtrace.integrations.trl import attach
from tests.integrations.trl_runs import grpo_trainer

folder = Path(sys.argv[1])
trainer = grpo_trainer(folder, max_steps=2, max_grad_norm=0.0)
settings = {"write_every": 1, "on_error": "raise"}
attach(trainer, run_dir=folder / "run", blame_every=1, on_error="raise", instruments={"sway": settings})
trainer.train()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the one that CONTRIBUTING describes."""
    folder = tmp_path_factory.mktemp("package")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"\*\*an instrument\*\*.*?```python\n(.*?)```", text, re.DOTALL)
    (folder / "gradtrace_sway.py").write_text(code)
    (folder / "pyproject.toml").write_text(PROJECT)
    target = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(folder)], check=True, cwd=folder)
    return target


def python(site: Path, *words: str, **environment: str) -> str:
    """What a process with the package prints."""
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def gradtrace(site: Path, *words: str) -> str:
    return python(site, "-m", "gradtrace.cli", *words)


def check_steps(site: Path, run: Path, steps: list[int], tolerance: float) -> None:
    """Its files hold what blame, which is ours, calls push."""
    code = (
        "import json, sys, gradtrace\n"
        "run = gradtrace.open_run(sys.argv[1])\n"
        "own = {n: run.step_table(n).need('sway').tolist() for n in run.steps('sway')}\n"
        "ours = {n: run.step_table(n).need('push').tolist() for n in own}\n"
        "print(json.dumps([own, ours]))"
    )
    own, ours = json.loads(python(site, "-c", code, str(run)).splitlines()[-1])
    assert [int(step) for step in own] == steps
    for step, values in own.items():
        expected = np.array(ours[step], float)
        assert np.isfinite(expected).any()
        error = np.nanmax(np.abs(np.array(values, float) - expected)) / np.nanmax(np.abs(expected))
        assert error <= tolerance, f"step {step} is off by {error:.1e}"


@pytest.fixture(scope="module")
def embedded(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded")
    words = [*small.overrides(folder), *COMMON, "trainer.total_steps=2", "actor.optim.grad_clip=0"]
    gradtrace(site, "train", *words)
    return folder / "runs" / "demo"


def test_the_configuration_and_its_errors_know_it(site: Path) -> None:
    assert "sway:" in gradtrace(site, "train", "--cfg", "trainer.sway.scale=2")
    said = gradtrace(site, "train", "--help")
    assert "trainer.sway.enable=true" in said and "trainer.blame.enable=true" in said
    with pytest.raises(AssertionError, match=r"Did you mean 'trainer\.sway\.scale'"):
        gradtrace(site, "train", "--cfg", "trainer.sway.scael=2")


def test_a_package_that_cannot_be_imported_costs_itself_alone(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "gradtrace_sway.py").write_text("raise RuntimeError('no such device')")
    printed = gradtrace(broken, "train", "--cfg")
    assert "instrument sway (gradtrace_sway) cannot be loaded: no such device" in printed
    assert "blame:" in printed and "sway:" not in printed


def test_it_observes_our_own_loop(site: Path, embedded: Path) -> None:
    check_steps(site, embedded, [1, 2], tolerance=1e-6)
    line = small.metrics(embedded)[-1]
    assert line["sway/largest"] > 0


def test_it_is_listed_shown_and_exported(site: Path, embedded: Path, tmp_path: Path) -> None:
    assert "how far this step moves each token" in " ".join(gradtrace(site, "trace", "ls", str(embedded)).split())
    shown = gradtrace(site, "trace", "show", str(embedded), "--kind", "sway", "--color", "never")
    assert "sway: change of its log-prob by a plain gradient step" in " ".join(shown.split())
    gradtrace(site, "trace", "export", str(embedded), str(tmp_path / "tokens.parquet"), "--kind", "sway")
    assert (tmp_path / "tokens.parquet").stat().st_size > 0


def test_the_viewer_has_its_page_and_its_colour(site: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    words = (str(embedded), "--no-open", "--port", "0")
    with viewing(*words, folder=embedded) as (address, _), chromium() as browser:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address.split("/?")[0].rstrip("/"))
        page = watched.page
        page.goto(address)
        page.get_by_role("link", name="Sway", exact=True).click()
        expect(page.locator("h1")).to_have_text("Sway, step 2")
        page.evaluate("location.hash = '#/group?step=2&group=0&view=stack'")
        page.get_by_label("What column 2 shows").select_option("Sway")
        expect(page.locator(".explain .slot-1")).to_contain_text("hange of its log-prob by a plain gradient step")
        assert watched.errors == [] and watched.foreign_requests == []


@pytest.mark.slow
def test_it_observes_trl(site: Path, tmp_path: Path) -> None:
    python(site, "-c", TRL, str(tmp_path))
    check_steps(site, tmp_path / "run", [1, 2], tolerance=1e-4)


@pytest.mark.slow
@harness.needs_verl
@pytest.mark.timeout(900)
def test_it_observes_two_ranks_of_verl(site: Path, tmp_path: Path) -> None:
    """Both take differences there, of other lengths."""
    words = [*small.overrides(tmp_path), *COMMON, "trainer.total_steps=1", "data.max_prompt_length=8", "rollout.n=4"]
    gradtrace(site, "train", *words, "engine=verl", "cluster.num_workers=2", "cluster.max_failures=0")
    check_steps(site, tmp_path / "runs" / "demo", [1], tolerance=2e-2)
