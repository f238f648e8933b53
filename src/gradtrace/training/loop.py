"""The embedded training loop: one process, CPU or one GPU. A step reads from top to bottom in `train_step`."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.findings.watch import Findings
from gradtrace.instruments.observer import OptimizerStep, StepObserver
from gradtrace.metrics import GENERATED, Timer, batch_metrics
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import (
    WORTH_PACKING,
    WORTH_SHARING,
    Layout,
    MicroBatches,
    padding_share,
    shared_share,
)
from gradtrace.policy.packed_attention import can_attend, is_supported
from gradtrace.policy.policy import export_model
from gradtrace.policy.rollouts import add_advantages, add_rollouts
from gradtrace.program import command
from gradtrace.rollout import SamplingParams
from gradtrace.trace.atomic import atomic_directory
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.checkpoint import Checkpoints
from gradtrace.training.experience import Experience
from gradtrace.training.interrupt import Interrupt
from gradtrace.training.logger import Tracker
from gradtrace.training.parts import Parts
from gradtrace.training.state import LightState, save_observer_state, save_state
from gradtrace.training.terminal import Display
from gradtrace.training.update import PolicyUpdate, plan_updates
from gradtrace.training.validation import validate


class Trainer:
    def __init__(
        self,
        parts: Parts,
        files: RunFiles,
        observer: StepObserver,
        display: Display,
        trackers: list[Tracker] | None = None,
        findings: Findings | None = None,
    ) -> None:
        config = parts.config
        self.parts = parts
        self.config = config
        self.files = files
        self.observer = observer
        self.display = display
        self.trackers = trackers or []
        self.findings = findings
        self.checkpoints = Checkpoints(files.path, config.trainer.checkpoint.keep_last)
        self.estimator = advantage(config.algorithm.advantage, **config.algorithm.advantage_options)
        self.experience = Experience(
            parts.task,
            parts.reward,
            parts.sampler,
            SamplingParams.of(config.rollout, parts.task.stop_token_ids),
            config.algorithm,
            config.data.train_batch_size,
            config.reward.flip_probability,
        )
        loss = PolicyLoss(parts.policy, config.algorithm, config.rollout.max_new_tokens)
        self.update = PolicyUpdate(loss, parts.optimizer, moves=not config.trainer.skip_optimizer)
        self._attends_to = 0
        """The longest sequence that our own attention is known to compute for this model."""

    def fit(self, last_step: int = 0) -> int:
        """Train from step `last_step` + 1 to the end, or until Ctrl-C. Returns the last step made, saved."""
        settings = self.config.trainer
        self.files.truncate_after(last_step)
        self.observer.start(last_step)
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
            self.observer.close()
            for tracker in self.trackers:
                tracker.close()
        return step

    def _guarded_step(self, step: int) -> None:
        """One step, logged. If it fails before the weights move, the state before it is saved."""
        before = LightState.of(self.parts)
        timer = Timer()
        try:
            batch, metrics = self.experience.collect(self.parts.generators["rollout"], timer)
        except GradtraceError as error:
            before.restore(self.parts)
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
        parts, actor = self.parts, self.config.actor
        generator = parts.generators["update"]
        if (more := self.observer.more_rollouts(step)) is not None:
            batch = add_rollouts(batch, more, parts.sampler.pad_token_id)
        micro_batches = MicroBatches(batch, actor.token_budget, self._layout(batch))
        metrics = {"actor/lr": parts.optimizer.begin_step(step)}

        if "old_log_probs" in self.estimator.needs:
            with timer("old_log_prob"):
                batch = fill_statistics(parts.policy, batch, micro_batches, torch.arange(len(batch)))
        if parts.reference is not None:
            with timer("ref"):
                batch = parts.reference.add_log_probs(batch, micro_batches(torch.arange(len(batch))))
        if parts.critic is not None:
            with timer("values"):
                batch = parts.critic.add_values(batch, micro_batches)
        with timer("adv"):
            batch = add_advantages(batch, self.estimator)

        batch = self.observer.before_update(batch, step)
        updates = plan_updates(batch, actor.mini_batch_size, actor.epochs, actor.shuffle, step, generator)
        with timer("old_log_prob"):
            batch = self._add_old_log_probs(batch, micro_batches, updates)
        if parts.critic is not None:
            with timer("update_critic"):
                metrics["critic/lr"] = parts.critic.optimizer.begin_step(step)
                critic_updates = plan_updates(
                    batch, actor.mini_batch_size, self.config.critic.epochs, actor.shuffle, step, generator
                )
                metrics.update(parts.critic.update(batch, micro_batches, critic_updates))
        if parts.critic is None or step > self.config.critic.warmup_steps:
            with timer("update_actor"):
                batch, update_metrics = self.update.run(batch, micro_batches, updates, self.observer)
            metrics.update(update_metrics)
        metrics.update(self.observer.after_update(batch, step))
        metrics.update(batch_metrics(batch))
        return batch, metrics

    def save(self, step: int) -> Path:
        def fill(folder: Path) -> None:
            save_state(folder, self.parts, step)
            save_observer_state(folder, self.observer.state())

        return self.checkpoints.save(step, fill)

    def export(self) -> None:
        """The trained policy as a plain transformers folder, adapters merged: RUN/policy."""
        target = self.files.path / "policy"
        shutil.rmtree(target, ignore_errors=True)  # of an earlier end of this run
        with atomic_directory(target) as folder:
            export_model(self.parts.policy.model, folder)
            self.parts.task.tokenizer.save_pretrained(folder)

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
            return fill_statistics(self.parts.policy, batch, micro_batches, rows)
        if self.observer.needs_entropies:
            batch = fill_statistics(self.parts.policy, batch, micro_batches, rows)
        # The loss uses the same log-probs whether or not anybody watches.
        return batch.replace(old_log_probs=batch.sampler_log_probs.clone())

    def _sampler_is_exact(self) -> bool:
        """The sampler's log-probs are those of the same float32 distribution that the loss uses."""
        rollout, source = self.config.rollout, self.config.actor.old_log_probs
        ours = rollout.engine == "embedded" and rollout.precision == "float32"
        exact = ours and self.parts.policy.device.type == "cpu"
        full = exact and rollout.top_p == 1 and rollout.top_k == 0
        return source == "sampler" or (source == "auto" and full)

    def _layout(self, batch: RolloutBatch) -> Layout:
        """How responses are laid out for the model: see `microbatch`. Whether anybody watches has no part in it."""
        actor, model = self.config.actor, self.config.model
        if actor.share_prompts == "always":
            return "shared"
        # Checkpointing recomputes inside the backward pass, where our own attention is not in force.
        own_attention = (
            model.attention in ("auto", "sdpa")
            and not model.gradient_checkpointing
            and is_supported(self.parts.policy.model)
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
        policy = self.parts.policy
        if policy.device.type != "cpu" or shared_share(batch) <= WORTH_SHARING:
            return False
        longest = int((batch.prompt_lengths + batch.response_lengths).max())
        if longest > self._attends_to:
            self._attends_to = longest if can_attend(policy.model, longest) else -1
        return longest <= self._attends_to

    def _validate(self, timer: Timer) -> dict[str, float]:
        with timer("testing"):
            return validate(self.parts)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.files.log(step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)
