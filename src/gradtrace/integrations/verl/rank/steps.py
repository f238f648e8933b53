"""The instruments of a rank: walks the mini-batches of a step, and leaves its tables for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import OptimizerStep, Table
from gradtrace.instruments.observers import Observers
from gradtrace.instruments.registry import instruments
from gradtrace.instruments.steps import asked_by, check_needs
from gradtrace.integrations.verl.assign import PADDING
from gradtrace.integrations.verl.rank.host import RankHost
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import plain, rows_of
from gradtrace.integrations.verl.settings import SECTION
from gradtrace.integrations.verl.tables import STEP, StepMessage, write_tables


class RankSteps:
    """Lives in the engine of a rank. For each mini-batch: `begin`, its passes inside `around_backward`, `before_step`
    and `after_step`. The first epoch over a rollout is observed; later ones pass by."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        self.loss = loss
        self.rank = dist.get_rank()
        self.host = RankHost(engine, loss)
        found = {}
        for name, settings in loss.instruments.items():
            one, section = instruments()[name], f"{SECTION}{instruments()[name].key}"
            check_needs(one, settings, self.host.cannot, section)
            if one.observer is not None:
                with asked_by(section):
                    found[name] = one.observer(self.host, settings)
                label = name.replace("_", " ")
                print(f"gradtrace: {label} active on rank {self.rank} of {dist.get_world_size()}", flush=True)
        self.observers = Observers(self.host.ranks, found)
        self.meeting = Meeting()
        self.message: StepMessage | None = None
        self.update: OptimizerStep | None = None
        """The one that is under way."""
        self._begun = 0
        """Mini-batches of the step that have begun."""

    # ------------------------------------------------------------ a mini-batch

    def begin(self, data: Any) -> bool:
        """The passes over verl's `data` of a mini-batch come next. Returns whether they are observed."""
        message: StepMessage | None = plain(data, STEP)
        if message is None:
            return False
        if self.message is None or message.step != self.message.step:
            self.message, self._begun = message, 0
        if self._begun == message.mini_batches:  # a later epoch over the same rollout
            return False
        number = self._begun
        self._check_order(data, number)
        self._begun += 1
        self.update = OptimizerStep(message.step, 0, number, number, message.rows(number))
        self.host.train_on(data, self.update)
        if number == 0:
            self.observers.begin(message.plans)
        if self.observers:
            self.observers.before_passes(self.update, self.host.own(self.update))
        return True

    def _check_order(self, data: Any, number: int) -> None:
        assert self.message is not None
        rows = rows_of(data)
        found = self.message.mini_batch[rows[rows != PADDING]].unique().tolist()
        if found not in ([], [number]):  # a rank that has nothing but padding still takes part in collectives
            raise GradtraceError(
                f"rank {self.rank} was given responses of the mini-batches {found} where {number} comes next: the "
                "order of the batch was changed after gradtrace had dealt groups to mini-batches"
            )

    def around_backward(self, micro_batch: Any) -> AbstractContextManager[Any]:
        return self.observers.around_backward(self.host.backward(micro_batch))

    def before_step(self) -> None:
        """Called before the optimizer step; the gradient is not clipped yet, and the same bits after."""
        assert self.update is not None
        self.meet(f"step {self.update.step}, mini-batch {self.update.mini_batch}")
        if self.observers and self.host.is_finite():
            self.observers.before_step(self.update)

    def after_step(self, moved: bool) -> None:
        assert self.update is not None and self.message is not None
        self.observers.after_step(self.update, moved)
        if self._begun == self.message.mini_batches:
            tables = self.observers.end()
            write_tables(Path(self.loss.folder), self.message.step, self.rank, tables)
        self.update = None

    def meet(self, what: str) -> None:
        """Wait for all ranks, and name the one that does not come."""
        self.meeting.wait(what)

    # ------------------------------------------------------------ outside of an update

    def answer(self, name: str, question: Any) -> Table:
        self.meet(f"a question of {name.replace('_', ' ')}")
        engine = self.host.engine
        self.host.train_on(None, None)
        with engine.train_mode(), without_gradients(engine):
            return self.observers.observers[name].answer(question)


@contextmanager
def without_gradients(engine: Any) -> Iterator[None]:
    engine.optimizer_zero_grad()
    try:
        yield
    finally:
        engine.optimizer_zero_grad()


def answer_on_worker(process: Any, name: str, question: Any) -> Table:
    """`TrainingRun.ask` in a process of verl's worker group, which may hold several workers; one of them trains the
    actor."""
    workers = process.worker_dict.values()
    actor = next(worker.actor for worker in workers if getattr(worker, "actor", None) is not None)
    table: Table = actor.engine.steps_of(actor.loss_fn).answer(name, question)
    return table
