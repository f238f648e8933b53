"""The instruments of a verl job in its driver: files of the run, plans of a step, and the tables of all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.algorithms import advantage, advantage_names
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth
from gradtrace.instruments.contract import Samples, StepSize, Table, TrainingRun
from gradtrace.instruments.steps import Reporters
from gradtrace.integrations.verl import PREFIX
from gradtrace.integrations.verl.settings import SECTION, VerlSettings, sections_for
from gradtrace.integrations.verl.tables import FOLDER, clear_tables, read_tables
from gradtrace.metrics import GENERATED
from gradtrace.tasks.base import Prompt, task_class
from gradtrace.trace.files import atomic_write
from gradtrace.trace.run_files import DRIVER_LOCK, RunFiles
from gradtrace.trace.token_text import TokenBytes

if TYPE_CHECKING:
    from gradtrace.integrations.verl.driver.samples import JudgedSamples

PENDING = "pending_metrics.json"


@dataclass(frozen=True)
class VerlTask:
    name: str
    truth: Truth


class VerlRun(TrainingRun):
    """What reporters may ask of a verl job."""

    prefix = SECTION

    def __init__(
        self, trainer: Any, settings: VerlSettings, cannot: dict[str, str], report: Callable[[str], None]
    ) -> None:
        self.trainer = trainer
        self.config = config = trainer.config
        self.settings = settings
        self.cannot = cannot
        self.report = report
        self.task = VerlTask(settings.task, task_class(settings.task).truth)
        self.tokenizer = trainer.tokenizer
        self.seed = int(config.data.get("seed") or 0)
        name = str(config.algorithm.adv_estimator)
        ours = name.startswith(PREFIX) and name.removeprefix(PREFIX) in advantage_names()
        name, options = (name.removeprefix(PREFIX), settings.advantage_options) if ours else ("grpo", {})
        self.estimator = advantage(name, **options)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.step_size = StepSize(
            config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n, config.data.max_response_length
        )

    @cached_property
    def actor(self) -> Any:
        from verl.utils.config import omega_conf_to_dataclass

        return omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)

    def token_weights(self, mask: Tensor) -> Tensor:
        from gradtrace.integrations.verl.rank.losses import batch_weights

        return batch_weights(mask, self.actor)

    def held_out(self, count: int, key: str, files: Sequence[str] = (), unreported: bool = False) -> list[Prompt]:
        from gradtrace.integrations.verl.driver.samples import PromptFiles

        if unreported and not files and self.config.trainer.test_freq > 0:
            self.report(
                f"{key}: its prompts are those of data.val_files, which verl reports on as well: what it reports is "
                f"then not held out. Name other ones with +{key}=[FILE.parquet]."
            )
        prompts = PromptFiles(self.trainer).read(files, count)
        if not prompts:
            raise GradtraceError(f"{key}={list(files) or self.config.data.val_files}: there are no prompts in it.")
        if not unreported and len(prompts) < count:
            self.report(f"{key}={count}: data.val_files has {len(prompts)}, and all are used.")
        return prompts

    def ask(self, name: str, question: Any) -> Table:
        import ray

        from gradtrace.integrations.verl.rank.steps import answer_on_worker

        given = ray.put(question)
        workers = self.trainer.actor_rollout_wg.workers
        answers: list[Table] = ray.get([w.__ray_call__.remote(answer_on_worker, name, given) for w in workers])
        return Table.joined(answers)


class DriverSteps(Reporters):
    def __init__(self, run: TrainingRun, settings: VerlSettings, ranks: int, temperature: float) -> None:
        self.files = RunFiles(settings.run_dir, role=DRIVER_LOCK)
        self.files.place_traces(settings.trace_dir)
        run.report = self.files.messages.telling(run.report)
        self.ranks = ranks
        meta = {"task": settings.task, "temperature": temperature}
        sections = sections_for(settings, run.cannot)
        super().__init__(run, sections, self.files.traces, meta, run.task.truth)
        if settings.kinds:
            self.files.write_token_bytes(TokenBytes.from_tokenizer(run.tokenizer))
        self.folder = self.files.traces.absolute() / FOLDER
        """Where ranks leave their tables."""
        self.findings = self.watch(Path(settings.run_dir))
        self._waiting: dict[str, JudgedSamples] = {}
        self._wanted: dict[str, Samples] = {}
        self._batch: RolloutBatch | None = None
        """The rollout of the step whose metrics come next."""

    def start(self, last_step: int) -> None:
        """The run begins, or goes on from the checkpoint of `last_step`: what is later is void."""
        self.files.truncate_after(last_step)
        self._recover_metrics(last_step)
        self.findings.start(last_step)
        super().start(last_step)
        clear_tables(self.folder)

    def finish(self, finished: bool) -> None:
        """The job ends."""
        self.close()
        self.files.close(finished)

    # ------------------------------------------------------------ what is sampled beside a rollout

    def submit(self, trainer: Any, step: int) -> None:
        """The training prompts of a step that ends in an update have been handed to the replicas."""
        self._wanted, self._waiting = self.samples(step), {}
        for name, wanted in self._wanted.items():
            if wanted.judged:
                from gradtrace.integrations.verl.driver.samples import JudgedSamples

                self._waiting[name] = JudgedSamples(trainer, name, wanted, step)

    def collect(self, step: int, sample: Callable[[Samples, int], RolloutBatch]) -> int:
        """All training responses have arrived; wait for ours, and `sample` what is not judged. Returns how many are
        missing."""
        missing = 0
        for name, waiting in self._waiting.items():
            begin = time.perf_counter()
            missing += waiting.wait()
            self.sampling[name] = time.perf_counter() - begin
        for name, wanted in self._wanted.items():
            if name not in self._waiting:
                self._sample(name, step, partial(sample, wanted, step))
        return missing

    def _sample(self, name: str, step: int, sample: Callable[[], RolloutBatch]) -> None:
        begin = time.perf_counter()
        try:
            self.sampled[name] = sample()
        except Exception as error:  # whatever a rollout engine says; a dead one is the watch's business
            self.records[name].failed(step, f"its prompts could not be sampled: {type(error).__name__}: {error}")
        self.sampling[name] = time.perf_counter() - begin

    def take(self) -> None:
        """Rewards can be computed now."""
        for name, waiting in self._waiting.items():
            self.sampled[name] = waiting.take()
        self._waiting, self._wanted = {}, {}

    # ------------------------------------------------------------ the update

    def record(self, batch: RolloutBatch, step: int, observed: bool, counts_rollouts: bool = True) -> dict[str, float]:
        """The update is over: read the ranks' tables, where they have `observed`, and write the files. Returns metrics;
        `counts_rollouts`: `batch` is all that verl has sampled for the step."""
        self._batch = batch
        metrics = self.write(batch, step, read_tables(self.folder, step, self.ranks) if observed else {})
        if generated := metrics.pop(GENERATED, 0.0):
            metrics |= {GENERATED: generated + len(batch)} if counts_rollouts else {}
        return metrics

    # ------------------------------------------------------------ metrics

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        line = numbers(metrics)
        batch, self._batch = self._batch, None
        if batch is None:
            self.findings.remember(step, line)
        else:
            line |= self.findings.see(step, batch, line)
        self.files.log(step, line)

    def before_checkpoint(self, step: int, metrics: dict[str, Any]) -> None:
        """verl saves a step before it logs it. Should the run die in between, it goes on after this step, whose
        traces and metrics must then exist."""
        self.flush()
        line = json.dumps({"step": step, **numbers(metrics)})
        atomic_write(self.files.path / PENDING, line.encode(), fsync=True)

    def _recover_metrics(self, last_step: int) -> None:
        path = self.files.path / PENDING
        if not path.is_file():
            return
        pending = json.loads(path.read_text())
        if pending["step"] != last_step:
            return
        lines = (self.files.path / "metrics.jsonl").read_text().splitlines()
        if not any(json.loads(line)["step"] == last_step for line in lines):
            self.files.log(pending.pop("step"), pending)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Only those metrics that are numbers: verl mixes in tables and strings."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0:
            found[name] = float(value)
    return found
