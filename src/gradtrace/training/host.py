"""The host of a policy in this process: the embedded loop, and with other passes TRL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, advantage, policy_loss, token_weights
from gradtrace.algorithms.logits import precise_statistics
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.attribution import TrainingPass
from gradtrace.attribution.collectives import Ranks, is_sharded
from gradtrace.batch import RolloutBatch
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import (
    Around,
    Backward,
    Gradient,
    NextGradient,
    OptimizerStep,
    Pass,
    Rows,
    Samples,
    StepSize,
    Table,
    TrainingRun,
)
from gradtrace.instruments.registry import enabled
from gradtrace.instruments.steps import InstrumentSteps
from gradtrace.instruments.whole_model import WholeModel
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy, has_dropout
from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout.settings import EVERY_TOKEN, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import TokenBytes

if TYPE_CHECKING:
    from gradtrace.training.components import Components

logger = logging.getLogger(__name__)
Shown = Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]]
How = Literal["training", "fewest", "apart"]
"""How rows are laid out: as training does; with the fewest tokens; every response with its own prompt."""


@dataclass(frozen=True, eq=False)
class Source:
    """`Rows.native`: how rows of a batch become forward passes."""

    batch: RolloutBatch
    cut: Callable[[Tensor, How], Iterable[MicroBatch]]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[R, T] each, beside those of the batch."""
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    """float64[R]"""
    update: OptimizerStep | None = None
    terms: Callable[[MicroBatch, Tensor, Tensor], Tensor] | None = None
    """(micro-batch, log-probs, entropies) → [b, T], terms of the whole loss."""
    policy_terms: Callable[[MicroBatch, Tensor, Tensor, Tensor], Tensor] | None = None
    """(micro-batch, log-probs, old log-probs, entropies) → [b, T], terms of the policy loss."""

    def column(self, name: str) -> Tensor | None:
        """[R, T] of the whole batch."""
        own = self.columns.get(name)
        return own if own is not None else getattr(self.batch, name, None)

    def rows(self, ids: Tensor, weights: Tensor | None = None) -> Rows:
        def column(name: str) -> Tensor | None:
            values = self.column(name)
            return None if values is None else values[ids]

        own = self.weights[ids] if weights is None else weights
        return Rows(ids, self.batch.response_mask[ids], own, column, self)

    def of_pass(self, micro: MicroBatch, log_probs: Tensor, entropies: Tensor) -> Pass:
        width = micro.mask.shape[1]

        def column(name: str) -> Tensor | None:
            values = self.column(name)
            return None if values is None else values[micro.rows, :width].to(log_probs.device)

        def terms() -> Tensor:
            if self.terms is None:
                raise GradtraceError("this batch is not trained on: its tokens have no terms of a loss")
            return self.terms(micro, log_probs, entropies)

        def policy_terms(given: Tensor, old: Tensor) -> Tensor:
            if self.policy_terms is None:
                raise GradtraceError("this batch is not trained on: its tokens have no terms of a loss")
            return self.policy_terms(micro, given, old, entropies)

        weights = self.weights[micro.rows] if len(self.weights) else torch.zeros(len(micro.rows), dtype=torch.float64)
        device = log_probs.device
        return Pass(
            micro.rows, micro.mask.to(device), weights.to(device), log_probs, entropies, column, policy_terms, terms
        )


