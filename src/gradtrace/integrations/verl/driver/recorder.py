"""The files of a run on verl, written by the driver: traces of all ranks joined, metrics, and the run's state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.shares import BlameRecord
from gradtrace.instruments.columns import Truth
from gradtrace.instruments.entropy_probe.columns import ProbeRecord
from gradtrace.instruments.entropy_trace.instrument import EntropyTrace
from gradtrace.instruments.findings.watch import Findings
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.mismatch import NOTABLE, sampler_gap
from gradtrace.instruments.observer import RunTraces
from gradtrace.integrations.verl.options import VerlOptions
from gradtrace.integrations.verl.parts import (
    BlamePart,
    ProbePart,
    clear_rank_files,
    join_parts,
    joined_blame,
    joined_probe,
    read_rank_files,
)
from gradtrace.integrations.verl.told import BlameInputs, MismatchInputs, ProbeInputs, StepLabels
from gradtrace.policy.rollouts import keep_groups
from gradtrace.trace import lock
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import BLAME, ENTROPY_PROBE, ENTROPY_TRACE, INFLUENCE_TRACE, GroupStatus
from gradtrace.trace.token_text import TokenBytes

if TYPE_CHECKING:
    from gradtrace.integrations.verl.driver.probe_sampling import EvaluationSampler

PENDING = "pending_metrics.json"


@dataclass(eq=False)
class PartsRecorder:
    """What the driver tells the ranks before an update, and the file that it makes of their parts after it."""

    on_disk: Any
    parts_dir: Path
    ranks: int

    def __post_init__(self) -> None:
        clear_rank_files(self.parts_dir)


class BlameRecorder(PartsRecorder):
    on_disk: BlameRecord

    def inputs(self, step: int, mini_batch: Tensor) -> BlameInputs:
        """`mini_batch`: long[R], −1 for rows that do not train."""
        return BlameInputs(step, int(mini_batch.max()) + 1, self.on_disk.is_due(step), str(self.parts_dir))

    def record(self, batch: RolloutBatch, step: int, mini_batch: Tensor) -> dict[str, float]:
        """Join the ranks' parts after the update, and write the file. Returns metrics."""
        part = BlamePart.joined(self.parts_dir, step, self.ranks)
        if part.failure:
            self.on_disk.failed(GradtraceError(f"step {step}: {part.failure}"))
        blame = None if part.failure else joined_blame(part, batch, mini_batch)
        return self.on_disk.write(batch, step, blame, part.largest_norm, part.seconds)


class ProbeRecorder(PartsRecorder):
    """The driver's side of a probe: `sample` after the rollout, `inputs` before the update, `record` after it."""

    on_disk: ProbeRecord
    sampler: EvaluationSampler
    """Set when the replicas are there."""
    evaluation: RolloutBatch | None = None

    def sample(self, step: int) -> None:
        self.evaluation = None
        if self.on_disk.is_due(step):
            try:
                self.evaluation = self.sampler.sample(step)
            except Exception as error:  # whatever a rollout engine says; a dead one is the watch's business
                self.on_disk.failed(step, f"E could not be sampled: {type(error).__name__}: {error}")

    def inputs(self, update: RolloutBatch, step: int) -> ProbeInputs | None:
        """What the ranks are told: E without the prompts of this rollout. None if this step is not probed."""
        if self.evaluation is None:
            return None
        self.evaluation = without_prompts(self.evaluation, update.prompts)
        if len(self.evaluation.prompts) < 2:
            self.evaluation = None
            why = "all held-out prompts (data.val_files) are in the rollout as well, or had no answer"
            self.on_disk.failed(step, why)
            return None
        prompts = [self.evaluation.prompts[group] for group in self.evaluation.group.tolist()]
        return ProbeInputs(step, prompts, self.evaluation.response_ids, str(self.parts_dir))

    def record(self, batch: RolloutBatch, rows: Tensor, step: int) -> dict[str, float]:
        """Join the ranks' parts after the update, and write the file. `rows`: long[r], U, ascending. Returns
        metrics."""
        if not self.on_disk.is_due(step):
            return {}
        evaluation, self.evaluation = self.evaluation, None
        probed, seconds = None, 0.0
        if evaluation is not None:
            part = ProbePart.joined(self.parts_dir, step, self.ranks)
            if part.failure:
                self.on_disk.failed(step, part.failure)
            else:
                probed, seconds = joined_probe(part, evaluation, rows), part.seconds
        return self.on_disk.write(batch, step, probed, seconds)


@dataclass(eq=False)
class MismatchRecorder:
    """Which steps measure what sampler and trainer make of the update by disagreeing, and what ranks found."""

    every: int
    parts_dir: Path
    ranks: int
    last: MismatchInputs | None = None

    def inputs(self, batch: RolloutBatch, step: int) -> MismatchInputs | None:
        """None: this step is not measured, since it is not its turn or there is nothing to measure."""
        self.last = None
        gap = sampler_gap(batch) if self.every and step % self.every == 0 else None
        if gap is not None and float(gap.abs().max()) >= NOTABLE:
            self.parts_dir.mkdir(parents=True, exist_ok=True)
            self.last = MismatchInputs(step, str(self.parts_dir))
        return self.last

    def metrics(self) -> dict[str, float]:
        """Of the step that `inputs` was last called for, after its update."""
        if self.last is None:
            return {}
        found = read_rank_files(self.parts_dir, self.last.step, range(self.ranks), "mismatch")
        metrics: dict[str, float] = found[0][1]["metrics"]  # the same on all ranks
        return metrics


