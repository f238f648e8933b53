"""`gradtrace.record`: a step of a person's own loop, on disk for the viewer and every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.instruments import own_loop


def step(**other: Any) -> dict[str, Any]:
    """Two prompts with two responses each, of different lengths."""
    return {
        "prompts": [[1, 2], [3]],
        "responses": [[4, 5], [6], [7, 4, 5], [6, 6]],
        "rewards": [1.0, 0.0, 1.0, 0.0],
        "log_probs": [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6], [-0.7, -0.8]],
        "entropies": [[0.1, 0.2], [0.3], [0.4, 0.5, 0.6], [0.7, 0.8]],
        **other,
    }


def close(run: Path) -> None:
    opened = own_loop._runs.pop(run.absolute())
    for record in opened.records.values():
        record.close()
    opened.files.close()


def test_lists_of_different_lengths_are_stored_as_they_are(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for number in (1, 2):
        gradtrace.record(run_dir, number, **step(advantages=[1, -1, 1, -1], tokenizer=list("abcdefgh")))
    close(run_dir)
    run = gradtrace.open_run(run_dir)
    assert run.verify() == [] and run.steps("entropy_trace") == [1, 2]
    found = run.step("entropy_trace", 2)
    assert found["group"].tolist() == [0, 0, 1, 1] and found["length"].tolist() == [2, 1, 3, 2]
    assert found.tokens(2)["entropy"] == pytest.approx([0.4, 0.5, 0.6])
    assert found["advantage"].tolist() == [1, -1, 1, -1] and found["accepted"].tolist() == [True, False] * 2
    assert run.metrics()[0][1]["critic/rewards/mean"] == 0.5


def test_padded_tensors_are_taken_as_well(tmp_path: Path) -> None:
    ids = torch.tensor([[4, 5], [6, 6], [7, 4], [6, 5]])
    values = torch.rand(4, 2)
    gradtrace.record(tmp_path / "run", 1, **step(responses=ids, log_probs=-values, entropies=values))
    close(tmp_path / "run")
    found = gradtrace.open_run(tmp_path / "run").step("entropy_trace", 1)
    assert np.allclose(found["entropy"], values.flatten())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": [1.0, 0.0]}, "rewards must be 4 finite numbers"),
        ({"rewards": [1.0, 0.0, float("nan"), 0.0]}, "rewards must be 4 finite numbers"),
        ({"log_probs": [[-0.1], [-0.3], [-0.4] * 3, [-0.7] * 2]}, "row 0 has 1 numbers for 2 tokens"),
        ({"entropies": [[0.1, 0.2]]}, "entropies has 1 rows for 4 responses"),
        ({"prompts": [[1], [2], [3]]}, "cannot be dealt evenly to 3 prompts"),
        ({"group": [0, 0, 1, 2]}, "group must be 4 numbers from 0 to 1"),
        ({"responses": [[4], [], [5], [6]]}, "the shortest of 0 tokens"),
        ({"log_probs": None, "entropies": None}, "nothing else to show"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(change: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=words):
        gradtrace.record(tmp_path / "run", 1, **step(**change))
    assert not (tmp_path / "run").exists()
