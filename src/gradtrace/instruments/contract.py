"""The contract between instruments and hosts. It names neither.

An instrument has two halves. Its *reporter* lives beside the batch and the files, once per run. Its *observer* lives
beside the weights, once in every process that holds some. A training step is three calls:

    batch, plan = reporter.plan(batch, step, sampled)     # a small picklable plan, or None: this step is not observed
    …the hooks of the observer, during the update…        # it returns a `Table`
    metrics = reporter.write(batch, step, table)

A *host* (the embedded loop, TRL, verl) carries these two messages and gives observers a few operations on its model.
Every method of `Host` and every hook marked *collective* is called by all processes together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gradtrace.algorithms import AdvantageInputs, AdvantageOutputs, Algorithm
    from gradtrace.attribution import TrainingPass
    from gradtrace.attribution.collectives import Ranks
    from gradtrace.batch import RolloutBatch
    from gradtrace.instruments.record import Record
    from gradtrace.tasks.base import Prompt
    from gradtrace.trace.columns import InstrumentRecord

Gradient = Mapping[str, "Tensor"]
"""A gradient by parameter name; where the parameter is sharded, so is its gradient."""
Around = Callable[["Backward"], AbstractContextManager[Any]]

# ---------------------------------------------------------------- the instrument


@dataclass(frozen=True)
class Instrument:
    """One per folder, registered in its `__init__.py`. Building one imports no torch; its two functions may."""

    settings: Any
    """A dataclass: its section of the configuration, `trainer.NAME`. Or a `dataclasses.field` for one number."""
    reporter: Callable[[Record, TrainingRun], Reporter]
    observer: Callable[[Host, Any], Observer] | None = None
    """(host, settings) → the half beside the weights; None: it needs no weights."""
    record: InstrumentRecord | None = None
    """What its files hold; None: it writes none."""
    name: str = ""
    """Empty: that of the record."""
    key: str = ""
    """The name of its section; empty: its own name."""
    needs: Callable[[Any], Mapping[str, str]] | Sequence[str] = ()
    """Keys of `Host.cannot` that it depends on; or settings → {key: the setting that asks for it}. A need that the
    host cannot meet is an error where the instrument was asked for."""
    with_traces: bool = False
    """`trainer.traces=true` turns it on."""
    is_on: Callable[[Any], bool] = lambda settings: bool(settings.enable)
    held_out: Callable[[Any], int] = lambda settings: 0
    """settings → how many prompts it asks `TrainingRun.held_out` for, at most."""
    unreported: bool = False
    """They are to be none that the validation of the run reports on."""
    selects: bool = False
    """It may set `kept`: it plans before the others, which do not see what it leaves out."""

    def __post_init__(self) -> None:
        name = self.name or (self.record.name if self.record is not None else "")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "key", self.key or name)

    def needed(self, settings: Any) -> Mapping[str, str]:
        """Key of `cannot` → the setting that needs it; empty: the instrument as a whole does."""
        return self.needs(settings) if callable(self.needs) else dict.fromkeys(self.needs, "")

    def default(self) -> Any:
        """A new value of its section."""
        if isinstance(self.settings, type):
            return self.settings()
        given = self.settings.default
        return given if given is not MISSING else self.settings.default_factory()


class Reporter:
    """The half beside the batch and the files. Its methods do nothing; instruments override what they need."""

    def start(self, last_step: int) -> None:
        """The run begins (0) or goes on after `last_step`: what was kept of later steps is void."""

    def samples(self, step: int) -> Samples | None:
        """Prompts to sample beside this step's rollout, at the same weights."""
        return None

    def more_rollouts(self, step: int, sampled: RolloutBatch | None) -> RolloutBatch | None:
        """Judged responses that this step also trains on, in groups of their own."""
        return None

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, Any | None]:
        """The batch, perhaps with `kept` set, and the observer's plan. Rewards and advantages are set; columns that
        the host does not know yet are None. `sampled` is what `samples` asked for, None where that failed."""
        return batch, None

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        """Called after every step, with table None where nothing was observed. Returns metrics."""
        return {}

    def needs_entropies(self, step: int) -> bool:
        """Whether this step's file holds entropies of the sampling policy."""
        return False

    def state(self) -> dict[str, Tensor]:
        """Tensors that later steps depend on, for a checkpoint; names begin with `NAME/`."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Everybody's `state` of a checkpoint; called before `start`."""

    def close(self) -> None:
        """The run ends, for whatever reason."""


