"""Where instruments hook into a training step, and what they write. The loop knows this interface and no instrument."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.metrics import GENERATED
from gradtrace.policy.microbatch import MicroBatch
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter

logger = logging.getLogger(__name__)

Record = TypeVar("Record", bound="TraceRecord")


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """Which update of a training step is being made."""

    step: int
    """Training step, from 1."""
    epoch: int
    """Pass over the rollout, from 0."""
    mini_batch: int
    """Within the epoch, from 0."""
    number: int
    """Optimizer steps already taken on this rollout: 0 means that the weights are those that sampled it."""
    rows: Tensor
    """long[r]: rows of the `RolloutBatch` in this mini-batch."""


Passes = Iterable[tuple[MicroBatch, Callable[[], Tensor]]]
"""Micro-batches, each with what runs it and returns [2, r, T]: every token's own term of the loss at the current
weights, before aggregation, and its log-prob."""


class PassesOf(Protocol):
    def __call__(self, rows: Tensor, apart: bool = True) -> Passes:
        """Passes over these rows, every response with its own prompt, or with `apart=False` laid out as training is."""


@dataclass(frozen=True, eq=False)
class Backward:
    """One forward/backward pass of an update."""

    update: OptimizerStep
    micro: MicroBatch
    token_weights: Tensor
    """float[r, T]: what aggregation multiplied each token's loss by. Dividing a response's gradient by its weight
    undoes the normaliser (a response has one weight for all its tokens in every aggregation)."""
    token_terms: Callable[[Tensor], Tensor]
    """Rows of the `RolloutBatch` → [2, N], their tokens one after the other: each token's own term of the loss at the
    current weights, before aggregation, and its log-prob; runs the model."""
    passes: PassesOf | None = None
    """Where a host can run rows of any mini-batch at any time. Old log-probs of this update's rows are known after its
    last pass."""
    optimizer_steps: int | None = None
    """Optimizer steps taken on this rollout before this pass, where a host spreads `update.rows` over several of
    them; None: `update.number`."""

    @property
    def number(self) -> int:
        """Optimizer steps taken on this rollout before this pass: which θ it runs at."""
        return self.update.number if self.optimizer_steps is None else self.optimizer_steps


class StepObserver:
    """Does nothing; instruments override what they need. Observers may not change weights or gradients."""

    needs_entropies = False
    """Ask for `RolloutBatch.entropies` of the sampling policy before the update begins."""

    def start(self, last_step: int) -> None:
        """The run begins (0) or resumes after `last_step`: what was recorded for later steps is void."""

    def more_rollouts(self, step: int) -> RolloutBatch | None:
        """Judged responses in groups of their own that this step is to learn from as well, after the batch's own."""
        return None

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Rewards and advantages are set. May return the batch with `kept` set: the update uses those responses."""
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        """Entered before the forward pass of a micro-batch, left after its backward pass."""
        return nullcontext()

    def around_optimizer_step(self, update: OptimizerStep) -> AbstractContextManager[Any]:
        """Entered with the (clipped) gradients of a mini-batch in place, left after the weights have moved."""
        return nullcontext()

    def step_skipped(self, update: OptimizerStep) -> None:
        """The gradients of a mini-batch were not finite: the weights stay, and `around_optimizer_step` is left out."""

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """All updates of the step are done. Returns metrics; `perf/generated_responses`, if the instrument sampled
        responses of its own, is added to the rollout's."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Tensors that later steps depend on, for a checkpoint; names begin with the instrument's own."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """`state` of a checkpoint, everybody's; comes before `start`."""

    def close(self) -> None:
        """The run ends, for whatever reason."""


class WritingObserver(StepObserver):
    """One that writes a trace."""

    writer: TraceWriter

    def start(self, last_step: int) -> None:
        self.writer.truncate_after(last_step)

    def close(self) -> None:
        self.writer.close()


class Observers(StepObserver):
    """Composite: forwards each hook to several observers, in order."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self.observers = list(observers)

    @property
    def needs_entropies(self) -> bool:  # type: ignore[override]
        return any(observer.needs_entropies for observer in self.observers)

    def start(self, last_step: int) -> None:
        for observer in self.observers:
            observer.start(last_step)

    def more_rollouts(self, step: int) -> RolloutBatch | None:
        found = [more for observer in self.observers if (more := observer.more_rollouts(step)) is not None]
        return RolloutBatch.concat(found) if found else None

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        for observer in self.observers:
            batch = observer.before_update(batch, step)
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        return _inside(observer.around_backward(backward) for observer in self.observers)

    def around_optimizer_step(self, update: OptimizerStep) -> AbstractContextManager[Any]:
        return _inside(observer.around_optimizer_step(update) for observer in self.observers)

    def step_skipped(self, update: OptimizerStep) -> None:
        for observer in self.observers:
            observer.step_skipped(update)

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for observer in self.observers:
            own = observer.after_update(batch, step)
            generated = metrics.get(GENERATED, 0.0) + own.get(GENERATED, 0.0)
            metrics.update(own)
            if generated:
                metrics[GENERATED] = generated
        return metrics

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for observer in self.observers for name, tensor in observer.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for observer in self.observers:
            observer.load_state(tensors)

    def close(self) -> None:
        for observer in self.observers:
            observer.close()


@contextlib.contextmanager
def _inside(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """All of them entered, each made when those before it have been."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@dataclass(eq=False)
class TraceRecord:
    """An instrument's trace of a run on disk, the same in every host: its files, what every one of them says, and what
    could not be traced. Subclasses say what a file holds."""

    kind: ClassVar[str]
    """The instrument's name, in the configuration and on disk."""
    label: ClassVar[str]
    """The instrument in messages."""
    config: Any
    """Its section of the configuration."""
    writer: TraceWriter
    meta: dict[str, Any] = field(default_factory=dict)
    """Goes into every file."""
    truth: Truth = no_truth
    report: Callable[[str], None] = logger.warning
    errors: int = field(default=0, init=False)
    """Steps that could not be traced."""
    _told: set[str] = field(default_factory=set, init=False)

    def tell_once(self, about: str, sentence: str) -> None:
        """Report a sentence, unless one `about` the same was reported in this run."""
        if about not in self._told:
            self._told.add(about)
            self.report(f"{self.label}: {sentence}")


@dataclass(eq=False)
class RunTraces:
    """Opens the traces of a run."""

    files: RunFiles
    sections: Any
    """A configuration with a section under the name of each instrument."""
    meta: dict[str, Any]
    truth: Truth
    report: Callable[[str], None]
    writers: list[TraceWriter] = field(default_factory=list, init=False)
    """Those of all traces that were opened."""

    def writer(self, kind: str) -> TraceWriter:
        section = getattr(self.sections, kind)
        options = {"fsync": section.fsync, "on_error": section.on_error, "on_report": self.report}
        self.writers.append(TraceWriter(self.files.traces, kind, **options))
        return self.writers[-1]

    def record(self, of: type[Record]) -> Record:
        return of(getattr(self.sections, of.kind), self.writer(of.kind), self.meta, self.truth, self.report)
