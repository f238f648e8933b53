"""From a configuration to a finished run on disk."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from gradtrace.config.loader import run_of, to_yaml
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.trace.reader import read_run
from gradtrace.trace.run_files import RunFiles, acquire_lock, nothing_left_on_error, release_lock
from gradtrace.training.checkpoint import Checkpoints
from gradtrace.training.components import build_components
from gradtrace.training.host import open_instruments
from gradtrace.training.logger import open_trackers
from gradtrace.training.loop import Trainer
from gradtrace.training.state import load_observer_state, load_state
from gradtrace.training.terminal import Display, SilentDisplay


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    run_dir: Path
    last_step: int
    finished: bool
    """False if it was interrupted (and saved)."""


def train(config: Config, display: Display | None = None) -> TrainingResult:
    """Make a run, or continue the one that `config.resume` names."""
    display = display or SilentDisplay()
    with contextlib.ExitStack() as until_the_end:
        checkpoint = None
        if config.resume:
            run_dir, checkpoint = until_the_end.enter_context(resumed(config.resume))
        components = build_components(config, checkpoint, display.warm_start)
        last_step = load_state(checkpoint, components) if checkpoint is not None else 0
        if not config.resume:
            run_dir = new_run_dir(config)

        with nothing_left_on_error(run_dir, is_new=not config.resume):
            files = until_the_end.enter_context(RunFiles(run_dir))
            files.place_traces(config.trainer.trace_dir)
            files.write_config(to_yaml(dataclasses.replace(config, resume="")))
            trackers = open_trackers(config.trainer, run_dir, dataclasses.asdict(config))
            report = files.messages.telling(display.message)
            steps = open_instruments(components, files, report)
            findings = steps.watch(files.path)
        display.begin(last_step, config.trainer.total_steps)
        if checkpoint is not None:
            steps.load_state(load_observer_state(checkpoint))
        trainer = Trainer(components, files, display, steps, trackers, findings)
        reached = trainer.fit(last_step)
        outcome = TrainingResult(run_dir, reached, reached == config.trainer.total_steps)

        rewards = reward_curve(run_dir)
        files.write_summary(
            {
                "steps": reached,
                "finished": outcome.finished,
                "parameters": sum(p.numel() for p in components.policy.model.parameters()),
                "final_reward": rewards[-1][1] if rewards else None,
            }
        )
    display.end(run_dir, rewards, outcome.finished)
    return outcome


@contextlib.contextmanager
def resumed(resume: str) -> Iterator[tuple[Path, Path]]:
    """(run, checkpoint to go on from) of `resume=RUN` or `resume=RUN/checkpoints/step_000010`, with its lock."""
    run_dir = run_of(Path(resume))
    acquire_lock(run_dir)
    try:
        checkpoints = Checkpoints(run_dir)
        if Path(resume) != run_dir:
            checkpoints.go_back_to(Path(resume).name)
        checkpoint = checkpoints.latest()
        if checkpoint is None:
            raise GradtraceError(f"resume={resume}: it has no complete checkpoint to continue from.")
        checkpoints.discard_unfinished()
        yield run_dir, checkpoint
    finally:
        release_lock(run_dir)


def new_run_dir(config: Config) -> Path:
    """runs/NAME, or runs/NAME_2, _3 … if that exists: a run never overwrites another."""
    name = config.trainer.name or Path(config.recipe).stem
    runs = Path(config.trainer.runs_dir)
    number = 1
    while True:
        folder = runs / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise GradtraceError(f"trainer.runs_dir={runs}: {folder} cannot be made: {error.strerror}.") from None
        else:
            return folder


def reward_curve(run_dir: Path) -> list[tuple[int, float]]:
    """(step, mean reward) of every step so far."""
    records, _ = read_run(run_dir).metrics()
    return [(r["step"], r["critic/rewards/mean"]) for r in records if "critic/rewards/mean" in r]