class PolicyHost(WholeModel):
    """A `contract.Host` over a policy in this process. `source` is what is being trained on."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Any,
        loss_traits: TrainingPass,
        *,
        grad_clip: float = 0.0,
        token_budget: int = 16384,
        ranks: Ranks | None = None,
        cannot: Mapping[str, str] | None = None,
        step_size: StepSize | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        super().__init__(policy.model, ranks)
        self.policy = policy
        self.temperature = policy.temperature
        self.optimizer = optimizer
        self.loss_traits = loss_traits
        self.grad_clip = grad_clip
        self.token_budget = token_budget
        self.cannot = cannot or {}
        self.step_size = step_size
        self.report = report
        self.source: Source | None = None
        self._kept: list[tuple[MicroBatch, Tensor, Tensor]] = []
        """Micro-batches of the coming optimizer step with the log-probs and entropies that training has computed."""
        self.shown: Shown = lambda items: items
        """Wraps the micro-batches of a sweep over rows, for a progress bar."""

    @property
    def training(self) -> Source:
        assert self.source is not None, "no update is under way"
        return self.source

    # ------------------------------------------------------------ rows

    def own(self, update: OptimizerStep) -> Rows:
        return self.training.rows(update.rows.sort().values)

    def shared(self, update: OptimizerStep, ids: Tensor) -> Rows:
        return self.training.rows(ids)

    def dealt(self, batch: RolloutBatch, apart: bool = False, entropies: bool = False, **columns: Tensor) -> Rows:
        def cut(ids: Tensor, how: How) -> Iterable[MicroBatch]:
            padded = apart or how == "apart"
            return MicroBatches(batch, self.token_budget, "padded" if padded else self.policy.best_layout())(ids)

        ids = torch.arange(len(batch))[self.ranks.place :: self.ranks.size]
        return Source(batch, cut, columns).rows(ids, torch.zeros(len(ids), dtype=torch.float64))

    # ------------------------------------------------------------ passes

    @torch.no_grad()
    def values(self, rows: Rows, of: Callable[[Pass], Tensor], as_kept: bool = False) -> Tensor:
        source: Source = rows.native
        ids, found = rows.ids, dict[int, Tensor]()
        idle = not len(ids) and is_sharded(self.model)
        how: How = "training" if as_kept and self._kept_all(rows) else "fewest"
        for micro in self._cut(rows, torch.zeros(1, dtype=torch.long) if idle else ids, how):
            self._take(found, micro, of(self._pass(source, micro)))
        if found:
            joined = torch.cat([found[row] for row in (ids.tolist() or found)], dim=-1)
            return joined[..., :0] if idle else joined
        nothing = torch.zeros(0, rows.mask.shape[1], device=self.policy.device)
        masks = {"tokens": nothing.bool(), "mask": nothing.bool()}
        micro = MicroBatch(ids, ids, None, None, response=ids, logit_positions=ids, targets=ids, **masks)
        return of(source.of_pass(micro, nothing, nothing)).flatten(-2)

    @staticmethod
    def _take(found: dict[int, Tensor], micro: MicroBatch, values: Tensor) -> None:
        """Add the values [..., b, T] of a pass by row."""
        for index, row in enumerate(micro.rows.tolist()):
            found[row] = values[..., index, micro.mask[index].to(values.device)]

    @contextmanager
    def keep(self, backward: Backward) -> Iterator[None]:
        if not self._trains_as_values():
            yield
            return
        with self._seeing_logits(self._keep):
            yield

    def _trains_as_values(self) -> bool:
        """Whether a pass of training computes what one of `values` computes, to the last bit."""
        return False

    def _keep(self, micro: MicroBatch, logits: Tensor) -> None:
        self._kept.append(
            (micro, *precise_statistics(logits.detach(), micro.targets.to(logits.device), self.temperature))
        )

    def _kept_all(self, rows: Rows) -> bool:
        return {row for micro, _, _ in self._kept for row in micro.rows.tolist()} == set(rows.ids.tolist())

    @torch.no_grad()
    def kept_values(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Tensor:
        if not self._kept_all(rows):
            return self.values(rows, of)
        found: dict[int, Tensor] = {}
        for micro, log_probs, entropies in self._kept:
            values = of(rows.native.of_pass(micro, micro.unflatten(log_probs), micro.unflatten(entropies)))
            self._take(found, micro, values)
        return torch.cat([found[row] for row in rows.ids.tolist()], dim=-1)

    @contextmanager
    def noted_probabilities(self, rows: Rows, places: Sequence[int]) -> Iterator[Tensor | None]:
        if not places:
            yield None
            return
        config: Any = self.model.config
        found = torch.zeros(len(places), config.get_text_config().vocab_size)
        row_of, place_of = (part.tolist() for part in (rows.ids[rows.mask.nonzero()[:, 0]], _places(rows.mask)))
        wanted = {(row_of[place], place_of[place]): index for index, place in enumerate(places)}

        def note(micro: MicroBatch, logits: Tensor) -> None:
            counts = micro.mask.sum(1)
            begins = dict(zip(micro.rows.tolist(), (counts.cumsum(0) - counts).tolist(), strict=True))
            for (row, place), index in wanted.items():
                if row in begins:
                    own = logits[begins[row] + place].double() / self.temperature
                    found[index] = own.softmax(-1).float().cpu()

        with self._seeing_logits(note):
            yield found

    @contextmanager
    def _seeing_logits(self, see: Callable[[MicroBatch, Tensor], None]) -> Iterator[None]:
        self.policy.see_logits = see
        try:
            yield
        finally:
            self.policy.see_logits = None

    def gradient(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Gradient:
        parameters, total = self.policy.trainable(), dict[str, Tensor]()
        for micro in self._cut(rows, rows.ids, "training"):
            with torch.enable_grad():
                value = of(self._pass(rows.native, micro)).sum()
            if not value.requires_grad:
                raise GradtraceError("the value does not depend on any trainable parameter: are all weights frozen?")
            found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for name, own in zip(parameters, found, strict=True):
                if own is not None:
                    total[name] = total[name].add_(own) if name in total else own.clone()
        if self.ranks.size == 1:
            return total
        names = dict.fromkeys(name for theirs in self.ranks.gather(list(total)) for name in theirs)
        nothing = {name: torch.zeros_like(parameters[name]).detach() for name in names if name not in total}
        return {name: self.ranks.sum(total[name] if name in total else nothing[name]) for name in names}

    def listen(self, rows: Rows, of: Callable[[Pass], Tensor], around: Around, apart: bool = True) -> None:
        ends_without_embeddings = list(self.policy.trainable().values())
        for micro in self._cut(rows, rows.ids, "apart" if apart else "training"):
            with around(self.backward(rows.native, micro)), self.policy.own_pass() as ends, torch.enable_grad():
                value = of(self._pass(rows.native, micro)).sum()
                torch.autograd.grad(value, ends or ends_without_embeddings, allow_unused=True)

    def backward(self, source: Source, micro: MicroBatch, number: int | None = None) -> Backward:
        """Describe a pass over this micro-batch to observers."""
        update = source.update or OptimizerStep(0, 0, 0, 0, micro.rows)
        weights = source.weights[micro.rows] if len(source.weights) else torch.zeros(len(micro.rows))
        return Backward(
            update,
            update.number if number is None else number,
            micro.rows,
            weights * self.ranks.size,
            micro.response,
            micro.tokens,
            positions=self.policy.seen_by_head(micro),
            predicted_at=micro.logit_positions if micro.shares_prompts else None,
            prompt_rows=micro.prompt_rows,
        )

    def _cut(self, rows: Rows, ids: Tensor, how: How) -> Iterable[MicroBatch]:
        # Passes through sharded weights are made by every process, also by one that has no rows.
        return self.shown(rows.native.cut(ids, how)) if len(ids) or is_sharded(self.model) else ()

    def _pass(self, source: Source, micro: MicroBatch) -> Pass:
        log_probs, entropies = (micro.unflatten(values) for values in self.policy.statistics(micro))
        return source.of_pass(micro, log_probs, entropies)

    # ------------------------------------------------------------ the update

    def next_gradient(self) -> NextGradient | None:
        gradient = {name: p.grad for name, p in self.policy.trainable().items() if p.grad is not None}
        return NextGradient(gradient, 1.0)

    @contextmanager
    def aside(self) -> Iterator[None]:
        before = self.policy.full_precision
        self.policy.full_precision = True
        try:
            with super().aside():
                yield
        finally:
            self.policy.full_precision = before


class EmbeddedHost(PolicyHost):
    """The host of our own loop, where one process makes every pass."""

    def __init__(self, policy: Policy, optimizer: Optimizer, traits: TrainingPass, **more: Any) -> None:
        super().__init__(policy, optimizer.adamw, traits, **more)
        self.own_optimizer = optimizer

    def _trains_as_values(self) -> bool:
        return self.policy.device.type != "cuda" and not has_dropout(self.policy.model)  # in bf16 there

    @staticmethod
    def of(components: Components, report: Callable[[str], None]) -> EmbeddedHost:
        config = components.config
        return EmbeddedHost(
            components.policy,
            components.optimizer,
            loss_traits(config.algorithm),
            grad_clip=config.actor.optim.grad_clip,
            token_budget=config.actor.token_budget,
            step_size=step_size(config),
            report=report,
        )

    def next_gradient(self) -> NextGradient | None:
        gradient = {name: p.grad for name, p in self.policy.trainable().items() if p.grad is not None}
        return NextGradient(gradient, self.own_optimizer.clip_factor)

    def train_on(self, batch: RolloutBatch, micro_batches: MicroBatches, loss: PolicyLoss, step: OptimizerStep) -> None:
        """The passes of this optimizer step come next."""
        self._kept = []

        def cut(ids: Tensor, how: How) -> Iterable[MicroBatch]:
            if how == "fewest":
                return micro_batches.laid_out(self.policy.best_layout())(ids)
            return (micro_batches.with_prompts_apart() if how == "apart" else micro_batches)(ids)

        denominator = Denominator.of(batch.response_mask[step.rows], loss.max_response_length)
        own = token_weights(batch.response_mask[step.rows], loss.algorithm.aggregation, denominator).amax(1)
        weights = torch.zeros(len(batch), dtype=torch.float64)
        weights[step.rows] = own.double()
        self.source = Source(
            batch,
            cut,
            weights=weights,
            update=step,
            terms=partial(loss.terms, batch),
            policy_terms=partial(loss.policy_terms, batch),
        )


def _places(mask: Tensor) -> Tensor:
    """The index of every True in its row, one row after the other."""
    return (mask.cumsum(1) - 1)[mask]


def loss_traits(algorithm: AlgorithmConfig) -> TrainingPass:
    """What is true of every backward pass of this algorithm's loss."""
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    return TrainingPass(
        policy_gradient_at_ratio_one=loss.plain_at_ratio_one,
        kl_in_loss=algorithm.kl_coef > 0 or loss.own_kl,
        entropy_bonus=algorithm.entropy_coef != 0,
    )


