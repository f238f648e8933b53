"""verl's FSDP engine with instruments around its passes and its optimizer step. Without a `GradtraceLoss` it is verl's
engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from gradtrace.integrations.verl.cannot import check_engine
from gradtrace.integrations.verl.launch.checkpoints import load_any_world_size, plain_tensors_only
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.process_group import apply_timeout
from gradtrace.integrations.verl.rank.steps import RankSteps

Around = Callable[[Any], AbstractContextManager[Any]]


class TracedFSDPEngine(FSDPEngineWithLMHead):
    steps: RankSteps | None = None
    _observed: RankSteps | None = None
    """Its steps, from the passes of a mini-batch that is observed to its optimizer step."""
    _around: Around | None = None
    _micro_batch: ExitStack
    """What is open around the micro-batch under way."""

    def initialize(self) -> None:
        check_engine(self)
        super().initialize()
        groups = [dist.group.WORLD, self.get_data_parallel_group()]
        groups += [self.device_mesh.get_group(dim) for dim in range(self.device_mesh.ndim)]
        apply_timeout(groups)

    def steps_of(self, loss: GradtraceLoss) -> RankSteps:
        """The instruments that `loss` asks for, made when it first does."""
        if self.steps is None or self.steps.loss is not loss:
            self.steps = RankSteps(self, loss)
        return self.steps

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        self._observed = None
        if isinstance(loss_function, GradtraceLoss):
            loss_function.engine_attached = True
            if loss_function.selecting:
                count_real_responses(self, data)
            if loss_function.instruments and not forward_only:
                steps = self.steps_of(loss_function)
                self._observed = steps if steps.begin(data) else None
        with self.around_micro_batches(self._observed.around_backward if self._observed else None):
            return super().forward_backward_batch(data, loss_function, forward_only)

    def plain_passes(self, data: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's own passes over `data`, unobserved."""
        return super().forward_backward_batch(data, loss_function, forward_only)

    @contextmanager
    def around_micro_batches(self, around: Around | None) -> Iterator[None]:
        """Inside, `around(micro_batch)` is entered before the forward pass of each micro-batch, and left when its
        backward pass is over."""
        self._around = around
        try:
            with ExitStack() as self._micro_batch:
                yield
        finally:
            self._around = None

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if self._around is not None:
            self._micro_batch.close()  # the passes of the one before are over
            self._micro_batch.enter_context(self._around(micro_batch))
        return super().forward_step(micro_batch, loss_function, forward_only)

    def optimizer_step(self) -> float:
        steps, self._observed = self._observed, None
        if steps is not None:
            steps.before_step()
        grad_norm = super().optimizer_step()
        if steps is not None:
            steps.after_step(moved=math.isfinite(grad_norm))
        return grad_norm

    def load_checkpoint(self, local_path: str, *args: Any, **options: Any) -> None:
        if not load_any_world_size(self, local_path):
            with plain_tensors_only():
                super().load_checkpoint(local_path, *args, **options)


def count_real_responses(engine: Any, data: Any) -> None:
    """Let a mean over responses divide by those of all ranks that have a loss, without what fills up."""
    count: Tensor = torch.tensor(sum(bool(mask.any()) for mask in data["loss_mask"].unbind()))
    count = count.to(torch.device(engine.device_mesh.device_type))
    dist.all_reduce(count, group=engine.get_data_parallel_group())
    tu.assign_non_tensor(data, global_batch_size=max(1, int(count)))