class Observer:
    """The half beside the weights. Its hooks may not change weights or gradients. An error in a hook costs this step's
    table and nothing else, or with `on_error=raise` the run. Hooks are called in the first epoch over a rollout."""

    table: Table

    def begin(self, plan: Any) -> None:
        """A step that is observed begins."""
        self.table = Table()

    def before_passes(self, update: OptimizerStep, rows: Rows) -> None:
        """Collective. The passes of training over `rows`, all or a slice of this process's share, come next; passes of
        one's own are welcome."""

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        """Entered before the forward pass of a micro-batch, left after its backward pass."""
        return nullcontext()

    def before_step(self, update: OptimizerStep) -> None:
        """Collective. Gradients are complete; the weights have not moved. Left out where the host knows already that
        the gradient is not finite, and that no step will be made."""

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        """Collective. The weights have moved; not `moved`: the gradient was not finite."""

    def end(self) -> Table:
        """Collective. What this process found; the hooks come off the model."""
        return self.table

    def drop(self) -> None:
        """The step is given up, here or in another process: forget it, and take the hooks off the model."""

    def answer(self, question: Any) -> Table:
        """Collective. Asked outside of an update (`TrainingRun.ask`); every process is given the same question."""
        raise NotImplementedError(f"{type(self).__name__} answers no questions: its reporter may not call `ask`")

    def close(self) -> None:
        """The run ends."""


# ---------------------------------------------------------------- what hosts offer


class Host(Protocol):
    """A process that holds weights. All its methods are collective."""

    ranks: Ranks
    """All processes that share the batch."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_traits: TrainingPass
    """What is true of every backward pass of training."""
    is_exact: bool
    """Derivatives have no step size."""
    temperature: float
    grad_clip: float
    """Gradients are clipped to this norm; 0: they are not."""
    cannot: Mapping[str, str]
    """What this host does not offer, and why, as the end of a sentence."""
    step_size: StepSize | None
    """None: not known before the first step."""
    report: Callable[[str], None]
    """Shows a line to the user."""

    def own(self, update: OptimizerStep) -> Rows:
        """The rows of the coming optimizer step that this process trains on, ascending."""

    def shared(self, update: OptimizerStep, ids: Tensor) -> Rows:
        """The same rows of the coming step in every process; a pass over them is split between the processes, and each
        is given the values of the rows that it trains on."""

    def dealt(self, batch: RolloutBatch, apart: bool = False, entropies: bool = False, **columns: Tensor) -> Rows:
        """This process's part of a batch that all processes know, with columns [R, T] beside its own. `apart`: every
        response has its own prompt in all passes; `entropies`: passes compute them."""

    def values(self, rows: Rows, of: Callable[[Pass], Tensor], as_kept: bool = False) -> Tensor:
        """Forward passes: `of` gives [..., b, T] for each pass; joined to [..., N], row after row. `as_kept`: laid out
        like the passes of `kept_values`, so that both round alike and their difference does not."""

    def keep(self, backward: Backward) -> AbstractContextManager[Any]:
        """Around a pass of training: keep what it computes for `kept_values`, if it is as precise as `values`."""

    def kept_values(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Tensor:
        """`values` before the optimizer step, at the weights as they are, bit by bit: from what `keep` has kept of all
        rows of the coming step, else by passes."""

    def noted_probabilities(self, rows: Rows, places: Sequence[int]) -> AbstractContextManager[Tensor | None]:
        """Inside, `values` of these rows also fills in the probabilities [k, V] of all tokens at `places` among theirs;
        None: there are no places, or this host does not see them."""

    def gradient(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Gradient:
        """The gradient of the sum of `of` over all passes and processes. `.grad` stays as it is."""

    def listen(self, rows: Rows, of: Callable[[Pass], Tensor], around: Around, apart: bool = True) -> None:
        """Backward passes of `of` for hooks alone: no gradient is kept. `apart`: every response has its own prompt."""

    def derivative(
        self, run: Callable[[], Tensor], direction: Gradient, step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        """d/dε run() at θ + ε·direction, for a function that runs the model; the weights stay as they are. Where it is
        not exact, ε is `step` times the usual one. `rate`: approximate relative change of the values per unit of ε;
        if given, the passes that estimate it are skipped."""

    def moved(
        self, direction: Gradient | Iterable[tuple[str, Tensor]], scale: float = 1.0
    ) -> AbstractContextManager[Any]:
        """Inside, the weights are at θ + scale·direction; afterwards they are what they were, bit by bit. Pairs of name
        and direction are asked for one by one, so that no second copy of all of them exists."""

    def next_gradient(self) -> NextGradient | None:
        """The gradient that the optimizer is given next, clipped; None: this host cannot tell."""

    def aside(self) -> AbstractContextManager[Any]:
        """Inside, passes are those of the policy that samples, in the precision of the weights, without dropout.
        Training notices nothing: modes and random numbers are put back."""

    def padding_held(self) -> AbstractContextManager[Any]:
        """Inside, `derivative` leaves the padding token's embedding out, as backward passes do."""


