"""What a traced `GRPOTrainer` has seen: from TRL's events to the steps that our instruments observe.

A *step* of the trace is one rollout (TRL: one generation batch), as in our other hosts. TRL deals a rollout out in
`steps_per_generation` shuffled slices; scores are made when each of them has had its first backward pass, before the
optimizer step that follows. With more slices than `gradient_accumulation_steps`, members of a group meet different
weights; `optimizer_step` of every response in the trace says which. Later passes over the same rollout
(`num_iterations`) are not traced again.

On several processes every one of them runs a session, with the whole rollout and the passes of its own part of it. The
first one writes the files.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.attribution.collectives import Ranks, is_sharded
from gradtrace.attribution.geometry import ClippedGradients, unwrapped
from gradtrace.batch import RolloutBatch
from gradtrace.config import BlameConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.instrument import BlameInstrument
from gradtrace.instruments.blame.shares import BlameRecord
from gradtrace.instruments.entropy_trace.instrument import EntropyTrace
from gradtrace.instruments.findings.watch import Findings
from gradtrace.instruments.host import asked_by
from gradtrace.instruments.influence.instrument import InfluenceTraceInstrument
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.mismatch import MismatchShare
from gradtrace.instruments.observer import Backward, Observers, OptimizerStep, StepObserver
from gradtrace.instruments.tracin.instrument import TracinRecord
from gradtrace.integrations.trl.batches import (
    ENTROPIES,
    ROW,
    LeftPadded,
    left_padded,
    rollout_batch,
    whole_rollout,
)
from gradtrace.integrations.trl.losses import clipped_loss, token_weights, training_pass
from gradtrace.integrations.trl.policy import policy_of
from gradtrace.integrations.trl.rollout import TracedRollout
from gradtrace.integrations.trl.run_config import METRIC_NAMES, run_config
from gradtrace.integrations.trl.selection import masked, tracin_instrument
from gradtrace.integrations.trl.settings import TraceSettings
from gradtrace.metrics import Timer, batch_metrics
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.trace.run_files import RunFiles, nothing_left_on_error
from gradtrace.trace.schema import BLAME, ENTROPY_TRACE, INFLUENCE_TRACE, TRACIN
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import SilentWriter, TraceWriter

logger = logging.getLogger(__name__)

STATISTICS_TOKENS = 16384
"""Tokens in one forward pass of our own."""


class TraceSession:
    def __init__(self, trainer: Any, settings: TraceSettings, log_probs_and_entropies: Callable[..., Any]) -> None:
        self.trainer = trainer
        self.settings = settings
        self.step = 0
        """Rollouts so far."""
        self.errors = 0
        """Rollouts that could not be traced; each was reported."""
        self.ranks = Ranks(dist.group.WORLD if trainer.accelerator.num_processes > 1 else None)
        self._policy = policy_of(trainer, log_probs_and_entropies)
        self._files: RunFiles | None = None
        """Of the first process; the others write nothing."""
        self._findings: Findings | None = None
        self._observer: StepObserver | None = None
        self._blame: BlameInstrument | None = None
        self._rollout: TracedRollout | None = None
        self._rewards: Tensor | None = None
        self._failed = False
        """The trace of the rollout has failed on this rank; the others will hear of it when all of them meet."""
        self._generated: list[tuple[Tensor, Tensor]] | None = None
        self._slice: LeftPadded | None = None
        self._around_slice = ExitStack()
        self._line: dict[str, float] = {}
        self._batch: RolloutBatch | None = None
        """The rollout that the line of metrics is about."""
        self._timer = Timer()

    # ------------------------------------------------------------ the run

    def open(self) -> None:
        """Training begins, or goes on from a checkpoint."""
        args, state = self.trainer.args, self.trainer.state
        slices_done = state.global_step * args.gradient_accumulation_steps
        self.step = slices_done // (args.steps_per_generation * self.trainer.num_iterations)
        path = Path(self.settings.path)
        is_new = self.ranks.place == 0 and not path.exists()
        try:
            with nothing_left_on_error(path, is_new), self.ranks.together():
                if self.ranks.place == 0:
                    self._open_files(path)
                self._observer = self._instruments()
                self._observer.start(self.step)
        except AttributionError as error:  # of another process
            raise GradtraceError(str(error)) from error
        if self.ranks.place == 0:
            print(f"gradtrace: this run is traced in {path}; look at it with: gradtrace view {path}")

    def _open_files(self, path: Path) -> None:
        if self.step == 0 and (path / "metrics.jsonl").is_file() and (path / "metrics.jsonl").stat().st_size:
            raise GradtraceError(
                f"run_dir={path} holds a run already. Choose another folder, or continue that run with "
                "trainer.train(resume_from_checkpoint=…)."
            )
        self._files = files = RunFiles(path)
        files.truncate_after(self.step)
        files.write_config(run_config(self.trainer, self.settings))
        files.write_token_bytes(TokenBytes.from_tokenizer(self.trainer._tokenizer))
        self._findings = Findings(
            self.settings.findings,
            files.path,
            self.trainer._tokenizer.decode,
            files.messages.telling(logger.warning),
            lambda: self._blame.last if self._blame is not None else None,
        )
        self._findings.start(self.step)

    def _telling(self, show: Callable[[str], None]) -> Callable[[str], None]:
        """`show` sentences, and keep them in the run's log where this process writes it."""
        return show if self._files is None else self._files.messages.telling(show)

    def _instruments(self) -> StepObserver:
        trainer, settings = self.trainer, self.settings
        meta = {"task": "trl", "temperature": trainer.temperature}
        observers: list[StepObserver] = []
        loss_of_ratio = clipped_loss(trainer)
        sharded = is_sharded(self._policy.model)
        if settings.mismatch_every and loss_of_ratio is not None and not sharded:
            share = MismatchShare(self._policy, loss_of_ratio, settings.mismatch_every, self.ranks)
            observers.append(share)  # before those whose hooks listen to the passes of training
        if settings.selection is not None:  # first: what it leaves out, the others do not see
            if sharded:
                raise GradtraceError(
                    "TracIn selection under TRL needs whole weights on every process, and FSDP shards them: leave "
                    "`selection` out, train without FSDP, or use gradtrace's verl integration."
                )
            selection = dataclasses.replace(settings.selection, enable=True)
            tracin_record = TracinRecord(selection, self._writer(TRACIN), meta, settings.truth)
            observers.append(tracin_instrument(trainer, tracin_record, self._policy, self.ranks))
        if settings.entropy:
            writer = self._writer(ENTROPY_TRACE)
            observers.append(EntropyTrace(writer, settings.write_every, meta, settings.truth))
        if settings.influence is not None:
            writer = self._writer(INFLUENCE_TRACE)
            record = InfluenceRecord(settings.influence_trace, writer, meta, settings.truth)
            with asked_by("influence trace"):
                instrument = InfluenceTraceInstrument(
                    self._policy,
                    record,
                    training_pass(trainer),
                    trainer.optimizer,
                    self._coming,
                    trainer.args.max_grad_norm or 0.0,
                    self.ranks,
                )
            observers.append(instrument)
        no_blame = self._why_no_blame() if settings.blame else ""
        if no_blame and self.ranks.place == 0:
            self._telling(print)(f"gradtrace: no blame trace: {no_blame}.")
        if settings.blame and not no_blame:
            config = BlameConfig(enable=True, write_every=settings.blame_every, on_error=settings.on_error)
            told = self._telling(logger.warning)
            blame_record = BlameRecord(config, self._writer(BLAME), meta, settings.truth, told)
            optimizer, coming = unwrapped(trainer.optimizer), self._coming_and_factor
            self._blame = BlameInstrument(self._policy, blame_record, optimizer, coming, self.ranks)
            observers.append(self._blame)
        return Observers(observers)

    def _why_no_blame(self) -> str:
        """Why no gradient of a whole rollout can be shared out here; empty: it can."""
        args = self.trainer.args
        if is_sharded(self._policy.model):
            return "its forward-mode pass needs whole weights, and here they are sharded; train without FSDP for it"
        if args.steps_per_generation == args.gradient_accumulation_steps:
            return ""
        return (
            f"a rollout is dealt out over {args.steps_per_generation} slices and an optimizer step takes "
            f"{args.gradient_accumulation_steps}, so that no gradient is of a whole rollout; set steps_per_generation "
            "to gradient_accumulation_steps"
        )

    def _coming_and_factor(self) -> tuple[Mapping[str, Tensor], float] | None:
        gradient = self._coming()
        return None if gradient is None else (gradient, gradient.factor)

    def _coming(self) -> ClippedGradients | None:
        """The gradient of the optimizer step that follows, clipped as it will be; None where the rollout's passes
        belong to several steps, of which the next gradient is a part only, or where more is still to come."""
        rollout, trainer = self._rollout, self.trainer
        if rollout is None or trainer.state.global_step != rollout.began_at:
            return None
        if not trainer.accelerator.sync_gradients:  # and on several ranks it is not their mean yet
            return None
        return ClippedGradients(self._policy.model, trainer.args.max_grad_norm)

    def _writer(self, kind: str) -> TraceWriter:
        settings = self.settings
        if self.ranks.place != 0:
            return SilentWriter(kind)
        return TraceWriter(settings.path, kind, fsync=settings.fsync, on_error=settings.on_error)

    def close(self) -> None:
        """Training has ended. What was captured of a rollout that is not used up is written too."""
        if self._observer is None:
            return
        self._finish()
        self._flush_metrics()
        self._observer.close()
        self._observer = None
        if self._files is not None:
            self._files.write_summary({"steps": self.step, "finished": True})
            self._files.close()
            self._files = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failing trace is shown and counted, and costs this rollout's trace; it does not cost the training."""
        try:
            yield
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            self._failed = True
            logger.warning("gradtrace: rollout %d is not traced: %s", self.step, error, exc_info=True)

    def _still_traced(self) -> bool:
        """Whether the rollout's trace has failed on no rank; if it has, all of them drop it. Collective."""
        if any(self.ranks.gather(self._failed)):
            self.errors += 1
            self._rollout = self._slice = None
            self._failed = False
        return self._rollout is not None

    # ------------------------------------------------------------ a rollout

    @contextmanager
    def generating(self) -> Iterator[None]:
        self._generated = []
        try:
            yield
        finally:
            self._generated = None if self._observer is None else self._generated

    def see_rewards(self, of_functions: Tensor) -> None:
        """float[R, functions], NaN where a function gave none."""
        weighted = (of_functions * self.trainer.reward_weights.to(of_functions.device)).nansum(dim=1)
        weighted[torch.isnan(of_functions).all(dim=1)] = torch.nan
        self._rewards = weighted.detach().cpu()

    def begin(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> dict[str, Any]:
        """A rollout was generated and scored. Returns it with its rows numbered."""
        generated, self._generated = self._generated, None
        if self._observer is None:
            return output
        self._finish()
        self._flush_metrics()
        self._timer = Timer()
        self.step += 1
        rows = torch.arange(len(output["completion_ids"])) + self.ranks.place * len(output["completion_ids"])
        # Log-probs of the reference come from the same method: those of the policy are known by identity.
        old = [pair for pair in generated or [] if pair[0] is output.get("old_per_token_logps")]
        known = output | ({ENTROPIES: old[0][1]} if old else {})
        all_inputs, columns = whole_rollout(self.ranks, inputs, known)
        with self._guarded():
            self._rollout = self._new_rollout(self._observer, all_inputs, columns, rows)
        if self._still_traced():
            assert self._rollout is not None
            output = masked(output, self._rollout.batch, rows)
        return output | {ROW: rows.to(output["completion_ids"].device)}

    def _new_rollout(
        self,
        observer: StepObserver,
        inputs: list[dict[str, Any]],
        output: dict[str, Tensor],
        own: Tensor,
    ) -> TracedRollout:
        """`inputs` and `output` are those of all ranks, `own` the rows of this one."""
        trainer = self.trainer
        assert self._rewards is not None
        rewards = self._rewards
        judged = ~rewards.isnan()
        if not bool(judged.all()):
            # Unjudged completions take no part; their group's mean keeps them out of the top.
            means = rewards.view(-1, trainer.num_generations).nanmean(1).nan_to_num(0.0)
            rewards = torch.where(judged, rewards, means.repeat_interleave(trainer.num_generations))
        batch = rollout_batch(inputs, output, rewards, trainer.num_generations, trainer.eos_token_ids)
        written = batch.response_mask.any(1)
        batch = observer.before_update(batch, self.step)
        kept = judged if batch.kept is None else judged & batch.kept
        rows = (kept & written).nonzero().squeeze(-1)
        if ENTROPIES not in output and batch.kept is not None:
            batch = self._with_statistics_of(batch, ~batch.kept & written)
        return TracedRollout(
            batch=batch,
            update=OptimizerStep(self.step, epoch=0, mini_batch=0, number=0, rows=rows),
            policy=self._policy,
            began_at=trainer.state.global_step,
            rows=own,
            slices_left=trainer.args.steps_per_generation,
            has_statistics=ENTROPIES in output,
        )

    def _with_statistics_of(self, batch: RolloutBatch, chosen: Tensor) -> RolloutBatch:
        """Entropies and log-probs of completions that will have no pass of TRL's; they are few."""
        if not bool(chosen.any()) or not self.settings.entropy:
            return batch
        micro_batches = MicroBatches(batch, STATISTICS_TOKENS)
        return fill_statistics(self._policy, batch, micro_batches, chosen.nonzero().squeeze(-1))

    @property
    def wants_statistics(self) -> bool:
        return self._generated is not None or self._slice is not None

    def see_statistics(self, log_probs: Tensor, entropies: Tensor) -> None:
        """Float[b, C], of a forward pass that TRL made."""
        if self._generated is not None:
            self._generated.append((log_probs, entropies))
        elif self._slice is not None and self._rollout is not None and not self._failed:
            influence = self.settings.influence
            wants_terms = influence is not None and (influence.wants_loss_term or self.settings.verify_every > 0)
            terms = self.settings.blame or wants_terms
            with self._guarded():
                self._rollout.see_statistics(self._slice, log_probs, entropies, terms)

    # ------------------------------------------------------------ a slice of it

    @contextmanager
    def training_step(self) -> Iterator[None]:
        with ExitStack() as self._around_slice:
            yield
        rollout, self._slice = self._rollout, None
        if rollout is not None:
            rollout.slices_left -= 1
            if rollout.slices_left == 0:
                self._finish()

    def enter_slice(self, inputs: dict[str, Any]) -> None:
        """The forward and backward pass of a slice begin; they end with `training_step`."""
        rollout = self._rollout
        if rollout is None or self._observer is None or self._failed:
            return
        with self._guarded():
            micro = left_padded(inputs)
            weights = token_weights(self.trainer, inputs)
            rollout.token_weight[micro.rows] = weights.amax(1)
            backward = Backward(
                rollout.update,
                micro,
                weights,
                rollout.token_terms,
                optimizer_steps=self.trainer.state.global_step - rollout.began_at,
            )
            self._slice = micro
            self._around_slice.enter_context(self._observer.around_backward(backward))

    def _finish(self) -> None:
        """The first pass over the rollout is complete (or training ends): score and write."""
        rollout, observer = self._rollout, self._observer
        if rollout is None or observer is None or not self._still_traced():
            return
        rollout.share_statistics(self.ranks)
        with self._guarded():
            with observer.around_optimizer_step(rollout.update):
                pass  # scores are made on entering; TRL makes the step itself
            metrics = observer.after_update(rollout.batch, self.step)
            entropies = rollout.batch.need("entropies")[rollout.batch.response_mask]
            metrics |= batch_metrics(rollout.batch) | {"actor/entropy": float(entropies.mean())}
            self._batch = rollout.batch
            self._line |= metrics | {"trl/global_step": float(self.trainer.state.global_step)}
        self._still_traced()
        self._rollout = None

    # ------------------------------------------------------------ metrics

    def see_logs(self, logs: dict[str, Any]) -> None:
        """TRL logs after the optimizer step: the rollout before the next one is complete then."""
        for name, value in logs.items():
            if isinstance(value, (int, float)):
                self._line[METRIC_NAMES.get(name, f"trl/{name}")] = float(value)
        # TRL evaluates after it has logged a step: then the line waits for those numbers until the next rollout.
        if self._rollout is None and self.trainer.args.eval_strategy == "no":
            self._flush_metrics()

    def _flush_metrics(self) -> None:
        if self._files is not None and self.step and "critic/rewards/mean" in self._line:
            self._line["timing_s/step"] = self._timer.total
            self._line["influence_trace/debug_untraced_rollouts"] = float(self.errors)
            if self._batch is not None and self._findings is not None:
                self._line |= self._findings.see(self.step, self._batch, self._line)
            self._batch = None
            self._files.log(self.step, self._line)
        self._line = {}
