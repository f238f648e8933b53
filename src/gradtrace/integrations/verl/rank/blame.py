"""Blame on the ranks of a verl job: the shares of an optimizer step's ‖g‖², before it is made.

Norms and sketches of the responses' own gradients ride on the training passes. Shares are derivatives along the whole
gradient, which lies in shards: all ranks move their shards along it together, in float32, and put them back bit by bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtrace.attribution import AttributionError
from gradtrace.attribution.geometry import ClippedGradients
from gradtrace.attribution.response_gradients import ResponseGradients
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.sharing import Sharing, UsualNorms
from gradtrace.instruments.host import asked_by
from gradtrace.integrations.verl.parts import BlamePart
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, micro_batch_weights
from gradtrace.integrations.verl.rank.probe_host import EngineProbeHost
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import layout_of, plain
from gradtrace.integrations.verl.told import BLAME_STEP, BlameInputs


class RankBlame:
    """Lives in the engine of a rank: `begin` with a mini-batch, `capturing` around its training passes, `share_out`
    before its optimizer step."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        assert loss.blame is not None
        self.engine = engine
        self.loss = loss
        self.rank = dist.get_rank()
        self.host = EngineProbeHost(engine, loss)
        with asked_by("gradtrace.blame"):
            self.gradients = ResponseGradients(engine.module, loss.blame.sketch_dim)
        self.gradients.close()  # hooks are on the model during training passes of steps that are due only
        measured = [block.parameter_name for block in self.gradients.blocks]
        self.sharing = Sharing(self.host, engine.module, engine.optimizer, measured)
        self.usual = UsualNorms(loss.blame.unusual_ratio)
        self.meeting = Meeting()
        self.inputs: BlameInputs | None = None
        self.part = BlamePart()
        self.number = 0
        """Of the next mini-batch of the step."""
        self.is_capturing = False
        self._data: Any = None
        self._open = ExitStack()
        print(
            f"gradtrace: blame active on rank {self.rank} of {dist.get_world_size()}: response gradients of "
            f"{len(self.gradients.blocks)} layers",
            flush=True,
        )

    # ------------------------------------------------------------ the training passes

    def begin(self, data: Any) -> bool:
        """True if this mini-batch is one of the first epoch of a step; the same answer on every rank."""
        inputs: BlameInputs | None = plain(data, BLAME_STEP)
        if inputs is None:
            return False
        if self.inputs is None or inputs.step != self.inputs.step:
            self.inputs, self.part, self.number = inputs, BlamePart(), 0
        self._data = data
        return self.number < inputs.mini_batches

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The backward passes inside are those of training, micro-batch by micro-batch, as `micro_batch` announces
        them."""
        assert self.inputs is not None
        if not self.inputs.is_due:
            yield
            return
        self.gradients.attach()
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False
            self._open.close()
            self.gradients.close()

    def micro_batch(self, micro_batch: Any) -> None:
        """The passes of this micro-batch come next; those of the one before are over."""
        self._open.close()
        response, tokens = layout_of(self.engine, micro_batch)
        self._open.enter_context(self.gradients.capture(response=response, tokens=tokens))

    # ------------------------------------------------------------ the optimizer step

    def share_out(self) -> None:
        """Called by all ranks before the optimizer step; the gradient is not clipped yet, and the same bits after."""
        inputs = self.inputs
        assert inputs is not None
        begin = time.perf_counter()
        self.meeting.wait(f"step {inputs.step}, blame of mini-batch {self.number}")
        norms, sketches = self.gradients.take()
        size = self.host.ranks.size  # FSDP takes the mean over ranks
        for row, norm in norms.items():
            self.part.norms[row] = torch.tensor(norm / size, dtype=torch.float64)
            self.part.sketches[row] = sketches[row] / size
        try:
            self._share_out(inputs)
        except (AttributionError, GradtraceError) as error:  # all ranks see it alike; the run goes on
            self.part.failure = self.part.failure or str(error)
        self.part.seconds += time.perf_counter() - begin
        self.number += 1
        if self.number == inputs.mini_batches:
            self.part.write(Path(inputs.parts_dir), inputs.step, self.rank)

    def _share_out(self, inputs: BlameInputs) -> None:
        gradient = ClippedGradients(self.engine.module, self.engine.optimizer_config.clip_grad)
        norm = self.sharing.norm(gradient, gradient.factor)
        if not math.isfinite(norm):  # verl will not make this step
            return
        wanted = self.usual.is_unusual(norm) or inputs.is_due
        self.part.largest_norm = max(self.part.largest_norm, norm)
        if not norm or not wanted:
            return
        batch = self.host.update(self._data, with_log_probs=True)
        with self.host.aside():
            (one,) = batch.passes()
            found, about = self.sharing.share_out(one.run, gradient, gradient.factor, self.number, self._weight())
        self.part.tokens |= batch.by_row(found)
        self.part.updates.append(about)

    def _weight(self) -> float:
        """Σ_t |w_t A_t| over the tokens of all ranks: how the mini-batch's loss weighs log-probs. Collective."""
        of_responses = micro_batch_weights(self._data, self.loss.actor) / self.host.ranks.size
        columns = (self._data[name].unbind() for name in ("advantages", "response_mask"))
        sizes = [float((advantages.abs() * mask).sum()) for advantages, mask in zip(*columns, strict=True)]
        return sum(self.host.ranks.gather(float(of_responses.double() @ torch.tensor(sizes, dtype=torch.float64))))