class EmbeddedRun(TrainingRun):
    """What reporters may ask of our own loop."""

    def __init__(self, components: Components, report: Callable[[str], None]) -> None:
        config = components.config
        self.config = config
        self.components = components
        self.task, self.tokenizer = components.task, components.task.tokenizer
        self.seed = config.trainer.seed
        self.cannot = {}
        self.estimator = advantage(config.algorithm.advantage, **config.algorithm.advantage_options)
        self.step_size = step_size(config)
        self.report = report
        self.steps: EmbeddedSteps | None = None

    def token_weights(self, mask: Tensor) -> Tensor:
        denominator = Denominator.of(mask, self.config.rollout.max_new_tokens)
        return token_weights(mask, self.config.algorithm.aggregation, denominator)

    def held_out(self, count: int, key: str, files: Sequence[str] = (), unreported: bool = False) -> list[Prompt]:
        if files:
            return self.task.read_prompts(list(files), key)
        if not unreported:
            return self.task.held_out(count, key, self.report)
        validation = self.config.trainer.validation
        skipped = validation.prompts if validation.every else 0
        return self.task.validation_prompts(skipped + count)[skipped:]

    def ask(self, name: str, question: Any) -> Table:
        assert self.steps is not None
        return self.steps.ask(name, question)

    def sample(self, wanted: Samples) -> RolloutBatch:
        """Responses from the weights as they are, with random numbers of their own."""
        components, config = self.components, self.config.rollout
        more = EVERY_TOKEN if wanted.full_distribution else {}
        params = SamplingParams.of(config, self.task.stop_token_ids, n=wanted.n or config.n, **more)
        batch = rollout(components.sampler, wanted.prompts, params, wanted.generator)
        return judge(batch, self.tokenizer, components.reward) if wanted.judged else batch


