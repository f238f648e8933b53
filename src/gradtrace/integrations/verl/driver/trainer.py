"""verl's trainers with the traces. Without a `gradtrace` section in the configuration they are verl's own."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.dealing import Plan, plan_update
from gradtrace.integrations.verl.driver import status
from gradtrace.integrations.verl.driver.batches import group_of_key, read_batch, with_versions
from gradtrace.integrations.verl.driver.probe_sampling import (
    EvaluationSampler,
    check_probe_job,
    check_token_terms,
)
from gradtrace.integrations.verl.driver.recorder import Recorder
from gradtrace.integrations.verl.driver.tracin import TracinDriver, Training
from gradtrace.integrations.verl.driver.watch import Watch, process_id
from gradtrace.integrations.verl.launch.checkpoints import plain_tensors_only
from gradtrace.integrations.verl.options import read_options
from gradtrace.integrations.verl.rank import losses
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, knows_token_terms
from gradtrace.integrations.verl.refusals import (
    NO_CHECKS,
    NO_SCOPE_PASS,
    check_asynchronous,
    check_selection_settings,
)
from gradtrace.integrations.verl.told import BLAME_STEP, LABELS, MISMATCH, PROBE, ROW
from gradtrace.metrics import batch_metrics
from gradtrace.tasks.base import Task
from gradtrace.tasks.datasets import stop_token_ids
from gradtrace.tasks.named import TASKS
from gradtrace.trace.kinds import enabled_kinds
from gradtrace.trace.schema import ENTROPY_TRACE

CPU_POLL_SECONDS = 0.05


class TracedTrainer(PPOTrainer):
    """What the trainers below have in common."""

    def __init__(self, config: Any) -> None:
        self.options = read_options(config)
        self.recorder: Recorder | None = None
        self.tracin: TracinDriver | None = None
        self.watch: Watch | None = None
        if self.options.is_active:
            self._prepare(config)
        super().__init__(config)

    def _prepare(self, config: Any) -> None:
        """Refuse what cannot be traced before any worker starts, and take over the order of the update."""
        actor = config.actor_rollout_ref.actor
        for what in enabled_kinds(self.options):
            if actor.strategy != "fsdp2" and what != ENTROPY_TRACE:
                raise GradtraceError(
                    f"gradtrace.{what} needs actor.strategy=fsdp2, not {actor.strategy}: the hooks are in verl's "
                    "FSDP2 engine"
                )
        if config.get("distillation") and config.distillation.get("enabled", False):
            raise GradtraceError("gradtrace does not trace distillation: its loss is not a policy loss")
        mode = actor.policy_loss.get("loss_mode", "vanilla")
        self.knows_terms = actor.strategy == "fsdp2" and knows_token_terms(mode)
        if self.options.influence_trace.scope_pass:
            raise GradtraceError(f"gradtrace.influence_trace.scope_pass=true: {NO_SCOPE_PASS}")
        if self.options.influence_trace.verify_every:
            raise GradtraceError(f"gradtrace.influence_trace.verify_every: {NO_CHECKS}.")
        if self.options.blame.enable:
            check_token_terms(config, "blame")
        if self.options.entropy_probe.every:
            check_probe_job(config)
        if self.options.tracin.enable:
            check_selection_settings(self.options.tracin, config.actor_rollout_ref.rollout.n)
        losses.advantage_options.clear()
        losses.advantage_options.update(self.options.advantage_options)
        # Groups are dealt to mini-batches here, and stay whole; verl's own shuffle would tear them apart.
        self.shuffle_seed = actor.data_loader_seed if actor.shuffle else None
        actor.shuffle = False

    # ------------------------------------------------------------ the run

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        if self.config.trainer.device == "cpu":
            # verl asks every 2 s whether the responses are there; small models on a CPU answer long before.
            buffer.poll_interval = CPU_POLL_SECONDS
        return buffer

    def on_init_end(self) -> None:
        super().on_init_end()
        if not self.options.is_active:
            return
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        truth = TASKS.get(self.options.task, Task).truth
        ranks = self.actor_rollout_wg.world_size
        self.recorder = Recorder(
            self.options,
            self.tokenizer,
            ranks,
            rollout.temperature,
            truth,
            lambda text: print(text, flush=True),
        )
        if self.options.tracin.enable:
            self.tracin = TracinDriver(self, self.options, self.recorder, ranks)
        self.recorder.start(self.global_steps)
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        if self.recorder.influence is not None:
            self.recorder.influence.say_scope(config.data.train_batch_size, actor.ppo_mini_batch_size)
        influence = self.options.influence_trace
        self.actor_rollout_wg.set_loss_fn(
            GradtraceLoss(
                actor,
                options=dict(self.options.policy_loss_options),
                influence=influence if influence.enable else None,
                parts_dir=str(self.recorder.parts_dir),
                blame=self.options.blame if self.options.blame.enable else None,
                probe=self.recorder.probe is not None,
                selecting=self.tracin is not None,
            )
        )
        if self.recorder.probe is not None:
            self.recorder.probe.sampler = EvaluationSampler(
                config,
                self.get_llm_client(),
                self.options.entropy_probe,
                stop_token_ids(self.tokenizer),
                self.recorder.report,
            )
        self.status = status.Status(step=self.global_steps, workers={})
        what = ", ".join(enabled_kinds(self.options)) or "metrics only"
        print(
            f"gradtrace is active: {what}; on ranks 0 to {ranks - 1} of {ranks}; files in {self.options.run_dir}",
            flush=True,
        )

    def _load_checkpoint(self) -> Any:
        with plain_tensors_only():
            return super()._load_checkpoint()

    def fit(self, agent_loop_manager: Any) -> None:
        if self.recorder is None:
            super().fit(agent_loop_manager)
            return
        self._start_watch(agent_loop_manager)
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            # What failed here may be another rank's complaint about a neighbour that is gone.
            assert self.watch is not None
            self.watch.stop()
            self.status.dead_worker = self.status.dead_worker or self.watch.find_dead()
            self.status.error = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:500]}"
            self._phase(self.status.phase)
            raise
        finally:
            if self.watch is not None:
                self.watch.stop()
            self.recorder.close(finished=not self.status.error)

    def _start_watch(self, agent_loop_manager: Any) -> None:
        workers = {f"actor rank {r}": w for r, w in enumerate(self.actor_rollout_wg.workers)}
        for replica in self.llm_server_manager.get_replicas():
            for number, server in enumerate(replica.servers):
                workers[f"rollout replica {replica.replica_rank}.{number}"] = server
        for number, worker in enumerate(self.get_reward_handles() or []):
            workers[f"reward worker {number}"] = worker
        for number, worker in enumerate(agent_loop_manager.agent_loop_workers):
            workers[f"agent loop worker {number}"] = worker
        found = ray.get([worker.__ray_call__.remote(process_id) for worker in workers.values()])
        self.status.workers = dict(zip(workers, found, strict=True))
        self.watch = Watch(workers, self._on_death)
        self.watch.start()

    def _on_death(self, name: str, error: Exception) -> None:
        self.status.dead_worker = name
        self.status.error = type(error).__name__
        self._phase(self.status.phase)
        print(f"gradtrace: {status.describe(self.status)}", flush=True)
        os._exit(17)  # at once: a driver whose worker is gone would wait for it, or train on a batch with holes

    def _phase(self, name: str) -> None:
        if self.recorder is not None:
            self.status.step, self.status.phase = self.global_steps, name
            self.status.write(Path(self.options.run_dir))

    # ------------------------------------------------------------ phases of a step

    def on_step_begin(self) -> None:
        self._phase("rollout")  # prompts are handed to the replicas next
        super().on_step_begin()

    def prepare_step(self) -> dict[str, Any]:
        metrics: dict[str, Any] = super().prepare_step()
        if self.tracin is not None:
            self.tracin.submit(self.global_steps)
        return metrics

    def on_sample_end(self) -> None:
        if self.tracin is not None and (missing := self.tracin.collect()):
            self._check_dead(f"{missing} validation responses of TracIn did not arrive")
        if self.recorder is not None and self.recorder.probe is not None:
            self.recorder.probe.sample(self.global_steps)
        super().on_sample_end()

    def on_step_end(self) -> None:
        self._phase("sync")
        super().on_step_end()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._phase("log_prob")
        return super()._compute_old_log_prob(batch, metrics)

    def _validate(self) -> dict[str, float]:
        self._phase("validate")
        metrics = super()._validate()
        if self.recorder is not None and self.global_steps == 0:
            self.recorder.log(0, metrics)
        return metrics

    def _balance_batch(self, batch: Any, metrics: Any, *args: Any, **options: Any) -> Any:
        if self.recorder is None:
            return super()._balance_batch(batch, metrics, *args, **options)
        self._check_complete(len(batch))
        ranks = max(self._dispatch_ranks()) + 1
        multiple = self._get_required_batch_multiple(ranks)
        batch = upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        order = sorted(range(len(batch)), key=lambda place: response_order(batch, place))
        batch.reorder(order)  # groups together, siblings in order: the rows of the trace
        groups = [group_of_key(key) for key in batch.keys]
        lengths = [tag["seq_len"] for tag in batch.tags]
        self.plan: Plan = plan_update(
            groups,
            lengths,
            actor.ppo_mini_batch_size * rollout.n,
            ranks,
            balance,
            self._shuffle_seed(),
        )
        self.row_keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_real(tag)]
        self.plan_of_key = {
            key: (self.plan.mini_batch[place], self.plan.whole[place]) for place, key in enumerate(batch.keys)
        }
        self.tag_of_key = dict(zip(batch.keys, batch.tags, strict=True))
        batch.reorder(self.plan.order)
        return batch

    def _check_complete(self, responses: int) -> None:
        """verl would train on what is left when a replica or a reward worker has died in the rollout."""
        expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        if responses < expected:
            self._check_dead(f"{responses} of {expected} responses arrived")

    def _check_dead(self, symptom: str) -> None:
        if self.watch is not None and (dead := self.watch.find_dead(5.0)):
            self._on_death(dead, RuntimeError(symptom))

    def _dispatch_ranks(self) -> list[int]:
        """Data-parallel rank of every worker."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return group._dispatch_info["actor"]

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.recorder is None:
            return super()._update_actor(batch, metrics)
        self._phase("update" if self.tracin is None else "select")
        rows = read_batch(
            self.row_keys,
            batch.partition_id,
            self.config.data.max_response_length,
            stop_token_ids(self.tokenizer),
        )
        rows = with_versions(rows, [self.tag_of_key[key] for key in self.row_keys])
        mini_batch, whole = (torch.tensor([self.plan_of_key[key][index] for key in self.row_keys]) for index in (0, 1))
        training: Training | None = None
        trained = batch
        if self.tracin is not None:
            rows, training = self.tracin.select(rows, self.row_keys, batch, self._shuffle_seed())
            trained, mini_batch, whole = training.batch, training.mini_batch, torch.ones_like(whole)
            self._phase("update")
        labels = self.recorder.labels(rows, self.global_steps, mini_batch, whole)
        probe, blame = self.recorder.probe, self.recorder.blame
        told = {
            LABELS: labels,
            PROBE: probe.inputs(rows, self.global_steps) if probe is not None else None,
            BLAME_STEP: blame.inputs(self.global_steps, mini_batch) if blame is not None else None,
            MISMATCH: self.recorder.mismatch.inputs(rows, self.global_steps) if self.knows_terms else None,
        }
        told = {key: value for key, value in told.items() if value is not None}
        if told:
            row_of = {key: row for row, key in enumerate(self.row_keys)}
            numbers = torch.tensor([row_of.get(key, -1) for key in trained.keys])
            fields = TensorDict({ROW: numbers}, batch_size=len(numbers))
            trained = tq.kv_batch_put(keys=trained.keys, partition_id=trained.partition_id, fields=fields)
        trained.extra_info.update(told)
        with nullcontext() if training is None else self.tracin.updating(training):  # type: ignore[union-attr]
            trained = super()._update_actor(trained, metrics)
        for key in told:
            trained.extra_info.pop(key, None)
        metrics.update(self.recorder.record(rows, self.global_steps, labels))
        metrics.update(self.recorder.mismatch.metrics())
        if blame is not None:
            metrics.update(blame.record(rows, self.global_steps, mini_batch))
        if probe is not None:
            first = (mini_batch == 0).nonzero().squeeze(-1)
            metrics.update(probe.record(rows, first, self.global_steps))
        if self.tracin is not None:
            metrics.update(self.tracin.metrics(rows, self.global_steps))
        self.step_metrics = batch_metrics(rows)
        self.update_metrics = metrics
        return trained if training is None else training.whole_batch(batch)

    def _shuffle_seed(self) -> int | None:
        return None if self.shuffle_seed is None else self.shuffle_seed + self.global_steps

    def _save_checkpoint(self) -> None:
        if self.recorder is not None:
            self._phase("save")
            known = {f"timing_s/{name}": value for name, value in self.timing_raw.items()}
            self.recorder.before_checkpoint(self.global_steps, {**self.update_metrics, **self.step_metrics, **known})
        super()._save_checkpoint()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.recorder is not None:
            # Where both have a name, ours is what docs say: verl's clip_ratio counts the longest of a batch as cut.
            self.recorder.log(global_steps, {**metrics, **self.step_metrics})


def response_order(batch: Any, place: int) -> tuple[bool, str, int]:
    """Real responses before padding; siblings together and in order. Which group comes first is of no account."""
    uid, session, _ = batch.keys[place].rsplit("_", 2)
    return not is_real(batch.tags[place]), uid, int(session)


def is_real(tag: dict[str, Any]) -> bool:
    return not tag.get("is_padding", False)


def balance(lengths: list[int], ranks: int) -> list[list[int]]:
    """Items for each rank, equally many, of about equal work."""
    if ranks == 1:
        return [list(range(len(lengths)))]
    workload: Any = calculate_workload(torch.tensor(lengths))
    return get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)


class GradtraceTrainer(TracedTrainer, PPOTrainerSync):
    """Every step waits for its own rollout."""


class GradtraceAsyncTrainer(TracedTrainer, PPOTrainerColocateAsync):
    """Rollouts go on behind the step: a response may have been sampled with older weights, and by several."""

    def _prepare(self, config: Any) -> None:
        check_asynchronous(self.options)
        super()._prepare(config)


register_trainer("gradtrace")(GradtraceTrainer)