@dataclass(frozen=True)
class StepSize:
    """How much a training step holds at most."""

    prompts: int
    mini_batch: int
    """Prompts of an optimizer step."""
    responses: int
    """To each prompt."""
    tokens: int
    """Of a response."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some responses of a batch, as the host keeps them, with r rows and T tokens at most."""

    ids: Tensor
    """long[r]: rows of the `RolloutBatch`."""
    mask: Tensor
    """bool[r, T]: the tokens that the policy wrote."""
    weights: Tensor
    """float64[r]: the loss of all processes is Σ weight · Σ_t term."""
    column: Callable[[str], Tensor | None]
    """Name → [r, T], in any order in which the host has it; None: not known."""
    native: Any = None
    """What the host needs to run passes over them."""
    is_shared: bool = False
    """Made by `Host.shared`, where processes split the work."""

    def pick(self, ids: Tensor) -> Rows:
        """Only these rows, in this order."""
        place = {row: index for index, row in enumerate(self.ids.tolist())}
        chosen = [place[row] for row in ids.tolist()]

        def column(name: str) -> Tensor | None:
            values = self.column(name)
            return None if values is None else values[chosen]

        return Rows(ids, self.mask[chosen], self.weights[chosen], column, self.native, self.is_shared)

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """Numbers of tokens [..., N] → row → [..., t]."""
        counts = self.mask.sum(1).tolist()
        return dict(zip(self.ids.tolist(), values.split(counts, dim=-1), strict=True))


