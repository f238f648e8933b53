"""`gradtrace doctor --device`: the self-check that a person with a GPU runs first, here on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradtrace.cli import main
from gradtrace.commands.doctor import device as check
from gradtrace.commands.doctor import equality
from gradtrace.tasks.arithmetic import build_tokenizer
from tests.attribution.models import tiny_model


def test_it_holds_scores_speed_and_memory_against_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer()
    model = tiny_model().float()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setitem(check.SIZES, "cpu", (2, 6))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--device", "cpu", "--model", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for word in ("float32", "bf16", "FSDP2 over two processes", "sampler", "update with trace: default", "GiB"):
        assert word in said, word


def test_a_device_with_wrong_numbers_is_found_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = equality.SmallCase.scores

    def broken(self: equality.SmallCase, config: object, device: torch.device, *more: object, **half: bool):
        found = honest(self, config, device, *more, **half)  # type: ignore[arg-type]
        return found.flip(0) if half.get("half") else found

    monkeypatch.setattr(equality.SmallCase, "scores", broken)
    monkeypatch.setattr(check, "shards_agree", lambda device: 1.0)
    assert main(["doctor", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "in bf16 on cpu are not those of the CPU" in said and "in float32 on cpu" not in said


def test_without_a_model_it_claims_nothing_about_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "agreements", lambda device: [])
    monkeypatch.setattr(check, "shards_agree", lambda device: 1.0)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "scores are as expected; --model" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda"]) != 0
    assert "CPU build" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["credit=tail"], ["--tokens", "512"]])
def test_it_takes_no_run_and_no_knobs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", *words]) != 0
    assert "--model at most" in capsys.readouterr().err
