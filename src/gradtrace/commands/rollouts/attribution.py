"""Stored rollouts scored under a model, without training: the passes of an update whose optimizer never moves."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradtrace.algorithms import advantage
from gradtrace.attribution import AttributionError
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.commands.rollouts.importing import PROMPTS
from gradtrace.config.loader import override_keys, to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Backward, Observer, OptimizerStep
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.entropy_trace import RECORD as ENTROPY_RECORD
from gradtrace.instruments.entropy_trace.reporter import entropy_columns
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.influence import RECORD as INFLUENCE_RECORD
from gradtrace.instruments.influence.observer import influence_observer
from gradtrace.instruments.influence.reporter import InfluenceReporter
from gradtrace.instruments.observers import Observers
from gradtrace.instruments.own_loop import stored_batch, stored_truth
from gradtrace.instruments.record import Record
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.rollouts import add_advantages
from gradtrace.runs import Run, open_run
from gradtrace.terminal import StageProgress, seconds
from gradtrace.trace.columns import GroupStatus
from gradtrace.trace.reader import RunReader
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.step import Step
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.host import EmbeddedHost, loss_traits
from gradtrace.training.state import FOREIGN, load_optimizer
from gradtrace.training.update import PolicyUpdate

SOURCES = (ENTROPY_TRACE, INFLUENCE_TRACE)
"""Traces that hold a step's responses, the most complete first."""
BY_TOKEN = ("gae", "reinforce_plus_plus", "turn_rloo")
"""Estimators that may give tokens of one response different advantages."""
STATE = "the optimizer's state in {}"
NO_STATE = "no state: the second moment is that of the step's own gradient, as in AdamW's first step"


@dataclass
class Attributed:
    folder: Path
    optimizer: str
    """What the geometry of the scores was taken from."""
    done: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """Steps that an earlier call has scored."""
    left: list[int] = field(default_factory=list)
    responses: int = 0
    tokens: int = 0


Message = Callable[[str], None]


def attribute(args: argparse.Namespace, progress: StageProgress, message: Message) -> Attributed:
    """Score the chosen steps of a run under a model, one file after the other, until the budget is spent. `args`: of
    the command, where its options are described."""
    ends = time.monotonic() + seconds(args.budget)
    run = scoring_run(args.run_dir, args.model, args.overrides)
    identity = hashlib.sha256(
        f"{run.checkpoint().seal} {to_yaml(dataclasses.replace(run.settings, resume=''))}".encode()
    ).hexdigest()
    target = args.output or run.path
    there = RunReader(target)
    steps = chosen_steps(run, args.step)
    before = written_before(there, steps, identity, args)
    result = Attributed(target, "", before=before)
    remaining = [step for step in steps if step not in before]
    if not remaining:
        return result
    progress("loading the model", 0, 1)
    scorer = Scorer(run, message)
    result.optimizer = scorer.optimizer_said
    if args.output is not None:
        new_run(run, args.output)
    about = {"attributed": identity, "model": args.model, "optimizer_state": scorer.optimizer_said}
    writing: dict[str, Any] = {"on_error": "raise", "on_report": message}
    with RunFiles(target) as files, TraceWriter(files.traces, INFLUENCE_TRACE, **writing) as influence:
        files.messages.tell(f"attribute: {args.model}; {scorer.optimizer_said}")
        for place, step in enumerate(remaining):
            if result.done and time.monotonic() > ends:
                result.left = remaining[place:]
                break
            source = run.step(next(kind for kind in SOURCES if step in run.steps(kind)), step)
            groups = groups_of(source, there, args.group)
            stays = args.output is None and has_own_entropies(source)
            tell = functools.partial(progress, f"step {step}")
            with nullcontext() if stays else TraceWriter(files.traces, ENTROPY_TRACE, **writing) as entropies:
                found = scorer.score(source, groups, influence, entropies, about, tell)
            influence.flush()
            result.done.append(step)
            result.responses += int(found["influence_trace/rows_emitted"])
            result.tokens += int(found["influence_trace/tokens_emitted"])
    return result


# ---------------------------------------------------------------- what is there, and where scores go


def scoring_run(path: Path, model: str, overrides: list[str]) -> Run:
    """The run with the weights of `model`, and with settings that score all of its rollouts. What judges responses is
    left out, unless `overrides` name it: their rewards are stored."""
    no_judge = ["reward.path=''", "reward.name=task", "reward.options={}", "reward.extra={}"]
    has_judge = "reward.path" in override_keys(overrides) or not (path / "config.yaml").is_file()
    run = open_run(path, overrides if has_judge else [*no_judge, *overrides]).with_model(model)
    trainer = run.settings.trainer
    trace = dataclasses.replace(trainer.influence_trace, write_every=1, on_error="raise", verify_every=0)
    trainer = copy.copy(trainer)
    trainer.influence_trace = trace
    run.settings = dataclasses.replace(run.settings, trainer=trainer, engine="embedded", verl={})
    return run


