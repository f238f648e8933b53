"""`gradtrace train engine=verl`: prepares a run, starts verl's `main_ppo`, and starts it again when a worker dies."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from gradtrace.config.loader import run_of, to_yaml
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError, install
from gradtrace.instruments.registry import enabled
from gradtrace.integrations.verl.cpu.fork_server import fork_server
from gradtrace.integrations.verl.cpu.forked_worker import ADDRESS, PYTHON
from gradtrace.integrations.verl.driver.watch import FILE, describe, read_status
from gradtrace.integrations.verl.launch.checkpoints import export_policy, latest_step
from gradtrace.integrations.verl.launch.data import write_prompts
from gradtrace.integrations.verl.launch.translate import Translation, held_out_file, prompt_files, translate
from gradtrace.tasks.base import Task
from gradtrace.terminal import command
from gradtrace.trace.reader import read_run
from gradtrace.trace.run_files import RunFiles, nothing_left_on_error, refuse_driver
from gradtrace.training.components import build_reward, build_task
from gradtrace.training.logger import tracker_id
from gradtrace.training.run import TrainingResult, new_run_dir, reward_curve
from gradtrace.training.terminal import Display, SilentDisplay

LOG = "verl.log"
POLL_SECONDS = 0.3
START_SECONDS = 10.0
"""At most so long without a line before the first step."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What Ray colours its lines with."""
LONGEST_LINE = 160
LOG_LINES = 15
"""Lines of verl's output that are shown when it could not even start."""


def train(config: Config, display: Display | None = None) -> TrainingResult:
    """Make a run, or continue the one that `config.resume` names."""
    display = display or SilentDisplay()
    check_installed()
    if config.resume and latest_step(run_of(Path(config.resume))) is None:
        raise GradtraceError(f"resume={config.resume}: it has no complete checkpoint to continue from.")
    run_dir = (run_of(Path(config.resume)) if config.resume else new_run_dir(config)).absolute()
    with contextlib.ExitStack() as until_the_end:
        with nothing_left_on_error(run_dir, is_new=not config.resume):
            files = until_the_end.enter_context(RunFiles(run_dir))
            refuse_driver(run_dir)
            translation = prepare(config, files, display)
        display.begin(latest_step(run_dir) or 0, config.trainer.total_steps)
        with (run_dir / LOG).open("ab") as log, prepared_workers(config, translation, log) as ready:
            finished = run_with_restarts(config, ready, run_dir, display, files.messages.telling(display.message))
        rewards = reward_curve(run_dir)
        reached = rewards[-1][0] if rewards else 0
        if finished:
            export_policy(run_dir)
        last = rewards[-1][1] if rewards else None
        files.write_summary({"steps": reached, "finished": finished, "final_reward": last})
    display.end(run_dir, rewards, finished)
    return TrainingResult(run_dir, reached, finished)


def show(config: Config) -> str:
    """Print, for `--cfg`, our configuration as it resolves, and what verl will be told."""
    run_dir = Path(config.trainer.runs_dir) / (config.trainer.name or Path(config.recipe).stem)
    model = config.model.path or "(made by the task's warm start)"
    translation = translate(config, run_dir.absolute(), model, uses_cpu(config))
    return f"{to_yaml(config)}# What verl is told:\n{translation.to_yaml()}"


def check_installed() -> None:
    if importlib.util.find_spec("verl") is None:
        raise GradtraceError(f"engine=verl needs verl: {install('verl')} (see docs/verl.md)")


def uses_cpu(config: Config) -> bool:
    import torch

    if config.model.device == "cuda" or config.cluster.ray_address:
        return config.model.device == "cpu"  # the machines of a cluster are not this one
    return config.model.device == "cpu" or not torch.cuda.is_available()


def prepare(config: Config, files: RunFiles, display: Display) -> Translation:
    """The run's files before its first step: configuration, data, translation."""
    run_dir = files.path
    # Before the task, whose warm start may take a while: what verl cannot do is said at once.
    translate(config, run_dir, "", uses_cpu(config))
    model, task = build_task(config, display.warm_start)
    if (reward := build_reward(config.reward)) is not None:
        reward.check(task.known_items())
    files.write_config(to_yaml(dataclasses.replace(config, resume="")))
    # By itself: beside a model's config.json transformers loads the tokenizer class of that model's family.
    task.tokenizer.save_pretrained(run_dir / "tokenizer")
    if not config.resume:
        rollouts = 2 if config.algorithm.dynamic_sampling.enable else 1  # verl begins again when they run out
        count = rollouts * config.trainer.total_steps * config.data.train_batch_size
        write_prompts(run_dir / "data" / "train.parquet", task.next_prompts(count), task)
        validation = task.validation_prompts(held_out_prompts(config)) or task.next_prompts(1)
        write_prompts(run_dir / "data" / "validation.parquet", validation, task)
    write_unreported(config, run_dir, task)
    path = Path(model)
    if "wandb" in config.trainer.logger:
        tracker = dataclasses.replace(config.trainer.wandb, id=tracker_id(run_dir, config.trainer.wandb.id))
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, wandb=tracker))
    translation = translate(config, run_dir, str(path.absolute()) if path.exists() else str(model), uses_cpu(config))
    (run_dir / "verl_config.yaml").write_text(translation.to_yaml())
    return translation


def held_out_prompts(config: Config) -> int:
    """How many validation and instruments need, which may be the same ones."""
    trainer = config.trainer
    wanted = [one.held_out(getattr(trainer, one.key)) for one in enabled(trainer).values() if not one.unreported]
    return max(trainer.validation.prompts, *wanted, 0)


