"""The embedded training loop: one process, CPU or one GPU. A step reads from top to bottom in `train_step`."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import OptimizerStep
from gradtrace.instruments.findings.watch import Findings
from gradtrace.metrics import GENERATED, Timer, batch_metrics
from gradtrace.policy.attention import can_attend, is_supported
from gradtrace.policy.load import export_model
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import (
    WORTH_PACKING,
    WORTH_SHARING,
    InputLayout,
    MicroBatches,
    padding_share,
    shared_share,
)
from gradtrace.policy.rollouts import add_advantages, add_rollouts
from gradtrace.terminal import command
from gradtrace.trace.files import atomic_directory
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.checkpoint import Checkpoints
from gradtrace.training.components import Components
from gradtrace.training.experience import Experience, validate
from gradtrace.training.host import EmbeddedSteps, no_instruments
from gradtrace.training.logger import Tracker
from gradtrace.training.state import LightState, save_state
from gradtrace.training.terminal import Display
from gradtrace.training.update import PolicyUpdate, plan_updates


class Trainer:
    def __init__(
        self,
        components: Components,
        files: RunFiles,
        display: Display,
        steps: EmbeddedSteps | None = None,
        trackers: list[Tracker] | None = None,
        findings: Findings | None = None,
    ) -> None:
        config = components.config
        self.components = components
        self.config = config
        self.files = files
        self.steps = steps or no_instruments(components, display.message)
        self.display = display
        self.trackers = trackers or []
        self.findings = findings
        self.checkpoints = Checkpoints(files.path, config.trainer.checkpoint.keep_last)
        self.estimator = advantage(config.algorithm.advantage, **config.algorithm.advantage_options)
        self.experience = Experience.of(components, config.data.train_batch_size)
        loss = PolicyLoss(components.policy, config.algorithm, config.rollout.max_new_tokens)
        self.update = PolicyUpdate(loss, components.optimizer, moves=not config.trainer.skip_optimizer)
        self._attends_to = 0
        """The longest sequence that our own attention is known to compute for this model."""

    def fit(self, last_step: int = 0) -> int:
        """Train from step `last_step` + 1 to the end, or until Ctrl-C. Returns the last step made, saved."""
        settings = self.config.trainer
        self.files.truncate_after(last_step)
        self.steps.start(last_step)
        if self.findings is not None:
            self.findings.start(last_step)
        if last_step == 0 and settings.validation.every and settings.validation.before_training:
            metrics = self._validate(Timer())
            self._log(0, metrics)
            if self.findings is not None:
                self.findings.remember(0, metrics)
        step = last_step
        try:
            with Interrupt(self.display.message) as interrupt:
                while step < settings.total_steps and not interrupt.requested:
                    self._guarded_step(step + 1)
                    step += 1
                    if settings.checkpoint.every and step % settings.checkpoint.every == 0:
                        self.save(step)
                self.save(step)
            if step == settings.total_steps:
                self.export()
        finally:
            self.steps.close()
            for tracker in self.trackers:
                tracker.close()
        return step

    def _guarded_step(self, step: int) -> None:
        """One step, logged. If it fails before the weights move, the state before it is saved."""
        before = LightState.of(self.components)
        timer = Timer()
        try:
            batch, metrics = self.experience.collect(self.components.generators["rollout"], timer)
        except GradtraceError as error:
            before.restore(self.components)
            self.save(step - 1)
            raise GradtraceError(
                f"Step {step}: {error}\nThe run is saved as it was before this step. Mend the cause, then continue "
                f"with: {command()} train resume={self.files.path}"
            ) from error
        batch, step_metrics = self.train_step(batch, step, timer)
        generated = metrics[GENERATED] + step_metrics.get(GENERATED, 0.0)  # instruments may sample, too
        metrics.update({**step_metrics, GENERATED: generated})
        validation = self.config.trainer.validation
        if validation.every and step % validation.every == 0:
            metrics.update(self._validate(timer))
        if self.findings is not None:
            metrics.update(self.findings.see(step, batch, metrics))
        tokens = float((batch.prompt_lengths + batch.response_lengths).sum())
        metrics.update(timer.metrics())
        metrics["perf/total_num_tokens"] = tokens
        metrics["perf/throughput"] = tokens / timer.total
        self._log(step, metrics)
        self.display.step(step, metrics)
        if self.config.trainer.samples_every and step % self.config.trainer.samples_every == 0:
            self.display.samples(step, batch)

    def train_step(self, batch: RolloutBatch, step: int, timer: Timer) -> tuple[RolloutBatch, dict[str, float]]:
        """Learn from a batch with rewards. Returns it with every column that the step made, and metrics."""
        components, actor = self.components, self.config.actor
        generator = components.generators["update"]
        self.steps.sample(step, self.steps.run.sample)
        if (more := self.steps.more_rollouts(step)) is not None:
            batch = add_rollouts(batch, more, components.sampler.pad_token_id)
        micro_batches = MicroBatches(batch, actor.token_budget, self._layout(batch))
        metrics = {"actor/lr": components.optimizer.begin_step(step)}

        if "old_log_probs" in self.estimator.needs:
            with timer("old_log_prob"):
                batch = fill_statistics(components.policy, batch, micro_batches, torch.arange(len(batch)))
        if components.reference is not None:
            with timer("ref"):
                batch = components.reference.add_log_probs(batch, micro_batches(torch.arange(len(batch))))
        if components.critic is not None:
            with timer("values"):
                batch = components.critic.add_values(batch, micro_batches)
        with timer("adv"):
            batch = add_advantages(batch, self.estimator)

        batch = self.steps.begin(batch, step)
        updates = plan_updates(batch, actor.mini_batch_size, actor.epochs, actor.shuffle, step, generator)
        with timer("old_log_prob"):
            batch = self._add_old_log_probs(batch, micro_batches, updates)
        if components.critic is not None:
            with timer("update_critic"):
                metrics["critic/lr"] = components.critic.optimizer.begin_step(step)
                critic_updates = plan_updates(
                    batch, actor.mini_batch_size, self.config.critic.epochs, actor.shuffle, step, generator
                )
                metrics.update(components.critic.update(batch, micro_batches, critic_updates))
        if components.critic is None or step > self.config.critic.warmup_steps:
            with timer("update_actor"):
                batch, update_metrics = self.update.run(
                    batch, micro_batches, updates, self.steps.observers, self.steps.host
                )
            metrics.update(update_metrics)
        metrics.update(self.steps.finish(batch, step))
        metrics.update(batch_metrics(batch))
        return batch, metrics

    def save(self, step: int) -> Path:
        return self.checkpoints.save(step, lambda folder: save_state(folder, self.components, step, self.steps.state()))

    def export(self) -> None:
        """The trained policy as a plain transformers folder, adapters merged: RUN/policy."""
        target = self.files.path / "policy"
        shutil.rmtree(target, ignore_errors=True)  # of an earlier end of this run
        with atomic_directory(target) as folder:
            export_model(self.components.policy.model, folder)
            self.components.task.tokenizer.save_pretrained(folder)

    def _add_old_log_probs(
        self, batch: RolloutBatch, micro_batches: MicroBatches, updates: list[OptimizerStep]
    ) -> RolloutBatch:
        """Log-probs of the sampling policy for all rows but those of the first optimizer step, which makes its own."""
        if batch.old_log_probs is not None:
            return batch
        later = torch.ones(len(batch), dtype=torch.bool)
        if updates:
            later[updates[0].rows] = False
        rows = later.nonzero().squeeze(-1)
        if not len(rows):
            return batch
        if not self._sampler_is_exact():
            return fill_statistics(self.components.policy, batch, micro_batches, rows)
        if self.steps.needs_entropies(updates[0].step if updates else 0):
            batch = fill_statistics(self.components.policy, batch, micro_batches, rows)
        # The loss uses the same log-probs whether or not anybody watches.
        return batch.replace(old_log_probs=batch.sampler_log_probs.clone())

    def _sampler_is_exact(self) -> bool:
        """The sampler's log-probs are those of the same float32 distribution that the loss uses."""
        rollout, source = self.config.rollout, self.config.actor.old_log_probs
        ours = rollout.engine == "embedded" and rollout.precision == "float32"
        exact = ours and self.components.policy.device.type == "cpu"
        full = exact and rollout.top_p == 1 and rollout.top_k == 0
        return source == "sampler" or (source == "auto" and full)

    def _layout(self, batch: RolloutBatch) -> InputLayout:
        """How responses are laid out for the model: see `microbatch`. Whether anybody watches has no part in it."""
        actor, model = self.config.actor, self.config.model
        if actor.share_prompts == "always":
            return "shared"
        # Checkpointing recomputes inside the backward pass, where our own attention is not in force.
        own_attention = (
            model.attention in ("auto", "sdpa")
            and not model.gradient_checkpointing
            and is_supported(self.components.policy.model)
        )
        may_share = actor.share_prompts == "auto" and actor.packing == "auto" and own_attention
        if may_share and self._gains_by_sharing(batch):
            return "shared"
        if actor.packing == "auto":
            can_pack = own_attention or model.attention.startswith("flash")
            return "packed" if can_pack and padding_share(batch) > WORTH_PACKING else "padded"
        return "packed" if actor.packing == "always" else "padded"

    def _gains_by_sharing(self, batch: RolloutBatch) -> bool:
        """On a GPU nobody has measured it: attention with a mask of its own may take more than sharing saves."""
        policy = self.components.policy
        if policy.device.type != "cpu" or shared_share(batch) <= WORTH_SHARING:
            return False
        longest = int((batch.prompt_lengths + batch.response_lengths).max())
        if longest > self._attends_to:
            self._attends_to = longest if can_attend(policy.model, longest) else -1
        return longest <= self._attends_to

    def _validate(self, timer: Timer) -> dict[str, float]:
        with timer("testing"):
            return validate(self.components)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.files.log(step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)


class Interrupt:
    """Ctrl-C or SIGTERM: the first one lets the step finish, a second one stops at once.

    `with Interrupt(say) as interrupt:` … `if interrupt.requested: save and leave`.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("Finishing this step, then saving. Press Ctrl-C again to stop at once.")
