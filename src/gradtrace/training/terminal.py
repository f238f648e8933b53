"""What a person sees while a run is going: a live line and sample responses, or plain lines without a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradtrace.batch import RolloutBatch
from gradtrace.terminal import command, say

SAMPLES = 6
PLAIN_LINES = 40
"""Without a terminal, about this many step lines for a whole run."""
EIGHTHS = " ▁▂▃▄▅▆▇█"


class Display:
    """What a run tells as it goes. This one shows nothing: for code that trains without anybody watching."""

    def message(self, text: str) -> None: ...

    def warm_start(self, stage: str, step: int, accuracy: float) -> None: ...

    def begin(self, last_step: int, total_steps: int) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def samples(self, step: int, batch: RolloutBatch) -> None: ...

    def end(self, run_dir: Path, rewards: list[tuple[int, float]], finished: bool) -> None: ...


def open_display() -> Display:
    console = Console()
    return RichDisplay(console) if console.is_terminal else PlainDisplay(console)


SilentDisplay = Display


class PlainDisplay(Display):
    """One line per step, or per few steps of a long run. Without samples: a table is for eyes, not for a job's log."""

    widest = 80
    """Columns of the curve at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total_steps = 0

    def message(self, text: str) -> None:
        say(self.console, text)

    def warm_start(self, stage: str, step: int, accuracy: float) -> None:
        if step % 100 == 0 or stage != "clean chains":
            self.message(f"warm start, {stage}: step {step}, accuracy {accuracy:.2f}")

    def begin(self, last_step: int, total_steps: int) -> None:
        self.total_steps = total_steps

    def step(self, step: int, metrics: dict[str, float]) -> None:
        validated = validation_text(metrics)
        every = max(1, self.total_steps // PLAIN_LINES)
        if step % every == 0 or step in (1, self.total_steps) or validated:
            self.message(f"step {step}/{self.total_steps}  {step_text(metrics)}{validated}")

    def end(self, run_dir: Path, rewards: list[tuple[int, float]], finished: bool) -> None:
        for line in closing_lines(run_dir, rewards, finished, width=min(self.console.width, self.widest)):
            self.message(line)


class RichDisplay(PlainDisplay):
    """A progress bar with the numbers that matter, and a table of sample responses now and then."""

    widest = 100

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.update: Callable[..., None] | None = None
        """Changes the bar that is shown."""
        self.hide: Callable[[], None] = lambda: None

    def warm_start(self, stage: str, step: int, accuracy: float) -> None:
        text = "[bold]warm start[/bold] {task.description}"
        update = self.update or self._show(progress.TextColumn(text), total=None)
        update(description=f"{stage}  step {step}  accuracy {accuracy:.2f}")

    def begin(self, last_step: int, total_steps: int) -> None:
        self._show(
            progress.TextColumn("[bold]step[/bold]"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.description}"),
            progress.TimeRemainingColumn(),
            total=total_steps,
            completed=last_step,
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        assert self.update is not None
        self.update(completed=step, description=step_text(metrics))
        if validated := validation_text(metrics):
            self.message(f"step {step}{validated}")

    def samples(self, step: int, batch: RolloutBatch) -> None:
        self.console.print(samples_table(step, batch))

    def end(self, run_dir: Path, rewards: list[tuple[int, float]], finished: bool) -> None:
        self.hide()
        super().end(run_dir, rewards, finished)

    def _show(self, *columns: progress.ProgressColumn, **task: Any) -> Callable[..., None]:
        """Show this bar instead of the one before."""
        self.hide()
        bar = progress.Progress(*columns, console=self.console, transient=True)
        bar.start()
        self.update, self.hide = partial(bar.update, bar.add_task("", **task)), bar.stop
        return self.update


def step_text(metrics: dict[str, float]) -> str:
    shown = [
        ("reward", "critic/rewards/mean", "{:.3f}"),
        ("entropy", "actor/entropy", "{:.3f}"),
        ("length", "response_length/mean", "{:.1f}"),
        ("tokens/s", "perf/throughput", "{:,.0f}"),
    ]
    return "  ".join(f"{label} {form.format(metrics[name])}" for label, name, form in shown if name in metrics)


def validation_text(metrics: dict[str, float]) -> str:
    found = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    return "".join(f"  {name.removeprefix('val-core/')} {value:.3f}" for name, value in found.items())


def samples_table(step: int, batch: RolloutBatch) -> Table:
    """The best and the worst response of a few prompts."""
    rewards, texts = batch.need("rewards"), batch.texts or [""] * len(batch)
    table = Table(title=f"step {step}: sample responses", title_justify="left", expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("response", ratio=3)
    table.add_column("reward", justify="right")
    for group in range(min(SAMPLES // 2, len(batch.prompts))):
        rows = (batch.group == group).nonzero().squeeze(-1)
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        for row in dict.fromkeys((int(best), int(worst))):
            prompt = str(batch.items[group].get("prompt", "")) if batch.items else ""
            cells = [
                Text(_tail(prompt)),
                Text(_tail(texts[row])),
                Text(f"{float(rewards[row]):.2f}"),
            ]
            table.add_row(*cells)
    return table


def _tail(text: str, limit: int = 160) -> str:
    """The end of a long text, where the answer is. A model's control characters must not reach the terminal."""
    text = "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)
    return text if len(text) <= limit else f"…{text[-limit:]}"


def closing_lines(run_dir: Path, rewards: list[tuple[int, float]], finished: bool, width: int) -> list[str]:
    lines = []
    if len(rewards) > 1:
        lines += [
            "",
            f"mean reward, steps {rewards[0][0]}–{rewards[-1][0]}",
            *draw_curve([r for _, r in rewards], width),
        ]
    lines.append("")
    if finished:
        lines += [
            f"The run is in {run_dir}, its policy in {run_dir / 'policy'}. Look at it with",
            f"  {command()} view {run_dir}",
            f"  {command()} trace show {run_dir}",
        ]
    else:
        lines += [f"Stopped and saved. Continue with: {command()} train resume={run_dir}"]
    return lines


def draw_curve(values: list[float], width: int, height: int = 8) -> list[str]:
    """Lines of a bar plot with its scale on the left, from the values in order; each bar a mean where they crowd."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0  # shares look alike from run to run
    span = (high - low) or 1.0
    columns = _resample(values, max(1, min(width - 8, 2 * len(values))))
    levels = [round((value - low) / span * height * 8) for value in columns]
    lines = []
    for row in reversed(range(height)):
        label = f"{low + span * (row + 1) / height:6.2f} " if row % 2 else " " * 7
        cells = "".join(EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels)
        lines.append(f"{label}│{cells}")
    return lines


def _resample(values: list[float], count: int) -> list[float]:
    """`count` values: means of neighbours, or repeats."""
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    parts = [values[a : max(b, a + 1)] for a, b in itertools.pairwise(edges)]
    return [sum(part) / len(part) for part in parts if part]
