"""verl's FSDP engine with traces in its backward pass, and blame and the entropy probe around its optimizer step.
Without a `GradtraceLoss` it is verl's engine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from gradtrace.integrations.verl import refusals
from gradtrace.integrations.verl.launch.checkpoints import load_any_world_size, plain_tensors_only
from gradtrace.integrations.verl.rank.blame import RankBlame
from gradtrace.integrations.verl.rank.influence import RankTracer
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.mismatch import RankMismatch
from gradtrace.integrations.verl.rank.probe import RankProbe
from gradtrace.integrations.verl.rank.process_group import apply_timeout
from gradtrace.integrations.verl.rank.sequences import plain
from gradtrace.integrations.verl.rank.tracin import count_real_responses
from gradtrace.integrations.verl.step_labels import MISMATCH


class TracedFSDPEngine(FSDPEngineWithLMHead):
    tracer: RankTracer | None = None
    _traced: RankTracer | None = None
    """The tracer, from the forward pass of a mini-batch that is traced to its optimizer step."""
    probe: RankProbe | None = None
    _probed: RankProbe | None = None
    """The probe, likewise."""
    blame: RankBlame | None = None
    _blamed: RankBlame | None = None
    """Blame, likewise."""
    mismatch: RankMismatch | None = None

    def initialize(self) -> None:
        refusals.check_engine(self)
        super().initialize()
        groups = [dist.group.WORLD, self.get_data_parallel_group()]
        groups += [self.device_mesh.get_group(dim) for dim in range(self.device_mesh.ndim)]
        apply_timeout(groups)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if isinstance(loss_function, GradtraceLoss) and loss_function.selecting:
            count_real_responses(self, data)
        if not forward_only:
            self._measure_mismatch(data, loss_function)
        self._traced = None if forward_only else self._tracer_for(data, loss_function)
        self._probed = None if forward_only else self._probe_for(data, loss_function)
        self._blamed = None if forward_only else self._blame_for(data, loss_function)
        tracer = self._traced
        for role in tracer.roles.own if tracer is not None else ():
            assert tracer is not None
            with tracer.capturing(role):
                super().forward_backward_batch(data, tracer.objective)
            self.optimizer_zero_grad()  # gradients of the objective are nobody's but the trace's
        with ExitStack() as around:
            if tracer is not None and tracer.roles.riding is not None:
                around.enter_context(tracer.capturing(tracer.roles.riding))
            if self._blamed is not None:
                around.enter_context(self._blamed.capturing())
            return super().forward_backward_batch(data, loss_function, forward_only)

    def _tracer_for(self, data: Any, loss_function: Any) -> RankTracer | None:
        if not isinstance(loss_function, GradtraceLoss):
            return None
        loss_function.engine_attached = True
        if loss_function.influence is None:
            return None
        if self.tracer is None or self.tracer.loss is not loss_function:
            check = (
                refusals.check_differences
                if loss_function.influence.wants_loss_term
                else refusals.check_hooks
            )
            check(self, "influence_trace")
            self.tracer = RankTracer(self, loss_function)
        return self.tracer if self.tracer.begin(data) else None

    def _blame_for(self, data: Any, loss_function: Any) -> RankBlame | None:
        if not isinstance(loss_function, GradtraceLoss) or loss_function.blame is None:
            return None
        if self.blame is None or self.blame.loss is not loss_function:
            refusals.check_differences(self, "blame")
            self.blame = RankBlame(self, loss_function)
        return self.blame if self.blame.begin(data) else None

    def _measure_mismatch(self, data: Any, loss_function: Any) -> None:
        inputs = plain(data, MISMATCH)
        if not isinstance(loss_function, GradtraceLoss) or inputs is None:
            return
        if self.mismatch is None or self.mismatch.loss is not loss_function:
            self.mismatch = RankMismatch(self, loss_function)
        self._traced = self._blamed = None
        self.mismatch.measure(inputs, data)

    def plain_passes(self, data: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's own passes over `data`, without a trace or a probe of their own."""
        return super().forward_backward_batch(data, loss_function, forward_only)

    def _probe_for(self, data: Any, loss_function: Any) -> RankProbe | None:
        if not isinstance(loss_function, GradtraceLoss) or not loss_function.probe:
            return None
        if self.probe is None or self.probe.loss is not loss_function:
            refusals.check_probe(self)
            self.probe = RankProbe(self, loss_function)
        return self.probe if self.probe.begin(data) else None

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if self._traced is not None and self._traced.role is not None:
            self._traced.micro_batch(micro_batch)
        if self._blamed is not None and self._blamed.is_capturing:
            self._blamed.micro_batch(micro_batch)
        return super().forward_step(micro_batch, loss_function, forward_only)

    def optimizer_step(self) -> float:
        tracer, self._traced = self._traced, None
        if tracer is not None:
            tracer.score()
        blame, self._blamed = self._blamed, None
        if blame is not None:
            blame.share_out()
        probe, self._probed = self._probed, None
        if probe is not None:
            probe.predict()
        grad_norm = super().optimizer_step()
        if probe is not None:
            probe.measure()
        if tracer is not None:
            tracer.finish_mini_batch(grad_norm)
        return grad_norm

    def load_checkpoint(self, local_path: str, *args: Any, **options: Any) -> None:
        if not load_any_world_size(self, local_path):
            with plain_tensors_only():
                super().load_checkpoint(local_path, *args, **options)
