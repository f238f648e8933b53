"""The worked examples of CONTRIBUTING run as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace import TraceWriter, open_run
from gradtrace.algorithms import LossInputs, policy_loss
from gradtrace.algorithms.registry import policy_losses
from gradtrace.config import FindingsConfig
from gradtrace.instruments.findings.watch import DETECTORS, Findings
from gradtrace.instruments.observer import Observers
from gradtrace.metrics import Timer
from gradtrace.tasks.rewards import named_reward
from gradtrace.trace.record import COLUMNS, KINDS
from tests.training import small
from tests.training.small import trainer

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


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


@pytest.fixture
def own_records() -> Iterator[None]:
    """What a test registers is forgotten after it: others list the instruments that ship."""
    before = {id(table): dict(table) for table in (KINDS, COLUMNS)}
    yield
    for table in (KINDS, COLUMNS):
        table.clear()
        table.update(before[id(table)])


def test_how_to_add_an_instrument(tmp_path: Path, own_records: None) -> None:
    names = example("an instrument")
    writer = TraceWriter(tmp_path / "run", "confidence")
    run = trainer(tmp_path, observer=Observers([names["Confidence"](writer)]))
    batch, _ = run.experience.collect(run.parts.generators["rollout"], Timer())
    _, metrics = run.train_step(batch, 1, Timer())
    writer.close()
    step = open_run(tmp_path / "run").step("confidence", 1)
    assert step["mean_log_prob"].mean() == pytest.approx(metrics["confidence/mean"], rel=1e-5)


def test_how_to_add_a_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DETECTORS, "one_token", example("a detector")["detect"])
    findings = Findings(FindingsConfig(), tmp_path, str)
    findings.start(0)
    findings.see(1, small.random_batch(), {})
    assert "one_token" in {finding["detector"] for finding in open_run(tmp_path).findings()}


def test_the_map_is_the_contract() -> None:
    """Every layer of the import contract is in CONTRIBUTING's picture."""
    contract = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (layers,) = re.findall(r"^layers = \[\n(.*?)^\]", contract, re.DOTALL | re.MULTILINE)
    picture = TEXT.split("```")[1]
    for name in re.findall(r"\w+", layers):
        assert re.search(rf"\b{name}\b", picture) or name in ("errors", "intervals"), f"CONTRIBUTING's map lacks {name}"
