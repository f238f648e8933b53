"""verl's FSDP engine with the influence trace in its backward pass and the entropy probe around its optimizer step.
Without a `GradtraceLoss` it is verl's engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from gradtrace.integrations.verl import refusals
from gradtrace.integrations.verl.launch.checkpoints import load_any_world_size, plain_tensors_only
from gradtrace.integrations.verl.rank.influence import RankTracer
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.probe import RankProbe
from gradtrace.integrations.verl.rank.process_group import apply_timeout
from gradtrace.integrations.verl.rank.tracin import count_real_responses


class TracedFSDPEngine(FSDPEngineWithLMHead):
    tracer: RankTracer | None = None
    _traced: RankTracer | None = None
    """The tracer, from the forward pass of a mini-batch that is traced to its optimizer step."""
    probe: RankProbe | None = None
    _probed: RankProbe | None = None
    """The probe, likewise."""

    def initialize(self) -> None:
        refusals.check_engine(self)
        super().initialize()
        groups = [dist.group.WORLD, self.get_data_parallel_group()]
        groups += [self.device_mesh.get_group(dim) for dim in range(self.device_mesh.ndim)]
        apply_timeout(groups)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if isinstance(loss_function, GradtraceLoss) and loss_function.selecting:
            count_real_responses(self, data)
        self._traced = None if forward_only else self._tracer_for(data, loss_function)
        self._probed = None if forward_only else self._probe_for(data, loss_function)
        tracer = self._traced
        if tracer is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        roles = tracer.roles
        for role in roles.own:
            with tracer.capturing(role):
                super().forward_backward_batch(data, tracer.objective)
            self.optimizer_zero_grad()  # gradients of the objective are nobody's but the trace's
        with nullcontext() if roles.riding is None else tracer.capturing(roles.riding):
            return super().forward_backward_batch(data, loss_function)

    def _tracer_for(self, data: Any, loss_function: Any) -> RankTracer | None:
        if not isinstance(loss_function, GradtraceLoss):
            return None
        loss_function.engine_attached = True
        if loss_function.influence is None:
            return None
        if self.tracer is None or self.tracer.loss is not loss_function:
            refusals.check_hooks(self, "influence_trace")
            self.tracer = RankTracer(self, loss_function)
        return self.tracer if self.tracer.begin(data) else None

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
        return super().forward_step(micro_batch, loss_function, forward_only)

    def optimizer_step(self) -> float:
        tracer, self._traced = self._traced, None
        if tracer is not None:
            tracer.score()
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