class Recorder:
    def __init__(
        self,
        options: VerlOptions,
        tokenizer: Any,
        ranks: int,
        temperature: float,
        truth: Truth,
        report: Callable[[str], None],
    ) -> None:
        self.options = options
        self.files = RunFiles(options.run_dir, role=lock.DRIVER)
        self.files.place_traces(options.trace_dir)
        self.ranks = ranks
        self.report = report = self.files.messages.telling(report)
        meta = {"task": options.task, "temperature": temperature}
        self.traces = traces = RunTraces(self.files, options, meta, truth, report)
        self.entropy: EntropyTrace | None = None
        if options.entropy_trace.enable:
            writer = traces.writer(ENTROPY_TRACE)
            self.entropy = EntropyTrace(writer, options.entropy_trace.write_every, meta, truth)
        self.influence = traces.record(InfluenceRecord) if options.influence_trace.enable else None
        self.probe: ProbeRecorder | None = None
        if options.entropy_probe.every:
            self.probe = ProbeRecorder(traces.record(ProbeRecord), self._parts_of(ENTROPY_PROBE), ranks)
        self.blame: BlameRecorder | None = None
        if options.blame.enable:
            self.blame = BlameRecorder(traces.record(BlameRecord), self._parts_of(BLAME), ranks)
        parts = self.files.traces.absolute() / "mismatch_parts"
        self.mismatch = MismatchRecorder(options.mismatch_every, parts, ranks)
        if self.entropy or self.influence or self.probe or self.blame:
            self.files.write_token_bytes(TokenBytes.from_tokenizer(tokenizer))

        self.findings = Findings(
            options.findings,
            Path(options.run_dir),
            lambda ids: str(tokenizer.decode(ids)),
            report,
            lambda: self.blame.on_disk.last if self.blame is not None else None,
        )
        self._batch: RolloutBatch | None = None
        """The rollout of the step whose metrics come next."""

    @property
    def parts_dir(self) -> Path:
        """Where ranks put their parts of an influence trace."""
        return self._parts_of(INFLUENCE_TRACE)

    def _parts_of(self, kind: str) -> Path:
        return self.files.traces.absolute() / kind / "parts"

    def start(self, last_step: int) -> None:
        """The run begins, or goes on from the checkpoint of `last_step`: what is later is void."""
        self.files.truncate_after(last_step)
        self._recover_metrics(last_step)
        self.findings.start(last_step)
        for writer in self.traces.writers:
            writer.truncate_after(last_step)
        if self.influence is not None:
            clear_rank_files(self.parts_dir)

    def close(self, finished: bool = True) -> None:
        for writer in self.traces.writers:
            writer.close()
        self.files.close(finished)

    # ------------------------------------------------------------ a step

    def labels(self, batch: RolloutBatch, step: int, mini_batch: Tensor, whole: Tensor) -> StepLabels | None:
        """What the ranks are told; None if this step has no influence trace."""
        knobs = self.options.influence_trace
        if not knobs.enable or step % knobs.write_every:
            return None
        assert self.influence is not None
        plan = self.influence.plan(batch, step)
        split = torch.zeros(len(plan.status), dtype=torch.bool)
        split[batch.group[~whole]] = True
        if bool(split.any()):
            self.report(
                f"influence trace: {int(split.sum())} groups of step {step} have no scores: verl's batch has holes or "
                "padding, so that they do not lie in one mini-batch"
            )
            plan.status[split & (plan.status == int(GroupStatus.SCORED))] = int(GroupStatus.NOT_CAPTURED)
        return StepLabels(plan, mini_batch)

    def record(self, batch: RolloutBatch, step: int, labels: StepLabels | None) -> dict[str, float]:
        """Write one file per trace after the update, from what the driver has and the ranks' parts. Returns metrics."""
        metrics: dict[str, float] = {}
        self._batch = batch
        if self.entropy is not None:
            metrics |= self.entropy.after_update(batch, step)
        if labels is not None:
            metrics |= self._record_influence(batch, step, labels)
        return metrics

    def _record_influence(self, batch: RolloutBatch, step: int, labels: StepLabels) -> dict[str, float]:
        assert self.influence is not None
        status = labels.plan.status
        rows = [labels.rows(number) for number in range(labels.last_mini_batch + 1)]
        if not any(len(part) for part in rows):
            return self.influence.write(batch, [], status, step)
        joined = join_parts(self.parts_dir, step, list(range(self.ranks)), rows)
        if joined.failures:
            reason = next(iter(joined.failures.values()))
            if self.options.influence_trace.on_error == "raise":
                raise GradtraceError(f"influence trace: step {step} is not traced: {reason}")
            return self.influence.failed(reason, status, step)
        return self.influence.write(batch, joined.scored, status, step)

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
        for writer in self.traces.writers:
            writer.flush()
        line = json.dumps({"step": step, **numbers(metrics)})
        atomic_write(Path(self.options.run_dir) / PENDING, line.encode(), fsync=True)

    def _recover_metrics(self, last_step: int) -> None:
        path = Path(self.options.run_dir) / PENDING
        if not path.is_file():
            return
        pending = json.loads(path.read_text())
        if pending["step"] != last_step:
            return
        lines = (Path(self.options.run_dir) / "metrics.jsonl").read_text().splitlines()
        if not any(json.loads(line)["step"] == last_step for line in lines):
            self.files.log(pending.pop("step"), pending)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Only those metrics that are numbers: verl mixes in tables and strings."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0:
            found[name] = float(value)
    return found


def without_prompts(batch: RolloutBatch, prompts: list[list[int]]) -> RolloutBatch:
    """The batch with only those sequences that have tokens and whose prompt is not among `prompts`; groups are numbered
    anew."""
    others = {tuple(prompt) for prompt in prompts}
    apart = torch.tensor([tuple(prompt) not in others for prompt in batch.prompts])
    kept = batch.select(apart[batch.group] & (batch.response_lengths > 0))
    return keep_groups(kept, kept.group.unique())
