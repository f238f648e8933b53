"""Stored rollouts scored under a model, without training: the passes of an update whose optimizer never moves."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from gradtrace.algorithms import advantage
from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.commands.rollouts.importing import PROMPTS, at_home
from gradtrace.config import Config
from gradtrace.config.keys import check_fields
from gradtrace.config_loader import finished, load_config, override_keys, to_yaml, with_overrides
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_trace.instrument import EntropyTrace
from gradtrace.instruments.influence.instrument import InfluenceTraceInstrument
from gradtrace.instruments.influence.plan import StepPlan
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.observer import Backward, Observers, OptimizerStep, StepObserver
from gradtrace.instruments.stored import stored_batch, stored_truth
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy, load_with_adapters
from gradtrace.policy.rollouts import add_advantages
from gradtrace.trace.kinds.shared import GroupStatus
from gradtrace.trace.reader import Run, open_run
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import ENTROPY_TRACE, INFLUENCE_TRACE
from gradtrace.trace.step import Step
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.checkpoint import model_of, weights_seal
from gradtrace.training.foreign_state import FOREIGN, load_foreign_state
from gradtrace.training.instruments import loss_traits
from gradtrace.training.parts import suitable_threads
from gradtrace.training.state import OPTIMIZER
from gradtrace.training.update import PolicyUpdate

SOURCES = (ENTROPY_TRACE, INFLUENCE_TRACE)
"""Traces that hold a step's responses, the most complete first."""
BY_TOKEN = ("gae", "reinforce_plus_plus", "turn_rloo")
"""Estimators that may give tokens of one response different advantages."""
STATE = "the optimizer's state in {}"
NO_STATE = "no state: the second moment is that of the step's own gradient, as in AdamW's first step"


@dataclass(frozen=True)
class AttributeSettings:
    model: str
    steps: list[int] = field(default_factory=list)
    """Empty: all."""
    groups: list[int] = field(default_factory=list)
    """Indices of the groups to score, in every step; empty: all whose rewards differ."""
    output: Path | None = None
    """A new run for the scores; None: into the run itself."""
    replace: bool = False
    budget: float = 0.0
    """Seconds; 0: none."""


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


Progress = Callable[[str, int, int], None]
Message = Callable[[str], None]


def attribute(
    run_dir: Path, overrides: list[str], settings: AttributeSettings, progress: Progress, message: Message
) -> Attributed:
    """Score the chosen steps of run `run_dir` under a model, one file after the other, until the budget is spent."""
    run = open_run(run_dir)
    folder = Path(model_of(settings.model))
    config = config_of(run, folder, overrides)
    identity = hashlib.sha256(
        f"{weights_seal(folder)} {to_yaml(dataclasses.replace(config, resume=''))}".encode()
    ).hexdigest()
    target = settings.output or run.path
    steps = chosen_steps(run, settings.steps)
    before = written_before(target, steps, identity, settings)
    result = Attributed(target, "", before=before)
    remaining = [step for step in steps if step not in before]
    if not remaining:
        return result
    progress("loading the model", 0, 1)
    scorer = Scorer(folder, config, message)
    result.optimizer = scorer.optimizer_said
    if settings.output is not None:
        new_run(run, settings.output)
    ends = time.monotonic() + settings.budget if settings.budget else float("inf")
    about = {"attributed": identity, "model": settings.model, "optimizer_state": scorer.optimizer_said}
    writing: dict[str, Any] = {"on_error": "raise", "on_report": message}
    with RunFiles(target) as files, TraceWriter(files.traces, INFLUENCE_TRACE, **writing) as influence:
        files.messages.tell(f"attribute: {settings.model}; {scorer.optimizer_said}")
        for place, step in enumerate(remaining):
            if result.done and time.monotonic() > ends:
                result.left = remaining[place:]
                break
            source = run.step(next(kind for kind in SOURCES if step in run.steps(kind)), step)
            groups = groups_of(source, target, step, settings.groups)
            stays = entropies_stay(source, settings)
            tell = functools.partial(progress, f"step {step}")
            with nullcontext() if stays else TraceWriter(files.traces, ENTROPY_TRACE, **writing) as entropies:
                found = scorer.score(source, groups, influence, entropies, about, tell)
            influence.flush()
            result.done.append(step)
            result.responses += int(found["influence_trace/rows_emitted"])
            result.tokens += int(found["influence_trace/tokens_emitted"])
    return result