def rollout_steps(run: RunReader) -> list[int]:
    return sorted({step for kind in SOURCES for step in run.steps(kind)})


def chosen_steps(run: RunReader, wanted: list[int]) -> list[int]:
    there = rollout_steps(run)
    if not there:
        raise GradtraceError(
            f"{run.path} has no stored rollouts: there is no entropy trace and no influence trace in it"
        )
    if missing := sorted(set(wanted) - set(there)):
        raise GradtraceError(f"no rollouts of step {missing[0]}; {run.path} has steps {there[0]} to {there[-1]}")
    return sorted(wanted) if wanted else there


def written_before(there: RunReader, steps: list[int], identity: str, args: argparse.Namespace) -> list[int]:
    """Steps that have these very scores already; an error where a step has others."""
    found = []
    for step in (step for step in steps if step in there.steps(INFLUENCE_TRACE)):
        trace = there.step(INFLUENCE_TRACE, step)
        if trace.meta.get("attributed") == identity:
            if set(args.group) <= set(trace["group"].tolist()):
                found.append(step)
        elif not args.replace:
            by = f"by {trace.meta['model']}" if "attributed" in trace.meta else "of its training"
            raise GradtraceError(
                f"step {step} of {there.path} has scores {by}: put these into a run of their own with --output "
                "runs/NAME, or replace those with --replace"
            )
    return found


def groups_of(source: Step, there: RunReader, wanted: list[int]) -> list[int]:
    """The groups to score: those that were asked for, and those that an earlier call has scored with them."""
    if outside := [g for g in wanted if not 0 <= g < source.n_groups]:
        raise GradtraceError(f"no group {outside[0]}; step {source.step} has groups 0 to {source.n_groups - 1}")
    if not wanted or source.step not in there.steps(INFLUENCE_TRACE):
        return wanted
    trace = there.step(INFLUENCE_TRACE, source.step)
    return sorted({*wanted, *(trace["group"].tolist() if "attributed" in trace.meta else [])})


def has_own_entropies(source: Step) -> bool:
    """Of the policy that sampled: they are not overwritten by those of another."""
    return source.kind == ENTROPY_TRACE and "entropy" in source and "attributed" not in source.meta


def new_run(run: RunReader, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "token_bytes.npz", PROMPTS):
        if (run.path / name).is_file() and not (folder / name).exists():
            shutil.copy(run.path / name, folder / name)


# ---------------------------------------------------------------- the scores


class Watched(Observers):
    """Reports how many responses went through the model."""

    def __init__(self, observer: Observer, total: int, progress: Callable[[int, int], None]) -> None:
        super().__init__(Ranks(), {INFLUENCE_TRACE: observer}, raising=[INFLUENCE_TRACE])
        self.done, self.total, self.progress = 0, total, progress

    @contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        self.progress(self.done, self.total)
        self.done += len(backward.rows)
        with super().around_backward(backward):
            yield