def write_unreported(config: Config, run_dir: Path, task: Task) -> None:
    """The prompts of instruments that need some which validation does not report on, or name files of their own."""
    reported = config.trainer.validation
    skipped = reported.prompts if reported.every else 0
    for one in enabled(config.trainer).values():
        path, section = run_dir / held_out_file(one), getattr(config.trainer, one.key)
        for name in prompt_files(config, one) if not path.is_file() else ():
            key, files = f"trainer.{one.key}.{name}", list(getattr(section, name))
            prompts = (
                task.read_prompts(files, key)
                if files
                else task.validation_prompts(skipped + one.held_out(section))[skipped:]
            )
            if not prompts:
                raise GradtraceError(
                    f"trainer.{one.key} needs validation prompts, and none are left: the task has no more than the "
                    f"{skipped} that trainer.validation.prompts={reported.prompts} reports on. Raise "
                    "data.validation_fraction, lower trainer.validation.prompts, or name files of your own: "
                    f"{key}=[FILE]."
                )
            write_prompts(path, prompts, task)


@contextlib.contextmanager
def prepared_workers(config: Config, translation: Translation, log: IO[bytes]) -> Iterator[Translation]:
    """The translation that a job is started with. On CPU its processes are forks of one, which lives through all
    restarts."""
    if config.cluster.ray_address or not uses_cpu(config):
        yield translation
        return
    with fork_server(translation.environment, log) as (settings, environment):
        yield dataclasses.replace(
            translation,
            settings={**settings, **translation.settings},
            environment={**translation.environment, **environment},
        )


def run_with_restarts(
    config: Config,
    translation: Translation,
    run_dir: Path,
    display: Display,
    report: Callable[[str], None] | None = None,
) -> bool:
    """True when all steps are made; False if the user stopped it. `report`: told of every restart, beside the log."""
    report = report or display.message
    failures = 0
    while True:
        (run_dir / FILE).unlink(missing_ok=True)
        try:
            code = run_once(translation, run_dir, display)
        except KeyboardInterrupt:
            display.message(f"Stopped. Continue with: {command()} train resume={run_dir}")
            return False
        if code == 0:
            return True
        status = read_status(run_dir)
        happened = describe(status)
        failures += 1
        if not status.workers and not status.dead_worker:
            raise GradtraceError(f"verl could not start; the end of {run_dir / LOG}:\n{tail(run_dir / LOG)}")
        if failures > config.cluster.max_failures:
            raise GradtraceError(
                f"{happened}. That was failure {failures}, and cluster.max_failures={config.cluster.max_failures}. "
                f"See {run_dir / LOG}; continue with: {command()} train resume={run_dir}"
            )
        step = latest_step(run_dir)
        where = f"the checkpoint of step {step}" if step else "the start: there is no complete checkpoint yet"
        message = f"{happened}. Restart {failures} of at most {config.cluster.max_failures}, from {where}."
        report(message)
        with (run_dir / LOG).open("a") as log:
            log.write(f"gradtrace: {message}\n")


def run_once(translation: Translation, run_dir: Path, display: Display) -> int:
    """Run verl and return its exit code. Steps are shown as they come into metrics.jsonl."""
    python = PYTHON if ADDRESS in translation.environment else (sys.executable,)
    command = [
        *(*python, "-W", "ignore", "-m", "verl.trainer.main_ppo"),
        *translation.overrides(),
        *(f"hydra.run.dir={run_dir / 'hydra'}", "hydra.output_subdir=null"),
    ]
    shown = StepLines(run_dir, display.step)
    start = StartUp(run_dir, display.message)
    with (run_dir / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **translation.environment}
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                shown.show()
                start.tell(is_over=shown.has_shown)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    shown.show()
    return process.returncode


class StartUp:
    """Says what verl is doing until its first step, which may take minutes: every phase when it begins, and in between
    the last line of its log."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.say = say
        self.began = self.told = time.monotonic()
        self.phase = ""
        say(f"verl starts: Ray, then its workers and the model. Its log is {run_dir / LOG}")

    def tell(self, is_over: bool) -> None:
        """A line, if there is something new to say. `is_over`: steps are shown, which say more."""
        now, status = time.monotonic(), read_status(self.run_dir)
        phase = f"step {status.step}, {status.phase}" if status.workers else ""
        if is_over or (phase == self.phase and now - self.told < START_SECONDS):
            return
        self.phase, self.told = phase, now
        last = COLOURS.sub("", "".join(tail(self.run_dir / LOG).splitlines()[-1:]))
        doing = phase or last[:LONGEST_LINE] or "no output yet"
        self.say(f"verl, {now - self.began:.0f} s: {doing}")


class StepLines:
    """Reads new lines of metrics.jsonl as they are written."""

    def __init__(self, run_dir: Path, show: Callable[[int, dict[str, Any]], None]) -> None:
        """Lines that are there were shown in an earlier life of this run."""
        self.run = read_run(run_dir)
        self.display = show
        records, self.place = self.run.metrics()
        self.last = max((record["step"] for record in records), default=0)
        self.has_shown = False

    def show(self) -> None:
        records, self.place = self.run.metrics(self.place)
        for record in records:
            if record["step"] > self.last and "critic/rewards/mean" in record:
                self.last = record["step"]
                self.has_shown = True
                self.display(self.last, record)


def tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return "\n".join(lines[-LOG_LINES:])