# ---------------------------------------------------------------- what is there, and where scores go


def config_of(run: Run, folder: Path, overrides: list[str]) -> Config:
    """The run's settings with this model; the defaults where a run has none, as one that `gradtrace.record` wrote."""
    given = override_keys(overrides)
    own = [f"model.path={folder}", *overrides]
    if (run.path / "config.yaml").is_file():
        no_judge = ["reward.path=''", "reward.name=task", "reward.options={}", "reward.extra={}"]
        judge = [] if "reward.path" in given else no_judge
        config = load_config([f"resume={run.path}", *judge, *own])
    else:
        defaults: Any = OmegaConf.structured(Config)
        config = finished(with_overrides(defaults, own), defaults, override_keys(own))
        check_fields(config)
    trace = dataclasses.replace(config.trainer.influence_trace, write_every=1, on_error="raise", verify_every=0)
    trainer = dataclasses.replace(config.trainer, influence_trace=trace)
    return at_home(dataclasses.replace(config, trainer=trainer, engine="embedded", verl={}), run.path)


def rollout_steps(run: Run) -> list[int]:
    return sorted({step for kind in SOURCES for step in run.steps(kind)})


def chosen_steps(run: Run, wanted: list[int]) -> list[int]:
    there = rollout_steps(run)
    if not there:
        raise GradtraceError(
            f"{run.path} has no stored rollouts: there is no entropy trace and no influence trace in it"
        )
    if missing := sorted(set(wanted) - set(there)):
        raise GradtraceError(f"no rollouts of step {missing[0]}; {run.path} has steps {there[0]} to {there[-1]}")
    return sorted(wanted) if wanted else there


def written_before(target: Path, steps: list[int], identity: str, settings: AttributeSettings) -> list[int]:
    """Steps that have these very scores already; an error where a step has others."""
    if not target.is_dir():
        return []
    there = open_run(target)
    found = []
    for step in (step for step in steps if step in there.steps(INFLUENCE_TRACE)):
        trace = there.step(INFLUENCE_TRACE, step)
        scored = set(trace["group"].tolist())
        if trace.meta.get("attributed") == identity:
            if settings.groups and not set(settings.groups) <= scored:
                continue
            found.append(step)
        elif not settings.replace:
            by = f"by {trace.meta['model']}" if "attributed" in trace.meta else "of its training"
            raise GradtraceError(
                f"step {step} of {target} has scores {by}: put these into a run of their own with --output runs/NAME, "
                "or replace those with --replace"
            )
    return found


def groups_of(source: Step, target: Path, step: int, wanted: list[int]) -> list[int]:
    """The groups to score: those that were asked for, and those that an earlier call has scored with them."""
    if not wanted:
        return []
    if outside := [g for g in wanted if not 0 <= g < source.n_groups]:
        raise GradtraceError(f"no group {outside[0]}; step {step} has groups 0 to {source.n_groups - 1}")
    there = open_run(target)
    if step not in there.steps(INFLUENCE_TRACE):
        return wanted
    trace = there.step(INFLUENCE_TRACE, step)
    return sorted({*wanted, *(trace["group"].tolist() if "attributed" in trace.meta else [])})


def entropies_stay(source: Step, settings: AttributeSettings) -> bool:
    """The run's own entropies, of the policy that sampled, are not overwritten by those of another."""
    own = "entropy" in source and "attributed" not in source.meta
    return settings.output is None and source.kind == ENTROPY_TRACE and own


