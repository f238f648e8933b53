"""The entropy probe on the ranks of a verl job: ΔH of a training step's first optimizer step, predicted and measured.

E comes from the driver and is dealt to the ranks; of U each rank has the responses it trains on. Each rank writes what
it knows to a part file, which the driver joins (`probe_record`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtrace.attribution import AttributionError
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe import EntropyProbe, Tokens
from gradtrace.integrations.verl.probe_parts import PROBE, ProbeInputs, ProbePart, write_probe_part
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.probe_host import EngineBatch, EngineProbeHost
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import plain


@dataclass(eq=False)
class _Step:
    """What is known between the prediction and the measurement."""

    inputs: ProbeInputs
    data: Any
    """U: this rank's part of the mini-batch."""
    part: ProbePart = field(default_factory=ProbePart)
    evaluation: EngineBatch | None = None


class RankProbe:
    """Lives in the engine of a rank: `begin` with a mini-batch, `predict` and `measure` around its optimizer step."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        self.engine = engine
        self.loss = loss
        self.rank = dist.get_rank()
        self.host = EngineProbeHost(engine, loss)
        self.probe = EntropyProbe(
            engine.module, engine.optimizer, float(engine.optimizer_config.clip_grad), self.host
        )
        self.meeting = Meeting()
        self.last_step = -1
        self.step: _Step | None = None
        print(
            f"gradtrace: entropy probe active on rank {self.rank} of {dist.get_world_size()}: "
            f"{len(self.probe.parameters)} parameters",
            flush=True,
        )

    def begin(self, data: Any) -> bool:
        """True if the optimizer step of this mini-batch is probed: the first of a step that the driver has chosen."""
        inputs: ProbeInputs | None = plain(data, PROBE)
        if inputs is None or inputs.step == self.last_step:
            return False
        self.last_step = inputs.step
        self.step = _Step(inputs, data)
        return True

    def predict(self) -> None:
        """Called by all ranks before the optimizer step. The gradient is not clipped yet; it is the same bits after."""
        begin = time.perf_counter()
        step = self.step
        assert step is not None
        self.meeting.wait(f"step {step.inputs.step}, entropy probe")
        try:
            with self.host.aside():
                self._predict(step)
        except (AttributionError, GradtraceError) as error:  # all ranks see it alike; the run goes on
            step.part.failure = str(error)
        step.part.rate = float(self.engine.optimizer.param_groups[0]["lr"])
        step.part.seconds = time.perf_counter() - begin

    def _predict(self, step: _Step) -> None:
        gradient = {name: p.grad for name, p in self.probe.parameters.items() if p.grad is not None}
        update = self.probe.clipped_update(gradient)
        step.evaluation = evaluation = self.host.evaluation(step.inputs, step.data)
        prediction = self.probe.predict(evaluation, update)
        update.direction.clear()  # its memory is needed
        batch = self.host.update(step.data)
        shares = self.probe.shares(prediction, evaluation, update, batch)
        part = step.part
        part.base = evaluation.by_row(pair(prediction.base))
        part.derivative = evaluation.by_row(torch.stack([prediction.d_log_probs, prediction.d_entropies]))
        part.shares = batch.by_row(shares.tokens)
        part.momentum, part.decay, part.legacy = shares.momentum, shares.decay, shares.legacy

    def measure(self) -> None:
        """The same E at the weights that the optimizer has really made; then this rank's part is complete."""
        step, self.step = self.step, None
        assert step is not None
        begin = time.perf_counter()
        if not step.part.failure and step.evaluation is not None:
            with self.host.aside():
                step.part.after = step.evaluation.by_row(pair(self.probe.tokens(step.evaluation)))
        step.part.seconds += time.perf_counter() - begin
        write_probe_part(Path(step.inputs.parts_dir), step.inputs.step, self.rank, step.part)


def pair(tokens: Tokens) -> torch.Tensor:
    """float64[2, N]: log-probs and entropies."""
    return torch.stack([tokens.log_probs, tokens.entropies])
