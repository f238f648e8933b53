"""The worked examples of CONTRIBUTING run as they are written."""

from __future__ import annotations

import contextlib
import pydoc
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from gradtrace import open_run
from gradtrace.algorithms import LossInputs, policy_loss
from gradtrace.algorithms.registry import policy_losses
from gradtrace.cli import COMMANDS, main
from gradtrace.instruments import registry
from gradtrace.instruments.findings import FindingsConfig
from gradtrace.instruments.findings.watch import DETECTORS, Findings
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.tasks.rewards import named_reward
from gradtrace.trace.columns import COLUMNS, KINDS
from gradtrace.trace.run_files import RunFiles
from gradtrace.viewer.server import static_files
from tests.training import small
from tests.viewer.serving import Watched, chromium, serving

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def example(title: str) -> dict[str, Any]:
    """The names that the code block after **title** defines."""
    (code,) = re.findall(rf"\*\*{title}\*\*.*?```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, title, "exec"), names)
    return names


def test_how_to_add_a_loss() -> None:
    try:
        example("a policy loss")
        loss = policy_loss("reinforce_clipped_advantage", largest=1.0)
        ones = torch.ones(1, 2)
        inputs = LossInputs(-ones, -ones, torch.tensor([[5.0, 0.5]]), ones.bool())
        assert loss(inputs).loss.tolist() == [[1.0, 0.5]] and not loss.plain_at_ratio_one
    finally:
        del policy_losses._entries["reinforce_clipped_advantage"]


def test_how_to_add_a_reward() -> None:
    example("a reward")
    assert named_reward("polite", {})(["Yes, please.", "No."], [{}, {}]) == [1.0, 0.0]


def test_how_to_add_a_host() -> None:
    """With the instrument of the recipe above it, whose numbers are those of autograd in float64."""
    policy, batch = small.policy(), small.random_batch()
    tokens = int(batch.response_mask.sum())
    micro = next(MicroBatches(batch, 10**6)(torch.arange(len(batch))))
    log_probs = micro.unflatten(policy.statistics(micro)[0])
    weights = list(policy.trainable().values())
    loss = -(batch.need("advantages")[micro.rows] * log_probs).sum() / tokens
    gradient = torch.autograd.grad(loss, weights, retain_graph=True)
    with forgotten("sway"):
        sway = example("an instrument")
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    observed = example("a host")["observed_step"]
    expected = {}
    for index, row in enumerate(micro.rows.tolist()):
        own = torch.autograd.grad(log_probs[index, 0], weights, retain_graph=True)
        expected[row] = -sum(float((a * b).sum()) for a, b in zip(own, gradient, strict=True))
    table = observed(policy, optimizer, batch, lambda host: sway["SwayObserver"](host, sway["SwaySettings"]()))
    assert {row: float(found[0]) for row, found in table.columns["sway"].items()} == pytest.approx(expected, rel=1e-5)


def test_how_to_add_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("gradtrace.commands.lengths")
    vars(module).update(example("a command"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "lengths", ("commands.lengths", "how long the responses of a run are"))
    with RunFiles(tmp_path / "run") as files:
        files.log(1, {"response_length/mean": 7.5})
    assert main(["lengths", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "step 1: 7.5 tokens\n"
    with pytest.raises(SystemExit):
        main(["lengths", "--help"])
    assert "gradtrace lengths runs/demo" in capsys.readouterr().out


def test_how_to_add_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"\*\*a page\*\*.*?```js\n(.*?)```", TEXT, re.DOTALL)
    files = dict(static_files())
    app = files["js/app.js"].decode()
    first = app.index("import ")
    app = app[:first] + 'import { openLengthsPage } from "./pages/lengths.js";\n' + app[first:]
    app = app.replace("const RUN_PAGES = {", "const RUN_PAGES = { lengths: openLengthsPage,")
    files |= {"js/app.js": app.encode(), "js/pages/lengths.js": code.encode()}
    monkeypatch.setattr("gradtrace.viewer.server.static_files", lambda: files)
    with RunFiles(tmp_path / "run") as run:
        run.log(1, {"response_length/mean": 7.5})
    with serving([tmp_path / "run"]) as address, chromium() as browser:
        watched = Watched(browser.new_page(), address)
        page = watched.open("#/lengths")
        expect(page.locator("h1")).to_have_text("Lengths")
        expect(page.locator(".lengths li")).to_have_text("Step 1: 7.5 tokens")
        assert watched.errors == []


@contextlib.contextmanager
def forgotten(name: str) -> Iterator[None]:
    """What is registered inside is forgotten afterwards: others list the instruments that ship."""
    before = {id(table): dict(table) for table in (KINDS, COLUMNS)}
    yield
    registry.forget(name)
    for table in (KINDS, COLUMNS):
        table.clear()
        table.update(before[id(table)])


def test_how_to_add_a_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DETECTORS, "one_token", example("a detector")["one_token"])
    findings = Findings(FindingsConfig(), tmp_path, str)
    findings.start(0)
    findings.see(1, small.random_batch(), {})
    assert "one_token" in {finding["detector"] for finding in open_run(tmp_path).findings()}


def test_the_map_is_the_contract() -> None:
    """CONTRIBUTING's picture has exactly the layers of the import contract, in their order."""
    contract = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (layers,) = re.findall(r"^layers = \[\n(.*?)^\]", contract, re.DOTALL | re.MULTILINE)
    picture = TEXT.split("```")[1].strip().splitlines()
    assert [line.split("  ")[0].strip() for line in picture] == re.findall(r'"(.+?)"', layers)


def test_every_stop_of_the_walk_is_there() -> None:
    (walk,) = re.findall(r"## The walk of one batch\n(.*?)\n## ", TEXT, re.DOTALL)
    assert re.findall(r"^(\d+)\. `", walk, re.MULTILINE) == [str(number) for number in range(1, 30)]
    for stop in re.findall(r"`([\w./]+[./]\w+)`", walk):
        if "/" in stop:
            assert (ROOT / "src/gradtrace" / stop).is_file(), stop
        else:
            assert pydoc.locate(f"gradtrace.{stop}") is not None, stop
