"""A step without influence rows says why: once in the terminal, and in its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradtrace import open_run
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.plan import status_by_contrast
from gradtrace.instruments.influence.reporter import why_empty
from gradtrace.trace.columns import GroupStatus
from gradtrace.training.run import train
from gradtrace.training.terminal import SilentDisplay
from tests.training import small


class Recorded(SilentDisplay):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def batch(rewards: list[float], groups: list[int], responses: list[int]) -> RolloutBatch:
    """One-token responses."""
    size = len(rewards)
    return RolloutBatch(
        prompts=[[1] for _ in set(groups)],
        group=torch.tensor(groups),
        responses=torch.tensor(responses)[:, None],
        response_mask=torch.ones(size, 1, dtype=torch.bool),
        finished=torch.ones(size, dtype=torch.bool),
        sampler_log_probs=torch.zeros(size, 1),
        rewards=torch.tensor(rewards),
    )


@pytest.mark.parametrize(
    ("cause", "example"),
    [
        ("one_response", batch([0.0, 1.0], [0, 1], [5, 6])),
        ("no_diversity", batch([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [5, 5, 6, 6])),
        ("all_right", batch([1.0, 1.0], [0, 0], [5, 6])),
        ("all_wrong", batch([0.0, 0.0], [0, 0], [5, 6])),
        ("constant_groups", batch([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [5, 6, 5, 6])),
    ],
)
def test_each_cause_has_its_name(cause: str, example: RolloutBatch) -> None:
    assert why_empty(example, status_by_contrast(example, 0))[0] == cause


@pytest.mark.parametrize("status", [GroupStatus.NON_FINITE, GroupStatus.NOT_CAPTURED])
def test_what_went_wrong_comes_before_what_the_rewards_say(status: GroupStatus) -> None:
    example = batch([1.0, 0.0], [0, 0], [5, 6])
    assert why_empty(example, torch.tensor([int(status)]))[0] == status.name.lower()


def test_a_run_says_it_once_and_every_file_has_it(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text("def never(response, item):\n    return 0.0\n")
    display = Recorded()
    config = small.config(
        tmp_path,
        f"reward.path={tmp_path / 'never.py'}:never",
        "trainer.influence_trace.enable=true",
        "trainer.total_steps=3",
    )
    run = open_run(train(config, display).run_dir)
    said = [text for text in display.messages if "has no rows" in text]
    assert len(said) == 1 and "reward 0" in said[0] and "too hard" in said[0]
    assert all("too hard" in run.step("influence_trace", step).meta["empty"] for step in (1, 2, 3))