@dataclass(frozen=True, eq=False)
class Pass:
    """The results of a forward pass over b responses; differentiable."""

    rows: Tensor
    """long[b]: rows of the `RolloutBatch`; −1 for what only fills up."""
    mask: Tensor
    """bool[b, T]"""
    weights: Tensor
    """float64[b], as in `Rows`."""
    log_probs: Tensor
    """[b, T], zero outside the mask."""
    entropies: Tensor | None
    """[b, T]; None where the pass did not compute them."""
    column: Callable[[str], Tensor | None]
    """Name → [b, T], on the device of the pass."""
    policy_terms: Callable[[Tensor, Tensor], Tensor]
    """(log-probs, old log-probs) → [b, T], every token's own term of the policy loss."""
    terms: Callable[[], Tensor]
    """[b, T]: every token's own term of the whole loss, before aggregation."""


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One optimizer step of a training step."""

    step: int
    """Training step, from 1."""
    epoch: int
    """Pass over the rollout, from 0."""
    mini_batch: int
    """Within the epoch, from 0."""
    number: int
    """Optimizer steps already taken on this rollout: 0 means that the weights are those that sampled it."""
    rows: Tensor
    """long[r]: rows of the `RolloutBatch`, of all processes."""


@dataclass(frozen=True, eq=False)
class Backward:
    """One forward and backward pass of training, or of `Host.listen`, laid out as B input rows of S positions."""

    update: OptimizerStep
    number: int
    """Optimizer steps taken on this rollout before this pass."""
    rows: Tensor
    """long[b]: rows of the `RolloutBatch`; −1 for padding."""
    weights: Tensor
    """float[b]: what aggregation multiplies the token losses of each by."""
    response: Tensor
    """The row of each input row, long[B], or of each position, long[B, S]; −1: none."""
    tokens: Tensor
    """bool[B, S]: the input is a response token that the policy wrote."""
    positions: Mapping[str, Tensor] = field(default_factory=dict)
    """Module → flat positions that it sees, where it does not see all."""
    predicted_at: Tensor | None = None
    """Where prompts are shared: long[N], the flat positions that predict the tokens."""
    prompt_rows: Tensor | None = None
    """Where prompts are shared: long[B, S], the first row of the group at each position."""


@dataclass(frozen=True, eq=False)
class NextGradient:
    values: Gradient
    """Clipped, as the optimizer is given it."""
    clip_factor: float
    """What clipping multiplied it by."""


@dataclass(eq=False)
class Table:
    """What observers found in a step, by row of the batch."""

    columns: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain values as JSON has them, the same in every process."""
    failure: str = ""
    """Why nothing was found; of the first process that failed."""
    seconds: float = 0.0
    """Of the slowest process."""

    def put(self, name: str, found: Mapping[int, Tensor]) -> None:
        """Add numbers of a column, by row."""
        self.columns.setdefault(name, {}).update({row: v.detach().cpu() for row, v in found.items()})

    @staticmethod
    def joined(tables: Iterable[Table]) -> Table:
        """One table from those of all processes."""
        whole = Table()
        for table in tables:
            for name, found in table.columns.items():
                whole.columns.setdefault(name, {}).update(found)
            whole.facts = whole.facts or table.facts
            whole.failure = whole.failure or table.failure
            whole.seconds = max(whole.seconds, table.seconds)
        return whole


@dataclass(frozen=True, eq=False)
class Samples:
    """What an instrument wants to have sampled beside a step's rollout."""

    prompts: list[Prompt]
    n: int
    """Responses to each prompt; 0: as many as in training."""
    generator: torch.Generator
    """Of random numbers of its own, where the host's sampler takes one."""
    judged: bool = False
    """With rewards."""
    full_distribution: bool = False
    """Every token may be drawn, whatever `top_p` and `top_k` are in training."""


class TrainingRun(ABC):
    """What a reporter may ask of its host."""

    task: Any
    """`name` of the task, and `truth(item, ids)`: what is known beyond the reward."""
    tokenizer: Any
    seed: int
    cannot: Mapping[str, str]
    estimator: Algorithm[AdvantageInputs, AdvantageOutputs]
    step_size: StepSize | None = None
    split_groups: Sequence[int] = ()
    """Groups of the step under way whose responses are trained on in several optimizer steps."""
    report: Callable[[str], None]
    """Shows a line to the user."""
    prefix: str = "trainer."
    """Before the names of sections in errors."""

    def setting(self, key: str) -> str:
        """How the user of this host writes the section `key`."""
        return f"{self.prefix}{key}"

    @abstractmethod
    def token_weights(self, mask: Tensor) -> Tensor:
        """Loss mask bool[R, T] → float[R, T]: how much each token counts in the loss of the batch."""

    @abstractmethod
    def held_out(self, count: int, key: str, files: Sequence[str] = (), unreported: bool = False) -> list[Prompt]:
        """Up to `count` prompts that are never trained on, or those in `files`. `key` is the setting that asks.
        `unreported`: none that the validation of this run reports on."""

    @abstractmethod
    def ask(self, name: str, question: Any) -> Table:
        """`Observer.answer` of the instrument `name` in every process, joined."""
