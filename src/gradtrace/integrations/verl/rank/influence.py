"""The influence trace on a rank of verl: its passes, micro-batch by micro-batch, and scoring with the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution import AttributionError, InfluenceTracer
from gradtrace.attribution.geometry import ClippedGradients
from gradtrace.attribution.ledger import Role
from gradtrace.attribution.loss_terms import SharedTerms
from gradtrace.errors import GradtraceError
from gradtrace.instruments.host import asked_by
from gradtrace.instruments.influence.capture import InfluenceCapture, PassRoles, TracedPass
from gradtrace.integrations.verl.parts import write_part
from gradtrace.integrations.verl.rank.full_precision import full_precision
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, dense, micro_batch_weights
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import layout_of, plain, rows_of
from gradtrace.integrations.verl.rank.shared import SharedSequences
from gradtrace.integrations.verl.told import LABELS, StepLabels


@dataclass(eq=False)
class RankStep:
    """What a rank knows of the training step that it traces."""

    labels: StepLabels
    data: Any = None
    """verl's data of the mini-batch."""
    mini_batch: int = -1
    done: set[int] = field(default_factory=set)
    """Mini-batches that were traced: a later epoch is not traced again."""
    failure: str = ""


class RankTracer:
    """Lives in a rank's engine. Per mini-batch: `begin`, `capturing` around its passes, `score` before the step."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        assert loss.influence is not None
        self.engine = engine
        self.loss = loss
        self.config = loss.influence
        self.rank = dist.get_rank()
        group = engine.get_data_parallel_group()
        with asked_by("gradtrace.influence_trace"):
            self.tracer = InfluenceTracer(
                engine.module, self.config, group, defer_errors=True, optimizer=engine.optimizer
            )
        self.tracer.close()  # hooks are on the model during traced passes only
        self.capture = InfluenceCapture(self.tracer, loss.training_pass)
        self.meeting = Meeting()
        self.step: RankStep | None = None
        self.role: Role | None = None
        """What the passes that run now are captured as; None: they are not."""
        self._open = contextlib.ExitStack()
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
        if self.step is None or labels.plan.step != self.step.labels.plan.step:
            self.step = RankStep(labels)
            self.capture.start(labels.plan)
        step = self.step
        step.data = data
        rows = rows_of(data)
        numbers = labels.mini_batch[rows[rows >= 0]].unique().tolist()
        if len(numbers) > 1:
            raise GradtraceError(
                f"rank {self.rank} was given responses of the mini-batches {numbers} at once: the order of the batch "
                "was changed after gradtrace had dealt groups to mini-batches"
            )
        # A rank that has nothing but padding in this mini-batch still takes part in its collectives.
        ahead = sorted(set(range(labels.last_mini_batch + 1)) - step.done)
        if not ahead or (numbers and numbers[0] in step.done):  # a later epoch over the same rollout
            return False
        step.mini_batch = numbers[0] if numbers else ahead[0]
        step.done.add(step.mini_batch)
        return self.capture.begin(labels.rows(step.mini_batch), step.mini_batch)

    @property
    def roles(self) -> PassRoles:
        return self.capture.roles(self._step.mini_batch)

    @property
    def _step(self) -> RankStep:
        assert self.step is not None, "begin() comes first"
        return self.step

    @contextlib.contextmanager
    def capturing(self, role: Role) -> Iterator[None]:
        """Backward passes in here are captured as `role`, micro-batch by micro-batch, as `micro_batch` announces them:
        those of training, or of a role's own (`objective`)."""
        self.tracer.attach()
        self.role = role
        self._open = contextlib.ExitStack()
        try:
            yield
            self._close()
        except BaseException:
            self.tracer.reset()
            raise
        finally:
            self.role = None
            with contextlib.suppress(AttributionError):
                self._open.close()
            self.tracer.close()

    def micro_batch(self, micro_batch: Any) -> None:
        """The forward pass of this micro-batch comes next; the passes of the one before are over."""
        self._close()
        assert self.role is not None
        try:
            rides = self.role == self.roles.riding
            traced = self._traced(micro_batch, rides)
            self._open.enter_context(self.capture.around(traced, self.role, rides))
        except (AttributionError, GradtraceError) as error:
            self._fail(error)

    def _close(self) -> None:
        try:
            self._open.close()
        except (AttributionError, GradtraceError) as error:
            self._fail(error)
        self._open = contextlib.ExitStack()

    def _fail(self, error: Exception) -> None:
        self._step.failure = self._step.failure or f"rank {self.rank}: {error}"

    def _traced(self, micro_batch: Any, rides: bool) -> TracedPass:
        rows = rows_of(micro_batch)
        response, tokens = layout_of(self.engine, micro_batch)
        weight = micro_batch_weights(micro_batch, self.loss.actor) if rides else torch.ones(len(rows))
        return TracedPass(rows, response, tokens, weight, self._step.mini_batch)

    def objective(
        self, model_output: Any, data: Any, dp_group: Any = None, **ignored: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """A loss function for verl: Σ w_t ℓ_t of a role that needs a pass of its own."""
        assert self.role is not None
        return self._weighted_log_probs(self.role, model_output, data)[0].sum(), {}

    def _weighted_log_probs(self, role: Role, model_output: Any, data: Any) -> Tensor:
        """[2, b, T]: every token's own term of a log-prob objective, and its log-prob."""
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        mask = dense(data, "response_mask", log_probs).bool()
        weights = self.capture.weights(role, mask, rows_of(data), dense(data, "advantages", log_probs))
        return torch.stack([weights * log_probs, log_probs])

    # ------------------------------------------------------------ scoring, on all ranks together

    def score(self) -> None:
        """Score the mini-batch, after its backward passes and before the weights move."""
        step = self._step
        self._meet()
        failures = [failure for failure in self.tracer.ranks.gather(step.failure) if failure]
        if failures:
            # One rank alone cannot score: the others would wait for it. So none does.
            step.failure = failures[0]
            self.tracer.reset()
            return
        before = self.tracer.ranks.bytes_moved
        terms = self._shared_terms() if self.config.wants_loss_term else None
        clip = self.engine.optimizer_config.clip_grad
        coming = ClippedGradients(self.engine.module, clip) if terms is not None else None
        # What goes wrong here goes wrong on every rank alike, or the process group's time-out ends the run.
        with full_precision(self.engine) if terms is not None else contextlib.nullcontext():
            self.capture.score(terms=terms, method="finite_difference", coming=coming)
        moved = float(self.tracer.ranks.bytes_moved - before)
        self.capture.scored[-1].trace.metrics["influence_trace/debug_bytes_moved"] = moved

    def _meet(self) -> None:
        step = self._step
        self.meeting.wait(f"step {step.labels.plan.step}, scoring of mini-batch {step.mini_batch}")

    def _shared_terms(self) -> SharedTerms:
        """[2, N]: the own terms of responses' tokens, to be raised, and their log-probs. Collective."""
        assert self.capture.current is not None
        rows = self.capture.current.rows
        in_group = torch.isin(self._step.labels.plan.group[rows], torch.tensor(self.capture.loss_term_groups))
        shared = SharedSequences(self.engine, self._step.data, rows[in_group].tolist(), self.tracer.ranks)
        return SharedTerms(lambda responses: shared.run(rows[responses].tolist(), self._token_terms))

    def _token_terms(self, model_output: Any, data: Any) -> Tensor:
        """[2, b, T]: every token's own term of the step, before aggregation, and its log-prob."""
        if self.config.output_function != "training_loss":
            return self._weighted_log_probs("step", model_output, data)
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        return torch.stack([-self.loss.token_losses(model_output, data), log_probs])

    def finish_mini_batch(self, grad_norm: float) -> None:
        """The weights have moved, or not if the gradient was not finite: then its scores mean nothing."""
        step, capture = self._step, self.capture
        if capture.current is not None and capture.current.is_scored and grad_norm - grad_norm != 0.0:
            part = capture.scored[-1]
            part.trace.skipped = dict.fromkeys(step.labels.plan.group[part.rows].tolist(), "non_finite")
            part.trace.position_scores = [torch.empty(0) for _ in part.trace.position_scores]
        capture.current = None
        if step.mini_batch == step.labels.last_scored:
            folder = Path(self.loss.parts_dir)
            write_part(folder, step.labels.plan.step, self.rank, capture.scored, step.failure)
