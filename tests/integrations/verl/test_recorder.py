"""Metrics of a run that dies and goes on: each step once, whatever moment it died at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace import open_run
from gradtrace.algorithms import advantage
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import no_truth
from gradtrace.instruments.contract import TrainingRun
from gradtrace.instruments.entropy_trace import EntropyTraceConfig
from gradtrace.integrations.verl.driver.step import DriverSteps, VerlTask
from gradtrace.integrations.verl.driver.watch import Status, describe, read_status
from gradtrace.integrations.verl.settings import VerlSettings, read_settings
from gradtrace.tasks.arithmetic import build_tokenizer
from tests.integrations.verl import harness
from tests.training import small


class Run(TrainingRun):
    """Of a job that has no workers yet."""

    prefix = "gradtrace."
    seed = 0

    def __init__(self, prompts: Any = (), report: Any = print) -> None:
        self.task = VerlTask("dataset", no_truth)
        self.tokenizer = build_tokenizer()
        self.cannot = {}
        self.estimator = advantage("grpo")
        self.report = report
        self.prompts = list(prompts)

    def token_weights(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.float()

    def held_out(self, count: int, key: str, files: Any = (), unreported: bool = False) -> list[Any]:
        return self.prompts

    def ask(self, name: str, question: Any) -> Any:
        raise AssertionError("there is nobody to ask")


def recorder(run_dir: Path, **settings: Any) -> DriverSteps:
    return DriverSteps(Run(), VerlSettings(run_dir=str(run_dir), metrics=True, **settings), ranks=2, temperature=1.0)


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def begun(run_dir: Path) -> DriverSteps:
    first = recorder(run_dir)
    first.start(0)
    first.log(1, {"critic/rewards/mean": 0.1, "table": "not a number"})
    first.log(2, {"critic/rewards/mean": 0.2})
    return first


def test_died_after_the_checkpoint_and_before_the_metrics(tmp_path: Path) -> None:
    begun(tmp_path).before_checkpoint(3, {"critic/rewards/mean": 0.3})
    recorder(tmp_path).start(3)
    assert steps(tmp_path) == [1, 2, 3]


def test_died_after_the_metrics(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.before_checkpoint(3, {"critic/rewards/mean": 0.3})
    first.log(3, {"critic/rewards/mean": 0.3})
    recorder(tmp_path).start(3)
    assert steps(tmp_path) == [1, 2, 3]


def test_died_while_saving(tmp_path: Path) -> None:
    begun(tmp_path).before_checkpoint(3, {"critic/rewards/mean": 0.3})
    recorder(tmp_path).start(2)  # the checkpoint of step 3 is not complete
    assert steps(tmp_path) == [1, 2]


def test_the_state_of_a_run_says_who_died(tmp_path: Path) -> None:
    status = Status(7, "update", "actor rank 1", "ActorDiedError", {"actor rank 1": 42})
    status.write(tmp_path)
    assert describe(read_status(tmp_path)) == "actor rank 1 (process 42) died in phase update of step 7"
    status = Status(7, "rollout", "reward worker 0", "ActorDiedError", {})
    assert "in phase reward of step 7" in describe(status)
    assert describe(Status(7, "save")) == "the driver (or all of Ray) died in phase save of step 7"


def test_without_a_section_everything_is_off() -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"trainer": {"default_local_dir": "/x"}})
    assert not read_settings(config).is_active
    config = OmegaConf.create({**config, "gradtrace": {"influence_trace": {"enable": True}}})
    options = read_settings(config)
    assert options.is_active and options.run_dir == "/x"
    with pytest.raises(GradtraceError, match="hessian_mode=none"):
        config.gradtrace.influence_trace.hessian_mode = "none"
        read_settings(config)


def test_the_driver_watches_the_run_with_the_same_detectors(tmp_path: Path) -> None:
    """Here without blame."""
    own = recorder(tmp_path)
    own.start(0)
    own.record(small.random_batch(), 1, observed=False)
    own.log(1, {"actor/grad_norm": 1.0, "actor/skipped_updates": 1.0})
    (line,) = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["findings/gradient_spike"] == 1.0
    assert "gradient_spike" in (tmp_path / "findings.jsonl").read_text()


@harness.needs_verl
def test_holes_in_verls_response_mask_are_tokens_of_others() -> None:
    """As an agent loop with a tool leaves them in the queue: the mask is ours, lengths count everybody's tokens."""
    from verl.utils import tensordict_utils as tu

    from gradtrace.integrations.verl.driver.batches import batch_of

    def nested(rows: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

    values = {name: [[0.5] * 5, [0.5] * 2] for name in ("rm_scores", "advantages", "old_log_probs", "entropy")}
    found = tu.get_tensordict(
        {
            "prompts": nested([[4, 5], [4, 5]], torch.long),
            "responses": nested([[6, 7, 8, 9, 1], [6, 1]], torch.long),
            "response_mask": nested([[1, 1, 0, 0, 1], [1, 1]], torch.long),
            **{name: nested(rows, torch.float32) for name, rows in values.items()},
        }
    )
    batch = batch_of(found, ["a_0_0", "a_1_0"], 8, (1,))
    assert batch.response_lengths.tolist() == [5, 2] and batch.written_counts.tolist() == [3, 2]
    assert batch.response_ids == [[6, 7, 8, 9, 1], [6, 1]] and batch.finished.all()
    parts = batch.all_segments()
    assert parts is not None
    assert [(part.start, part.turn, part.role) for part in parts[0]] == [
        (0, 0, "assistant"),
        (2, 0, "environment"),
        (4, 1, "assistant"),
    ]
    assert not batch.sampler_log_probs.any(), "verl was not asked for them"
    found["rollout_log_probs"] = nested([[-1.5] * 5, [-2.5] * 2], torch.float32)
    sampled = batch_of(found, ["a_0_0", "a_1_0"], 8, (1,)).sampler_log_probs
    assert sampled[0].tolist() == [-1.5] * 5 and sampled[1].tolist() == [-2.5, -2.5, 0, 0, 0]
    assert batch.loss_weights is None
    found["rollout_is_weights"] = nested([[0.5] * 5, [2.0] * 2], torch.float32)
    weights = batch_of(found, ["a_0_0", "a_1_0"], 8, (1,)).loss_weights
    assert weights is not None and weights[1].tolist() == [2.0, 2.0, 0, 0, 0]


@harness.needs_verl
def test_the_weights_that_sampled_a_response_are_in_every_file(tmp_path: Path) -> None:
    """As verl's queue tags responses; where one has no tag, nothing is said of any."""
    from gradtrace.integrations.verl.driver.batches import with_versions

    batch = small.random_batch()
    known = torch.ones(batch.response_mask.shape)
    batch = batch.replace(entropies=known, old_log_probs=-known)
    tags = [{"min_global_steps": 3, "max_global_steps": 4 + row % 2} for row in range(len(batch))]
    own = recorder(tmp_path, entropy_trace=EntropyTraceConfig(enable=True))
    own.start(0)
    own.record(with_versions(batch, tags), 6, observed=False)
    own.close()
    step = open_run(tmp_path).step("entropy_trace", 6)
    assert set(step["policy_version"]) == {3} and set(step["last_policy_version"]) == {4, 5}
    assert with_versions(batch, [*tags[1:], {}]).first_version is None
