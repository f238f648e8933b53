"""TracIn selection in the steps of verl's trainer: rows are dealt to ranks (`rank.tracin`), their answers joined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.config import omega_conf_to_dataclass

from gradtrace.algorithms import Algorithm, advantage, advantage_names
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.tracin.instrument import TracinInstrument, TracinRecord
from gradtrace.instruments.tracin.losses import Weighted
from gradtrace.instruments.tracin.scores import Measures
from gradtrace.instruments.tracin.validation import validation_advantage
from gradtrace.integrations.verl.dealing import PADDING, deal, plan_selection
from gradtrace.integrations.verl.driver.recorder import Recorder
from gradtrace.integrations.verl.driver.selected import mini_batches_of, put_advantages, selected_batch
from gradtrace.integrations.verl.driver.tracin_rollouts import PARTITION, VerlValidation, open_pool
from gradtrace.integrations.verl.options import VerlOptions
from gradtrace.integrations.verl.rank.losses import PREFIX, batch_weights
from gradtrace.integrations.verl.rank.tracin import RankAnswer, RankRequest, Share, score_on_worker
from gradtrace.metrics import GENERATED
from gradtrace.tasks.datasets import stop_token_ids
from gradtrace.trace.token_text import TokenBytes

Ask = Callable[[list[RankRequest]], list[RankAnswer]]
"""One request for each rank → what each of them answers."""


@dataclass(eq=False)
class RankedScores:
    """Deals responses to the ranks, and joins the scores that they answer: a `Scorer` of `TracinInstrument`."""

    actor: Any
    """verl's actor configuration."""
    preconditioner: str
    temperature: float
    ranks: int
    ask: Ask
    method: str = "ghost"

    def __call__(self, step: int, train: Weighted, parts: list[Weighted], measure: bool) -> tuple[Tensor, Measures]:
        multiple = 1 if self.actor.use_dynamic_bsz else int(self.actor.ppo_micro_batch_size_per_gpu)
        own, *others = (shares(losses, self.ranks, multiple) for losses in (train, *parts))
        answers = self.ask(
            [
                RankRequest(
                    step,
                    own[rank],
                    [part[rank] for part in others],
                    self.preconditioner,
                    self.temperature,
                    measure,
                )
                for rank in range(self.ranks)
            ]
        )
        scores = torch.full((len(parts), len(train.batch)), torch.nan, dtype=torch.float64)
        for answer in answers:
            scores[:, answer.rows] = answer.scores
        return scores[:, train.rows], answers[0].measures


def validation_estimator(algorithm: Any, options: dict[str, Any]) -> Algorithm:
    """The estimator of a verl configuration, where it is ours and needs rewards alone; else GRPO's."""
    name = str(algorithm.adv_estimator)
    ours = name.startswith(PREFIX) and name.removeprefix(PREFIX) in advantage_names()
    return validation_advantage(name.removeprefix(PREFIX), options) if ours else advantage("grpo")


def shares(losses: Weighted, ranks: int, multiple: int = 1) -> list[Share]:
    """The responses dealt to ranks, about equally many tokens each; filled up with a short one without weight."""
    batch, chosen = losses.batch, losses.rows.tolist()
    ids = batch.response_ids
    total = batch.prompt_lengths + batch.response_lengths
    filler = int(total.argmin())
    found = []
    for part in deal(total[losses.rows].tolist(), ranks, multiple):
        own = [(PADDING, filler) if item == PADDING else (chosen[item], chosen[item]) for item in part]
        found.append(
            Share(
                torch.tensor([row for row, _ in own]),
                [batch.prompts[int(batch.group[source])] for _, source in own],
                [ids[source] for _, source in own],
                [losses.weights[source, : len(ids[source])].float() * float(row != PADDING) for row, source in own],
            )
        )
    return found


@dataclass(eq=False)
class Training:
    """The part of a batch that the update is given."""

    batch: Any
    mini_batch: Tensor
    """long[R]: the optimizer step of each row; −1 if it is not trained on."""
    size: int
    """Responses of a mini-batch, with what fills it up."""
    padding: list[str] = field(default_factory=list)
    """Keys of what fills up."""

    def whole_batch(self, batch: Any) -> Any:
        """`batch` again, for metrics and for clearing the queue: with the padding that was made for the update."""
        tags = dict(zip(self.batch.keys, self.batch.tags, strict=True))
        return KVBatchMeta(
            keys=[*batch.keys, *self.padding],
            tags=[*batch.tags, *(tags[key] for key in self.padding)],
            partition_id=batch.partition_id,
            fields=batch.fields,
            extra_info=batch.extra_info,
        )