class OwnGradient(Observer):
    """Makes the gradient of an update the optimizer's state, as if it had taken that one step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def before_step(self, update: OptimizerStep) -> None:
        adamw = self.optimizer.adamw
        first, second = adamw.param_groups[0]["betas"]
        for parameter in self.optimizer.parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            adamw.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": (1 - first) * gradient,
                "exp_avg_sq": (1 - second) * gradient.square(),
            }


class Scorer:
    """A model with the optimizer that would go on from it, and the loss of the run's algorithm."""

    def __init__(self, run: Run, message: Message) -> None:
        self.config = config = run.settings
        self.message = message
        self.policy = run.policy(trainable=True, precision="float32")
        self.optimizer = Optimizer(self.policy.trainable(), config.actor.optim, config.trainer.total_steps)
        self.optimizer_said, found = NO_STATE, run.checkpoint()
        self.follows_schedule = found.optimizer_file is None or found.optimizer_file.name != FOREIGN
        """The state of another trainer brings its own learning rate."""
        if found.optimizer_file is not None:
            load_optimizer(self.optimizer, self.policy.model, found)
            self.optimizer_said = STATE.format(found.optimizer_file.parent)
        algorithm = config.algorithm
        if algorithm.kl_coef:
            message("The KL term of the loss is left out: stored rollouts have no log-probs of the reference.")
        if run.config.get("engine") == "trl":
            message(f"The loss of TRL is taken for ours: algorithm.policy_loss={algorithm.policy_loss}.")
        if algorithm.advantage in BY_TOKEN:
            message(
                f"Stored advantages are means over a response; those of algorithm.advantage={algorithm.advantage} may "
                "differ from token to token, so scores may differ from those of training."
            )
        self.algorithm = dataclasses.replace(algorithm, kl_coef=0.0)
        loss = PolicyLoss(self.policy, self.algorithm, config.rollout.max_new_tokens)
        if "ref_log_probs" in loss.policy_loss.needs:
            raise GradtraceError(
                f"algorithm.policy_loss={algorithm.policy_loss} needs log-probs of a reference policy, which stored "
                "rollouts have not: score with another, e.g. algorithm.policy_loss=ppo"
            )
        self.update = PolicyUpdate(loss, self.optimizer, moves=False)
        self.host = EmbeddedHost(
            self.policy,
            self.optimizer,
            loss_traits(self.algorithm),
            grad_clip=config.actor.optim.grad_clip,
            token_budget=config.actor.token_budget,
        )

    def score(
        self,
        source: Step,
        groups: list[int],
        writer: TraceWriter,
        entropy_writer: TraceWriter | None,
        about: dict[str, Any],
        progress: Callable[[int, int], None],
    ) -> dict[str, float]:
        """Write the step's traces; returns the metrics of the influence trace."""
        batch = self.with_advantages(stored_batch(source))
        meta = {**source.meta, **about}
        config, truth = self.config.trainer.influence_trace, stored_truth(source)
        reporter = InfluenceReporter(Record(INFLUENCE_RECORD, config, writer, meta, truth, self.message))
        needed = groups if groups and entropy_writer is None else list(range(len(batch.prompts)))
        updates = self.mini_batches(batch, source.step, needed)
        micro_batches = MicroBatches(batch, self.config.actor.token_budget, "padded")
        try:
            observer = influence_observer(self.host, config)
            observers = Watched(observer, sum(len(update.rows) for update in updates), progress)
            self.begin_step(batch, micro_batches, source.step)
            _, plan = reporter.plan(batch, source.step)
            if plan is not None and groups:
                others = torch.ones(len(batch.prompts), dtype=torch.bool)
                others[list(groups)] = False
                plan.status[others & (plan.status == int(GroupStatus.SCORED))] = int(GroupStatus.NOT_ASKED)
            observers.begin({INFLUENCE_TRACE: plan})
            batch, _ = self.update.run(batch, micro_batches, updates, observers, self.host)
            tables = observers.end()
            if entropy_writer is not None:
                record = Record(ENTROPY_RECORD, None, entropy_writer, meta, truth)
                record.write(source.step, batch, torch.arange(len(batch)), entropy_columns(batch), {})
            found = reporter.write(batch, source.step, tables[INFLUENCE_TRACE])
        except AttributionError as error:
            raise GradtraceError(f"step {source.step} cannot be scored: {error}") from error
        return found

    def begin_step(self, batch: RolloutBatch, micro_batches: MicroBatches, step: int) -> None:
        """Make the optimizer what it was before this step: its learning rate and, for scores of captured factors, its
        second moment where there is no state. The default score has the step that an empty state leads to."""
        if self.follows_schedule:
            self.optimizer.begin_step(step)
        if self.optimizer_said == NO_STATE and not self.config.trainer.influence_trace.is_parts:
            self.take_own_gradient(batch, micro_batches, step)

    def take_own_gradient(self, batch: RolloutBatch, micro_batches: MicroBatches, step: int) -> None:
        """Make the gradient of the whole rollout the optimizer's state, as if it had taken that one step."""
        whole = OptimizerStep(step, 0, 0, 0, torch.arange(len(batch)))
        observers = Observers(self.host.ranks, {"state": OwnGradient(self.optimizer)}, raising=["state"])
        observers.begin({"state": True})
        self.update.run(batch, micro_batches, [whole], observers, self.host)

    def mini_batches(self, batch: RolloutBatch, step: int, groups: list[int]) -> list[OptimizerStep]:
        """Mini-batches with any of `groups`: prompts in their order, as many to an optimizer step as in training, all
        at the weights as they are."""
        size = self.config.actor.mini_batch_size or len(batch.prompts)
        every = torch.arange(len(batch.prompts))
        return [
            OptimizerStep(step, 0, index, 0, rows)
            for index, chosen in enumerate(every.split(size))
            if len(rows := torch.isin(batch.group, chosen).nonzero().squeeze(-1)) and set(groups) & set(chosen.tolist())
        ]

    def with_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        """The stored advantages, else those of the run's estimator, else GRPO's."""
        if batch.advantages is not None:
            return batch
        estimator = advantage(self.algorithm.advantage, **self.algorithm.advantage_options)
        if estimator.needs:
            self.message(
                f"algorithm.advantage={self.algorithm.advantage} needs {', '.join(sorted(estimator.needs))}, which are "
                "not stored: advantages are those of grpo."
            )
            estimator = advantage("grpo")
        return add_advantages(batch, estimator)