class EmbeddedSteps(InstrumentSteps):
    """The instruments of a run in our own loop."""

    host: EmbeddedHost
    run: EmbeddedRun


def step_size(config: Config) -> StepSize:
    data, actor, rollout = config.data, config.actor, config.rollout
    return StepSize(data.train_batch_size, actor.mini_batch_size, rollout.n, rollout.max_new_tokens)


def open_instruments(
    components: Components, files: RunFiles, report: Callable[[str], None], writes: bool = True
) -> EmbeddedSteps:
    """The enabled instruments of a run. `report` shows a line to the user; without `writes` there are metrics alone."""
    config, task = components.config, components.task
    if enabled(config.trainer):
        files.write_token_bytes(TokenBytes.from_tokenizer(task.tokenizer))
    return _steps(components, config.trainer, files.traces if writes else None, report)


def no_instruments(components: Components, report: Callable[[str], None]) -> EmbeddedSteps:
    """Steps that nobody observes, until something is added."""
    return _steps(components, None, None, report)


def _steps(components: Components, sections: Any, folder: Path | None, report: Callable[[str], None]) -> EmbeddedSteps:
    host, run = EmbeddedHost.of(components, report), EmbeddedRun(components, report)
    meta = {"task": run.task.name, "temperature": host.temperature}
    run.steps = EmbeddedSteps(host, run, sections, folder, meta=meta, truth=run.task.truth)
    return run.steps
