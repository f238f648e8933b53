"""The influence trace of one rank: captures the mini-batches of an update and scores them together with other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution import (
    AttributionError,
    TrainingPass,
    needs_own_backward,
    objective_sign,
    objective_weights,
    riding_scale,
)
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.labels import LABELS, ROW, StepLabels
from gradtrace.integrations.verl.parts import RankScores, write_part
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, dense
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import response_layout, token_weight
from gradtrace.integrations.verl.rank.sharded import ShardedTracer
from gradtrace.training.instruments import tracer_config


class RankTracer:
    """Lives in the engine of a rank. Per mini-batch: `begin`, `capture` around its passes, `score` before the step."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        assert loss.influence is not None
        self.engine = engine
        self.loss = loss
        self.knobs = loss.influence
        self.config = tracer_config(loss.influence)
        self.rank = dist.get_rank()
        try:
            self.tracer = ShardedTracer(
                engine.module, self.config, engine.get_data_parallel_group(), defer_errors=True
            )
        except AttributionError as error:
            raise GradtraceError(f"gradtrace.influence_trace: {error}") from error
        self.tracer.close()  # hooks are on the model during traced passes only
        self.meeting = Meeting()
        self.step = -1
        self.capturing = False
        print(
            f"gradtrace: influence trace active on rank {self.rank} of {dist.get_world_size()}: "
            f"{len(self.tracer.blocks)} layers, {self.config.output_function}, parts in {loss.parts_dir}",
            flush=True,
        )

    # ------------------------------------------------------------ a mini-batch

    def begin(self, data: Any) -> bool:
        """True if this mini-batch is to be traced; the same answer on every rank."""
        labels: StepLabels | None = plain(data, LABELS)
        if labels is None:
            return False
        if labels.step != self.step:
            self.step = labels.step
            self.scores: list[RankScores] = []
            self.failure = ""
            self.done: set[int] = set()
            self.tracer.reset()
        self.labels = labels
        self.data = data
        rows = rows_of(data)
        numbers = labels.mini_batch[rows[rows >= 0]].unique().tolist()
        if len(numbers) > 1:
            raise GradtraceError(
                f"rank {self.rank} was given responses of the mini-batches {numbers} at once: the order of the batch "
                "was changed after gradtrace had dealt groups to mini-batches"
            )
        # A rank that has nothing but padding in this mini-batch still takes part in its collectives.
        ahead = sorted(set(range(labels.last_mini_batch + 1)) - self.done)
        if not ahead or (numbers and numbers[0] in self.done):  # a later epoch over the same rollout
            return False
        self.mini_batch = numbers[0] if numbers else ahead[0]
        self.done.add(self.mini_batch)
        self.rows = labels.rows(self.mini_batch)
        self.local = torch.full((len(labels.group) + 1,), -1, dtype=torch.long)  # the last answers for row −1
        self.local[self.rows] = torch.arange(len(self.rows))
        self.needs_own_pass = needs_own_backward(self.config.output_function, self._training_pass())
        return len(self.rows) > 0

    def _training_pass(self) -> TrainingPass:
        return TrainingPass(
            on_policy=self.mini_batch == 0,
            policy_gradient_at_ratio_one=self.loss.plain_gradient,
            kl_in_loss=self.loss.kl_in_loss,
            entropy_bonus=self.loss.actor.entropy_coeff != 0,
            one_advantage_per_response=bool(self.labels.one_advantage[self.rows].all()),
        )

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Backward passes in here are captured, micro-batch by micro-batch, as `micro_batch` announces them."""
        self.tracer.attach()
        self.capturing = True
        self._open = contextlib.ExitStack()
        try:
            yield
            self._close()
        except BaseException:
            self.tracer.reset()
            raise
        finally:
            self.capturing = False
            with contextlib.suppress(AttributionError):
                self._open.close()
            self.tracer.close()

    def micro_batch(self, micro_batch: Any) -> None:
        """The forward pass of this micro-batch comes next; the passes of the one before are over."""
        self._close()
        try:
            self._open.enter_context(self._capture_of(micro_batch))
        except (AttributionError, GradtraceError) as error:
            self.failure = self.failure or f"rank {self.rank}: {error}"

    def _close(self) -> None:
        try:
            self._open.close()
        except (AttributionError, GradtraceError) as error:
            self.failure = self.failure or f"rank {self.rank}: {error}"
        self._open = contextlib.ExitStack()

    def _capture_of(self, micro_batch: Any) -> contextlib.AbstractContextManager[None]:
        rows = rows_of(micro_batch)
        ids = self.local[rows]
        packed = plain(micro_batch, "use_remove_padding", True)
        bucket = self.engine.pad_to_length_bucket if self.engine.pad_to_length else 0
        response, tokens = response_layout(micro_batch, ids, packed, bucket)
        scale: float | Tensor = 1.0
        if not self.needs_own_pass:
            chosen = ids >= 0
            scale = torch.zeros(len(self.rows))
            scale[ids[chosen]] = riding_scale(
                self.config.output_function,
                token_weight(self.loss.actor, micro_batch)[chosen],
                self.labels.advantages[rows[chosen]],
                self.labels.rewards[rows[chosen]],
            )
        advantages, rewards = self.labels.advantages[self.rows], self.labels.rewards[self.rows]
        return self.tracer.capture(
            response=response,
            tokens=tokens,
            accepted=self.labels.accepted[self.rows],
            group=self.labels.group[self.rows],
            advantages=advantages,
            sign=objective_sign(self.config.output_function, advantages, rewards),
            scale=scale,
        )

    def objective(
        self, model_output: Any, data: Any, dp_group: Any = None, **ignored: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """A loss function for verl: Σ w_t ℓ_t of the log-prob objective, where it needs a pass of its own."""
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        return (self._weights(data, log_probs) * log_probs).sum(), {}

    def _weights(self, data: Any, log_probs: Tensor) -> Tensor:
        """[b, T]: w_t."""
        mask = dense(data, "response_mask", log_probs).bool()
        rows = rows_of(data)
        rewards = torch.where(rows >= 0, self.labels.rewards[rows], 0.0).to(log_probs.device)
        advantages = dense(data, "advantages", log_probs)
        return objective_weights(self.config.output_function, mask, advantages=advantages, rewards=rewards)

    # ------------------------------------------------------------ scoring, on all ranks together

    def score(self) -> None:
        """After the backward passes, before the weights move."""
        self._meet()
        failures = [failure for failure in self.tracer.ranks.gather(self.failure) if failure]
        if failures:
            # One rank alone cannot score: the others would wait for it. So none does.
            self.failure = failures[0]
            self.tracer.reset()
            return
        before = self.tracer.ranks.bytes_moved
        terms = None
        if self.config.wants_loss_term:
            self.tracer.round_terms = self._round_terms
            terms = no_terms
        # What goes wrong here goes wrong on every rank alike, or the process group's time-out ends the run.
        labels = self.labels
        advantages, rewards = labels.advantages[self.rows], labels.rewards[self.rows]
        trace = self.tracer.score(
            accepted=labels.accepted[self.rows],
            group=labels.group[self.rows],
            advantages=advantages,
            sign=objective_sign(self.config.output_function, advantages, rewards),
            terms=terms,
            method="finite_difference",
        )
        trace.metrics["influence_trace/debug_bytes_moved"] = float(self.tracer.ranks.bytes_moved - before)
        self.scores.append(RankScores(self.mini_batch, self.rows, trace))

    def _meet(self) -> None:
        self.meeting.wait(f"step {self.step}, scoring of mini-batch {self.mini_batch}")

    def _round_terms(self, response: int | None) -> Tensor:
        """One forward pass of this rank: the own terms of a response's tokens, or (None) of any response."""
        rows = rows_of(self.data)
        place = 0 if response is None else int((rows == self.rows[response]).nonzero()[0])
        found: list[Tensor] = []

        def keep(model_output: Any, data: Any, dp_group: Any = None, **ignored: Any) -> Any:
            values = self._token_terms(model_output, data)
            found.append(values[0, : int(data["response_mask"].values().sum())])
            return values.sum(), {}

        with torch.no_grad():
            micro_batch = tu.index_select_tensor_dict(self.data, [place])
            self.engine.forward_step(micro_batch, keep, forward_only=True)
        return found[0]

    def _token_terms(self, model_output: Any, data: Any) -> Tensor:
        """[b, T]: every token's term of the captured objective, before aggregation."""
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        if self.config.output_function != "training_loss":
            return self._weights(data, log_probs) * log_probs
        return self.loss.token_losses(model_output, data)

    def finish_mini_batch(self, grad_norm: float) -> None:
        """The weights have moved, or not if the gradient was not finite: then its scores mean nothing."""
        if self.scores and self.scores[-1].mini_batch == self.mini_batch and grad_norm - grad_norm != 0.0:
            trace = self.scores[-1].trace
            trace.skipped = dict.fromkeys(self.labels.group[self.rows].tolist(), "non_finite")
            trace.position_scores = [torch.empty(0) for _ in trace.position_scores]
        if self.mini_batch == self.labels.last_scored:
            write_part(Path(self.loss.parts_dir), self.step, self.rank, self.scores, self.failure)


def no_terms(responses: list[int]) -> Tensor:
    """`ShardedTracer` asks `round_terms` instead."""
    raise AssertionError("terms of sharded parameters are computed in rounds")


def rows_of(data: Any) -> Tensor:
    """long[b]: the row of each sequence, however the queue has packed single numbers."""
    rows: Tensor = data[ROW]
    return (rows.values() if rows.is_nested else rows).reshape(-1).cpu()


def plain(data: Any, key: str, default: Any = None) -> Any:
    """A value of a TensorDict that is not a tensor."""
    return tu.get_non_tensor_data(data=data, key=key, default=default)