def new_run(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "token_bytes.npz", PROMPTS):
        if (run.path / name).is_file() and not (folder / name).exists():
            shutil.copy(run.path / name, folder / name)


# ---------------------------------------------------------------- the scores


class ChosenGroups(InfluenceRecord):
    """Scores some groups; the others are in the step's gradient and are skipped."""

    groups: Sequence[int] = ()

    def plan(self, batch: RolloutBatch, step: int) -> StepPlan:
        plan = super().plan(batch, step)
        if self.groups:
            others = torch.ones(len(batch.prompts), dtype=torch.bool)
            others[list(self.groups)] = False
            plan.status[others & (plan.status == int(GroupStatus.SCORED))] = int(GroupStatus.NOT_ASKED)
        return plan


class Counted(StepObserver):
    """Reports how many responses went through the model."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def around_backward(self, backward: Backward) -> Any:
        self.progress(self.done, self.total)
        self.done += len(backward.micro.rows)
        return nullcontext()


class OwnGradient(StepObserver):
    """Makes the gradient of an update the optimizer's state, as if it had taken that one step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def around_optimizer_step(self, update: OptimizerStep) -> Any:
        adamw = self.optimizer.adamw
        first, second = adamw.param_groups[0]["betas"]
        for parameter in self.optimizer.parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            adamw.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": (1 - first) * gradient,
                "exp_avg_sq": (1 - second) * gradient.square(),
            }
        return nullcontext()


class Scorer:
    """A model with the optimizer that would go on from it, and the loss of the run's algorithm."""

    def __init__(self, folder: Path, config: Config, message: Message) -> None:
        self.config, self.message = config, message
        model = load_with_adapters(folder, config.model, trainable=True, key="--model")
        self.policy = Policy(model, next(model.parameters()).device, config.rollout.temperature)
        if self.policy.device.type == "cpu":
            torch.set_num_threads(config.trainer.cpu_threads or suitable_threads(self.policy))
        self.optimizer = Optimizer(self.policy.trainable(), config.actor.optim, config.trainer.total_steps)
        state = folder.parent / OPTIMIZER
        self.optimizer_said = NO_STATE
        if folder.name == "policy" and state.is_file():
            self.optimizer.load_state_tensors(load_file(state))
            self.optimizer_said = STATE.format(state.parent)
        elif (folder / FOREIGN).is_file():
            load_foreign_state(self.optimizer, model, folder / FOREIGN)
            self.optimizer_said = STATE.format(folder)
        algorithm = config.algorithm
        if algorithm.kl_coef:
            message("The KL term of the loss is left out: stored rollouts have no log-probs of the reference.")
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
        record = ChosenGroups(config, writer, meta, truth, self.message)
        record.groups = groups
        try:
            instrument = InfluenceTraceInstrument(
                self.policy,
                record,
                loss_traits(self.algorithm),
                self.optimizer.adamw,
                grad_clip=self.config.actor.optim.grad_clip,
            )
            own = [EntropyTrace(entropy_writer, 1, meta, truth)] if entropy_writer is not None else []
            needed = groups if groups and entropy_writer is None else list(range(len(batch.prompts)))
            updates = self.mini_batches(batch, source.step, needed)
            rows = sum(len(update.rows) for update in updates)
            observers = Observers([Counted(rows, progress), *own, instrument])
            micro_batches = MicroBatches(batch, self.config.actor.token_budget, "padded")
            if self.optimizer_said == NO_STATE:
                whole = OptimizerStep(source.step, 0, 0, 0, torch.arange(len(batch)))
                self.update.run(batch, micro_batches, [whole], OwnGradient(self.optimizer))
            batch = observers.before_update(batch, source.step)
            batch, _ = self.update.run(batch, micro_batches, updates, observers)
            found = observers.after_update(batch, source.step)
            instrument.tracer.close()
        except AttributionError as error:
            raise GradtraceError(f"step {source.step} cannot be scored: {error}") from error
        return found

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
