"""verl's trainers with the traces. Without a `gradtrace` section in the configuration they are verl's own."""

from __future__ import annotations

import os
import time
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
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.registry import enabled, instruments
from gradtrace.instruments.steps import check_needs
from gradtrace.integrations.verl.assign import Plan, plan_update
from gradtrace.integrations.verl.cannot import job_cannot
from gradtrace.integrations.verl.driver import watch
from gradtrace.integrations.verl.driver.batches import group_of_key, read_batch, with_versions
from gradtrace.integrations.verl.driver.samples import ReplicaSampler
from gradtrace.integrations.verl.driver.selection import Training, mini_batches_of, put_advantages
from gradtrace.integrations.verl.driver.step import DriverSteps, VerlRun
from gradtrace.integrations.verl.launch.checkpoints import plain_tensors_only
from gradtrace.integrations.verl.rank import losses
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, knows_token_terms
from gradtrace.integrations.verl.settings import SECTION, read_settings, sections_for
from gradtrace.integrations.verl.tables import ROW, STEP, StepMessage
from gradtrace.metrics import batch_metrics
from gradtrace.tasks.datasets import stop_token_ids

CPU_POLL_SECONDS = 0.05


class TracedTrainer(PPOTrainer):
    """What the trainers below have in common."""

    asynchronous = False
    """Rollouts go on behind a step."""

    def __init__(self, config: Any) -> None:
        self.settings = read_settings(config)
        self.steps: DriverSteps | None = None
        self.selects = False
        """An instrument leaves responses out of updates."""
        self.watch: watch.Watch | None = None
        if self.settings.is_active:
            self._prepare(config)
        super().__init__(config)

    def _prepare(self, config: Any) -> None:
        """Refuse what cannot be traced before any worker starts, and take over the order of the update."""
        if config.get("distillation") and config.distillation.get("enabled", False):
            raise GradtraceError("gradtrace does not trace distillation: its loss is not a policy loss")
        actor = config.actor_rollout_ref.actor
        knows = knows_token_terms(actor.policy_loss.get("loss_mode", "vanilla"))
        self.cannot = job_cannot(config, knows, self.asynchronous)
        self.sections = sections_for(self.settings, self.cannot)
        for one in enabled(self.sections).values():
            section = getattr(self.sections, one.key)
            check_needs(one, section, self.cannot, f"{SECTION}{one.key}")
            if hasattr(section, "check_run"):
                section.check_run(f"{SECTION}{one.key}", config.actor_rollout_ref.rollout.n, 0.0)
            self.selects = self.selects or one.selects
        losses.advantage_options.clear()
        losses.advantage_options.update(self.settings.advantage_options)
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
        if not self.settings.is_active:
            return
        rollout = self.config.actor_rollout_ref.rollout
        ranks = self.actor_rollout_wg.world_size
        self.run_of_job = VerlRun(self, self.settings, self.cannot, lambda text: print(text, flush=True))
        self.steps = steps = DriverSteps(self.run_of_job, self.settings, ranks, rollout.temperature)
        steps.start(self.global_steps)
        self.actor_rollout_wg.set_loss_fn(
            GradtraceLoss(
                self.run_of_job.actor,
                options=dict(self.settings.policy_loss_options),
                instruments={
                    name: steps.settings(name) for name in steps.reporters if instruments()[name].observer is not None
                },
                folder=str(steps.folder),
                temperature=rollout.temperature,
                selecting=self.selects,
            )
        )
        self.sampler = ReplicaSampler(self)
        self.status = watch.Status(step=self.global_steps, workers={})
        what = ", ".join(self.settings.kinds) or "metrics only"
        print(
            f"gradtrace is active: {what}; on ranks 0 to {ranks - 1} of {ranks}; files in {self.settings.run_dir}",
            flush=True,
        )

    def _load_checkpoint(self) -> Any:
        with plain_tensors_only():
            return super()._load_checkpoint()

    def fit(self, agent_loop_manager: Any) -> None:
        if self.steps is None:
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
            self.steps.finish(finished=not self.status.error)

    def _start_watch(self, agent_loop_manager: Any) -> None:
        workers = {f"actor rank {r}": w for r, w in enumerate(self.actor_rollout_wg.workers)}
        for replica in self.llm_server_manager.get_replicas():
            for number, server in enumerate(replica.servers):
                workers[f"rollout replica {replica.replica_rank}.{number}"] = server
        for number, worker in enumerate(self.get_reward_handles() or []):
            workers[f"reward worker {number}"] = worker
        for number, worker in enumerate(agent_loop_manager.agent_loop_workers):
            workers[f"agent loop worker {number}"] = worker
        found = ray.get([worker.__ray_call__.remote(watch.process_id) for worker in workers.values()])
        self.status.workers = dict(zip(workers, found, strict=True))
        self.watch = watch.Watch(workers, self._on_death)
        self.watch.start()

    def _on_death(self, name: str, error: Exception) -> None:
        self.status.dead_worker = name
        self.status.error = type(error).__name__
        self._phase(self.status.phase)
        print(f"gradtrace: {watch.describe(self.status)}", flush=True)
        os._exit(17)  # at once: a driver whose worker is gone would wait for it, or train on a batch with holes

    def _phase(self, name: str) -> None:
        if self.steps is not None:
            self.status.step, self.status.phase = self.global_steps, name
            self.status.write(Path(self.settings.run_dir))

    # ------------------------------------------------------------ phases of a step

    def on_step_begin(self) -> None:
        self._phase("rollout")  # prompts are handed to the replicas next
        super().on_step_begin()

    def prepare_step(self) -> dict[str, Any]:
        metrics: dict[str, Any] = super().prepare_step()
        if self.steps is not None and self.config.trainer.critic_warmup <= self.global_steps:  # else there is no update
            self.steps.submit(self, self.global_steps)
        return metrics

    def on_sample_end(self) -> None:
        if self.steps is not None and (missing := self.steps.collect(self.global_steps, self.sampler.sample)):
            self._check_dead(f"{missing} responses to validation prompts of an instrument did not arrive")
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
        if self.steps is not None and self.global_steps == 0:
            self.steps.log(0, metrics)
        return metrics

    def _balance_batch(self, batch: Any, metrics: Any, *args: Any, **options: Any) -> Any:
        if self.steps is None:
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
        if self.steps is None:
            return super()._update_actor(batch, metrics)
        steps, step = self.steps, self.global_steps
        self._phase("select" if self.selects else "update")
        begin = time.perf_counter()
        rows = self._rows(batch)
        steps.take()
        planned, plans = steps.plan(rows, step)
        mini_batch = torch.tensor([self.plan_of_key[key][0] for key in self.row_keys])
        training, trained = None, batch
        if self.selects:
            if planned.advantages is not rows.advantages:
                put_advantages(planned, self.row_keys, batch.partition_id)
            training = Training.of(self, planned, self.row_keys, batch, steps.ranks, self._shuffle_seed())
            trained, mini_batch = training.batch, training.mini_batch
            self._phase("update")
        if plans:
            trained = self._with_rows(trained)
            trained.extra_info[STEP] = StepMessage(step, mini_batch, plans)
        # verl's clock of the update began before the selection.
        self.timing_raw["update_actor"] = self.timing_raw.get("update_actor", 0.0) - (time.perf_counter() - begin)
        with nullcontext() if training is None else mini_batches_of(self.config, training.size):
            trained = super()._update_actor(trained, metrics)
        trained.extra_info.pop(STEP, None)
        filtered = self.config.algorithm.get("filter_groups")
        is_whole = filtered is None or not filtered.get("enable", False)
        metrics.update(steps.record(planned, step, observed=bool(plans), counts_rollouts=is_whole))
        self.step_metrics = batch_metrics(planned)
        self.update_metrics = metrics
        return trained if training is None else training.whole_batch(batch)

    def _rows(self, batch: Any) -> RolloutBatch:
        """What the queue has of the responses, in the order of the trace; groups that verl's batch has torn apart are
        made known."""
        longest, stops = self.config.data.max_response_length, stop_token_ids(self.tokenizer)
        rows = read_batch(self.row_keys, batch.partition_id, longest, stops)
        rows = with_versions(rows, [self.tag_of_key[key] for key in self.row_keys])
        torn = torch.tensor([not self.plan_of_key[key][1] for key in self.row_keys])
        # A selection deals whole groups anew.
        self.run_of_job.split_groups = () if self.selects else rows.group[torn].unique().tolist()
        return rows

    def _with_rows(self, batch: Any) -> Any:
        """verl's batch, with the row of each response beside it."""
        row_of = {key: row for row, key in enumerate(self.row_keys)}
        numbers = torch.tensor([row_of.get(key, -1) for key in batch.keys])
        fields = TensorDict({ROW: numbers}, batch_size=len(numbers))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _shuffle_seed(self) -> int | None:
        return None if self.shuffle_seed is None else self.shuffle_seed + self.global_steps

    def _save_checkpoint(self) -> None:
        if self.steps is not None:
            self._phase("save")
            known = {f"timing_s/{name}": value for name, value in self.timing_raw.items()}
            self.steps.before_checkpoint(self.global_steps, {**self.update_metrics, **self.step_metrics, **known})
        super()._save_checkpoint()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.steps is not None:
            # Where both have a name, ours is what docs say: verl's clip_ratio counts the longest of a batch as cut.
            self.steps.log(global_steps, {**metrics, **self.step_metrics})


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

    asynchronous = True


register_trainer("gradtrace")(GradtraceTrainer)
