"""What a person sees: live numbers in a terminal, plain lines without one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradtrace.training.run import train
from gradtrace.training.terminal import PlainDisplay, RichDisplay, draw_curve, samples_table
from tests.training.small import config, random_batch


def plain() -> tuple[PlainDisplay, io.StringIO]:
    out = io.StringIO()
    return PlainDisplay(Console(file=out, width=100, force_terminal=False)), out


def test_run_without_a_terminal_prints_plain_lines(tmp_path: Path) -> None:
    display, out = plain()
    run_dir = train(config(tmp_path), display).run_dir
    text = out.getvalue()
    assert "\x1b" not in text
    assert all(f"step {step}/4  reward" in text for step in (1, 2, 3, 4))
    assert "mean reward, steps 1–4" in text and f"gradtrace view {run_dir}" in text


def test_run_in_a_terminal_shows_progress_and_samples(tmp_path: Path) -> None:
    out = io.StringIO()
    display = RichDisplay(Console(file=out, width=120, force_terminal=True))
    train(config(tmp_path, "trainer.samples_every=2"), display)
    text = out.getvalue()
    assert "reward" in text and "entropy" in text and "step 2: sample responses" in text


def test_long_run_prints_about_forty_lines() -> None:
    display, out = plain()
    display.begin(0, 1000)
    for step in range(1, 1001):
        display.step(step, {"critic/rewards/mean": 0.5})
    assert 40 <= out.getvalue().count("\n") <= 45


def test_markup_and_control_characters_of_a_model_are_shown_not_obeyed() -> None:
    batch = random_batch(groups=1, n=2)
    texts = ["[bold]not bold[/bold]", "\x1b[31mred\x1b[0m"]
    batch = batch.replace(texts=texts, items=[{"prompt": "[link=x]p"}], rewards=torch.tensor([1.0, 0.0]), kept=None)
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=True).print(samples_table(1, batch))
    assert "[bold]not bold[/bold]" in out.getvalue() and "[link=x]p" in out.getvalue()
    assert "\x1b[31mred" not in out.getvalue()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=300), st.integers(12, 120))
def test_curve_fits_its_width_and_tops_out_at_its_maximum(values: list[float], width: int) -> None:
    lines = draw_curve(values, width)
    assert len(lines) == 8 and all(len(line) <= width for line in lines)


def test_curve_shows_the_shape() -> None:
    lines = draw_curve([0.0, 0.5, 1.0], width=40)
    bars = [line.split("│")[1] for line in lines]
    heights = [sum(bar[column : column + 1] == "█" for bar in bars) for column in (0, 2, 5)]
    assert heights == [0, 4, 8]


def test_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    display, out = plain()
    display.end(tmp_path, [(1, 0.1), (2, 0.2)], finished=False)
    assert f"gradtrace train resume={tmp_path}" in out.getvalue()


@pytest.mark.parametrize("width", [40, 200])
def test_closing_lines_fit_narrow_terminals(width: int) -> None:
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=width))
    display.end(Path("runs/x"), [(i, i / 10) for i in range(10)], finished=True)
    assert max(len(line) for line in out.getvalue().splitlines() if "│" in line) <= max(40, min(width, 80))
