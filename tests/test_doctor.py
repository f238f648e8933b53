"""`gradtrace doctor` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace.cli import main
from tests.attribution.models import tiny_model


@pytest.fixture
def saved_model(tmp_path: Path) -> str:
    tiny_model("llama").float().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_versions_are_shown_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "torch" in shown and "threads" in shown and "device" in shown


def test_a_healthy_model(saved_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", saved_model]) == 0
    shown = capsys.readouterr().out
    assert "healthy" in shown and "14 selected layers" in shown and "memory" in shown


def test_a_filter_that_matches_nothing_is_a_problem(
    saved_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", saved_model, "--filter", "c_attn"]) == 1
    assert "matches none" in capsys.readouterr().out


def test_a_missing_model_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is no model at") and error.count("\n") == 1