class TracinDriver:
    def __init__(self, trainer: Any, options: VerlOptions, recorder: Recorder, ranks: int) -> None:
        config = trainer.config
        rollout, settings = config.actor_rollout_ref.rollout, options.tracin
        self.trainer = trainer
        self.config = config
        self.ranks = ranks
        recorder.files.write_token_bytes(TokenBytes.from_tokenizer(trainer.tokenizer))
        pool = open_pool(config, list(settings.val_files), trainer.tokenizer, trainer.processor, recorder.report)
        self.source = VerlValidation(
            settings,
            pool,
            settings.val_n or rollout.n,
            validation_estimator(config.algorithm, options.advantage_options),
            int(config.data.get("seed") or 0),
            config.data.max_response_length,
            stop_token_ids(trainer.tokenizer),
        )
        self.actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.selection = TracinInstrument(
            recorder.traces.record(TracinRecord),
            RankedScores(self.actor, settings.preconditioner, rollout.temperature, ranks, self._ask),
            partial(batch_weights, actor=self.actor),
            self.source,
        )
        self._keys: list[str] = []
        self._waited = 0.0
        self._seconds = 0.0

    def _ask(self, requests: list[RankRequest]) -> list[RankAnswer]:
        workers, ranks = self.trainer.actor_rollout_wg.workers, self.trainer._dispatch_ranks()
        answers: list[RankAnswer] = ray.get(
            [
                worker.__ray_call__.remote(score_on_worker, requests[rank])
                for worker, rank in zip(workers, ranks, strict=True)
            ]
        )
        return answers

    # ------------------------------------------------------------ the rollout

    def submit(self, step: int) -> None:
        """The training prompts have been handed to the replicas."""
        if self.config.trainer.critic_warmup <= step:  # else there is no update to select for
            self.source.submit(step, self.trainer.agent_loop_manager.generate_sequences)

    def collect(self) -> int:
        """All training responses have arrived; wait for ours. Returns how many are missing."""
        begin = time.perf_counter()
        self._keys = self.source.collect()
        self._waited = time.perf_counter() - begin
        return self.source.expected - len(self._keys)

    # ------------------------------------------------------------ the update

    def select(
        self, rows: RolloutBatch, row_keys: list[str], batch: Any, seed: int | None
    ) -> tuple[RolloutBatch, Training]:
        """`rows` with `kept` set, and what the update is to be given of `batch`."""
        begin, step = time.perf_counter(), self.trainer.global_steps
        if self._keys and self.trainer.reward_loop_manager.reward_loop_worker_handles is None:
            tags: list[dict[str, Any]] = [{} for _ in self._keys]
            self.trainer._compute_reward_colocate(KVBatchMeta(keys=self._keys, tags=tags, partition_id=PARTITION))
        self.source.take(self._keys, step)
        rows = self.selection.before_update(rows, step)
        if self.selection.settings.selection == "soft":
            put_advantages(rows, row_keys, batch.partition_id)
        multiple = 1 if self.actor.use_dynamic_bsz else int(self.actor.ppo_micro_batch_size_per_gpu)
        plan = plan_selection(rows.group, rows.need("kept"), self.actor.ppo_mini_batch_size, self.ranks, multiple, seed)
        trained, padding = selected_batch(batch, row_keys, plan, self.trainer.tokenizer.eos_token_id)
        self._seconds = time.perf_counter() - begin
        return rows, Training(trained, plan.mini_batch, plan.size, padding)

    @contextmanager
    def updating(self, training: Training) -> Iterator[None]:
        """Around verl's update: the size of its mini-batches, and its time without that of the selection."""
        timing = self.trainer.timing_raw  # which began before the selection
        timing["update_actor"] = timing.get("update_actor", 0.0) - self._seconds
        with mini_batches_of(self.config, training.size):
            yield

    def metrics(self, rows: RolloutBatch, step: int) -> dict[str, float]:
        """Called after the update: writes the trace, and returns metrics."""
        metrics = self.selection.after_update(rows, step)
        metrics["timing_s/tracin"] = self._seconds + self._waited
        metrics["timing_s/tracin_gen"] = self._waited
        filtered = self.config.algorithm.get("filter_groups")
        if filtered is not None and filtered.get("enable", False):
            del metrics[GENERATED]  # what verl sampled and threw away is not known here
        else:
            metrics[GENERATED] += len(rows)
        return metrics
