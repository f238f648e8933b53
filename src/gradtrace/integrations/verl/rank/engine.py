"""verl's FSDP engine with traces in its backward pass, and blame and the entropy probe around its optimizer step.
Without a `GradtraceLoss` it is verl's engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

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
from gradtrace.integrations.verl.told import MISMATCH

T = TypeVar("T")


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
        self._traced = self._blamed = self._probed = None
        if isinstance(loss_function, GradtraceLoss):
            if loss_function.selecting:
                count_real_responses(self, data)
            if not forward_only:
                self._begin(data, loss_function)
        tracer = self._traced
        if tracer is not None:
            for role in tracer.roles.own:
                with tracer.capturing(role):
                    super().forward_backward_batch(data, tracer.objective)
                self.optimizer_zero_grad()  # gradients of the objective are nobody's but the trace's
        with ExitStack() as around:
            if tracer is not None and tracer.roles.riding is not None:
                around.enter_context(tracer.capturing(tracer.roles.riding))
            if self._blamed is not None:
                around.enter_context(self._blamed.capturing())
            return super().forward_backward_batch(data, loss_function, forward_only)

    def _begin(self, data: Any, loss: GradtraceLoss) -> None:
        """Tell the instruments that `loss` asks for of a mini-batch's training passes, which come next."""
        loss.engine_attached = True
        if (inputs := plain(data, MISMATCH)) is not None:
            self._made("mismatch", RankMismatch, loss).measure(inputs, data)
        if loss.influence is not None:
            fine = loss.influence.wants_loss_term
            check = refusals.check_differences if fine else refusals.check_hooks
            tracer = self._made("tracer", RankTracer, loss, lambda: check(self, "influence_trace"))
            self._traced = tracer if tracer.begin(data) else None
        if loss.probe:
            probe = self._made("probe", RankProbe, loss, lambda: refusals.check_probe(self))
            self._probed = probe if probe.begin(data) else None
        if loss.blame is not None:
            blame = self._made("blame", RankBlame, loss, lambda: refusals.check_differences(self, "blame"))
            self._blamed = blame if blame.begin(data) else None

    def _made(self, name: str, kind: type[T], loss: GradtraceLoss, check: Callable[[], None] = lambda: None) -> T:
        """The instrument under this name, made after a `check` when a loss function first asks for it."""
        if getattr(self, name) is None or getattr(self, name).loss is not loss:
            check()
            setattr(self, name, kind(self, loss))  # type: ignore[call-arg]
        found: T = getattr(self, name)
        return found

    def plain_passes(self, data: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's own passes over `data`, without a trace or a probe of their own."""
        return super().forward_backward_batch(data, loss_function, forward_only)

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
