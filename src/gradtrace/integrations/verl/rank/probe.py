"""The entropy probe on the ranks of a verl job: ΔH of a training step's first optimizer step, predicted and measured.

E comes from the driver and is dealt to the ranks; of U each rank has the responses it trains on. Each rank writes what
it knows to a part file, which the driver joins (`recorder`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtrace.attribution import AttributionError
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe import EntropyProbe, Tokens
from gradtrace.integrations.verl.parts import ProbePart
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.probe_host import EngineBatch, EngineProbeHost
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import plain
from gradtrace.integrations.verl.told import PROBE, ProbeInputs


class RankProbe:
    """Lives in the engine of a rank: `begin` with a mini-batch, `predict` and `measure` around its optimizer step."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        self.engine = engine
        self.loss = loss
        self.rank = dist.get_rank()
        self.host = EngineProbeHost(engine, loss)
        self.probe = EntropyProbe(engine.module, engine.optimizer, float(engine.optimizer_config.clip_grad), self.host)
        self.meeting = Meeting()
        self.inputs: ProbeInputs | None = None
        """Of the step that was probed last."""
        self.part = ProbePart()
        self._data: Any = None
        """U: this rank's part of the mini-batch, between the prediction and the measurement."""
        self._evaluation: EngineBatch | None = None
        print(
            f"gradtrace: entropy probe active on rank {self.rank} of {dist.get_world_size()}: "
            f"{len(self.probe.parameters)} parameters",
            flush=True,
        )

    def begin(self, data: Any) -> bool:
        """True if the optimizer step of this mini-batch is probed: the first of a step that the driver has chosen."""
        inputs: ProbeInputs | None = plain(data, PROBE)
        if inputs is None or (self.inputs is not None and inputs.step == self.inputs.step):
            return False
        self.inputs, self.part, self._data = inputs, ProbePart(), data
        return True

    def predict(self) -> None:
        """Called by all ranks before the optimizer step. The gradient is not clipped yet; it is the same bits after."""
        begin = time.perf_counter()
        assert self.inputs is not None
        self.meeting.wait(f"step {self.inputs.step}, entropy probe")
        try:
            with self.host.aside():
                self._predict(self.inputs)
        except (AttributionError, GradtraceError) as error:  # all ranks see it alike; the run goes on
            self.part.failure = str(error)
        self.part.rate = float(self.engine.optimizer.param_groups[0]["lr"])
        self.part.seconds = time.perf_counter() - begin

    def _predict(self, inputs: ProbeInputs) -> None:
        gradient = {name: p.grad for name, p in self.probe.parameters.items() if p.grad is not None}
        update = self.probe.clipped_update(gradient)
        self._evaluation = evaluation = self.host.evaluation(inputs, self._data)
        prediction = self.probe.predict(evaluation, update)
        update.direction.clear()  # its memory is needed
        batch, part = self.host.update(self._data), self.part
        shares = self.probe.shares(prediction, evaluation, update, batch)
        part.base = evaluation.by_row(pair(prediction.base))
        part.derivative = evaluation.by_row(torch.stack([prediction.d_log_probs, prediction.d_entropies]))
        part.shares = batch.by_row(shares.tokens)
        part.momentum, part.decay, part.legacy = shares.momentum, shares.decay, shares.legacy

    def measure(self) -> None:
        """The same E at the weights that the optimizer has really made; then this rank's part is complete."""
        assert self.inputs is not None
        begin = time.perf_counter()
        evaluation, self._evaluation, self._data = self._evaluation, None, None
        if not self.part.failure and evaluation is not None:
            with self.host.aside():
                self.part.after = evaluation.by_row(pair(self.probe.tokens(evaluation)))
        self.part.seconds += time.perf_counter() - begin
        self.part.write(Path(self.inputs.parts_dir), self.inputs.step, self.rank)


def pair(tokens: Tokens) -> torch.Tensor:
    """float64[2, N]: log-probs and entropies."""
    return torch.stack([tokens.log_probs, tokens.entropies])
