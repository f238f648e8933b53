"""What a traced `GRPOTrainer` has seen: from TRL's events to the steps that instruments observe.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import OptimizerStep
from gradtrace.instruments.steps import InstrumentSteps
from gradtrace.integrations.trl.batches import ENTROPIES, ROW, Rollout, masked, rollout_batch, whole_rollout
from gradtrace.integrations.trl.host import TOKENS_PER_PASS, TrlHost, TrlPolicy, TrlRun
from gradtrace.integrations.trl.settings import TraceSettings, run_config
from gradtrace.metrics import UNTRACED, Timer, batch_metrics
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.trace.run_files import RunFiles, nothing_left_on_error
from gradtrace.trace.token_text import TokenBytes

logger = logging.getLogger(__name__)

METRIC_NAMES = {
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "kl": "actor/kl_loss",
}
"""TRL's name in its logs → ours. Its other numbers keep theirs behind `trl/`."""


class TraceSession:
    def __init__(self, trainer: Any, settings: TraceSettings, log_probs_and_entropies: Callable[..., Any]) -> None:
        self.trainer = trainer
        self.settings = settings
        self.step = 0
        """Rollouts so far."""
        self.errors = 0
        """Rollouts that could not be traced; each was reported."""
        self.ranks = Ranks(dist.group.WORLD if trainer.accelerator.num_processes > 1 else None)
        self._policy = TrlPolicy.of(trainer, log_probs_and_entropies)
        self._files: RunFiles | None = None
        """Of the first process; the others write nothing."""
        self._detectors: Any = None
        self._steps: InstrumentSteps | None = None
        """Between the begin and the end of training."""
        self._host: TrlHost
        self._run: TrlRun
        self._rewards: Tensor | None = None
        self._failed = False
        """On this rank; the others will hear of it when all of them meet."""
        self._generated: list[tuple[Tensor, Tensor]] | None = None
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
        path = self.settings.path
        is_new = self.ranks.place == 0 and not path.exists()
        try:
            with nothing_left_on_error(path, is_new), self.ranks.together():
                if self.ranks.place == 0:
                    self._open_files(path)
                self._steps = self._instruments()
                self._steps.start(self.step)
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

    def _instruments(self) -> InstrumentSteps:
        self._host = TrlHost(self.trainer, self._policy, self.ranks)
        sections, left_out = self.settings.sections_for(self._host.cannot)
        if self._files is not None:
            for line in left_out:
                self._files.messages.telling(print)(f"gradtrace: {line}")
        report = logger.warning if self._files is not None else logger.debug
        self._run = TrlRun(self._host, self.settings.truth, report)
        meta = {"task": self._run.task.name, "temperature": self.trainer.temperature}
        folder = None if self._files is None else self._files.traces
        steps = InstrumentSteps(self._host, self._run, sections, folder, meta=meta, truth=self.settings.truth)
        self._run.steps = steps
        if self._files is not None:
            self._detectors = steps.watch(self._files.path)
            self._detectors.start(self.step)
        return steps

    def close(self) -> None:
        """Training has ended. What was captured of a rollout that is not used up is written too."""
        if self._steps is None:
            return
        self._finish()
        self._flush_metrics()
        self._steps.close()
        self._steps = None
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

    @property
    def _rollout(self) -> Rollout | None:
        """The rollout that is being traced; None if there is none."""
        return None if self._steps is None else self._host.rollout

    def _still_traced(self) -> Rollout | None:
        """The rollout, if its trace has failed on no rank; if it has, all of them drop it. Collective."""
        if any(self.ranks.gather(self._failed)):
            self.errors += 1
            self._failed = False
            self._drop()
        return self._rollout

    def _drop(self) -> None:
        assert self._steps is not None
        self._steps.observers.drop()
        self._host.drop()

    # ------------------------------------------------------------ a rollout

    @contextmanager
    def generating(self) -> Iterator[None]:
        self._generated = []
        try:
            yield
        finally:
            self._generated = None if self._steps is None else self._generated

    def see_rewards(self, of_functions: Tensor) -> None:
        """float[R, functions], NaN where a function gave none."""
        weighted = (of_functions * self.trainer.reward_weights.to(of_functions.device)).nansum(dim=1)
        weighted[torch.isnan(of_functions).all(dim=1)] = torch.nan
        self._rewards = weighted.detach().cpu()

    def begin(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> dict[str, Any]:
        """A rollout was generated and scored. Returns it with its rows numbered."""
        generated, self._generated = self._generated, None
        steps = self._steps
        if steps is None:
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
            self._host.train_on(self._new_rollout(steps, all_inputs, columns, rows))
        if (rollout := self._still_traced()) is not None:
            output = masked(output, rollout.batch, rows)
        return output | {ROW: rows.to(output["completion_ids"].device)}

    def _new_rollout(
        self, steps: InstrumentSteps, inputs: list[dict[str, Any]], output: dict[str, Tensor], own: Tensor
    ) -> Rollout:
        """`inputs` and `output` are those of all ranks, `own` the rows of this one."""
        trainer = self.trainer
        assert self._rewards is not None
        judged = ~self._rewards.isnan()
        batch = rollout_batch(inputs, output, self._rewards, trainer.num_generations, trainer.eos_token_ids)
        steps.sample(self.step, self._run.sample)
        batch = steps.begin(batch, self.step)
        written = batch.response_mask.any(1)
        trained = (judged if batch.kept is None else judged & batch.kept) & written
        rollout = Rollout(
            batch=batch,
            update=OptimizerStep(self.step, epoch=0, mini_batch=0, number=0, rows=trained.nonzero().squeeze(-1)),
            began_at=trainer.state.global_step,
            rows=own,
            slices_left=trainer.args.steps_per_generation,
            has_statistics=ENTROPIES in output,
        )
        if batch.kept is not None and not rollout.has_statistics:
            # They will have no pass of TRL's; they are few.
            dropped = (~batch.kept & written).nonzero().squeeze(-1)
            known = fill_statistics(self._policy, batch, MicroBatches(batch, TOKENS_PER_PASS), dropped)
            for name, values in rollout.statistics.items():
                values[dropped] = known.need(name)[dropped]
        return rollout

    @property
    def wants_statistics(self) -> bool:
        return self._generated is not None or (self._steps is not None and self._host.slice is not None)

    def see_statistics(self, log_probs: Tensor, entropies: Tensor) -> None:
        """Float[b, C], of a forward pass that TRL made."""
        if self._generated is not None:
            self._generated.append((log_probs, entropies))
        elif (rollout := self._rollout) is not None and self._host.slice is not None and not self._failed:
            with self._guarded():
                rollout.see_statistics(self._host.slice, log_probs, entropies)

    # ------------------------------------------------------------ a slice of it

    @contextmanager
    def training_step(self) -> Iterator[None]:
        with ExitStack() as self._around_slice:
            yield
        if (rollout := self._rollout) is None:
            return
        self._host.slice = None
        rollout.slices_left -= 1
        if rollout.slices_left == 0:
            self._score()

    def see_optimizer_step(self) -> None:
        """The weights have moved."""
        if (rollout := self._rollout) is not None and rollout.slices_left == 0:
            self._finish()

    def enter_slice(self, inputs: dict[str, Any]) -> None:
        """The forward and backward pass of a slice begin; they end with `training_step`."""
        if self._steps is None or self._rollout is None:
            return
        with self._guarded():
            rows = self._host.enter_slice(inputs)
        if (rollout := self._still_traced()) is not None:
            observers = self._steps.observers
            observers.before_passes(dataclasses.replace(rollout.update, number=self._host.steps_taken), rows)
            self._around_slice.enter_context(observers.around_backward(self._host.pass_of_slice()))

    def _score(self) -> None:
        """The rollout has had its first pass, and the optimizer step comes next: observers look at its gradient."""
        if self._steps is None or (rollout := self._still_traced()) is None:
            return
        rollout.batch = rollout.complete(self.ranks)
        with self._guarded():
            self._steps.observers.before_step(rollout.update)
        rollout.is_scored = True
        if self._host.next_gradient() is None:
            self._finish()

    def _finish(self) -> None:
        """The optimizer step is over (or training ends): write."""
        steps = self._steps
        if steps is None or (rollout := self._still_traced()) is None:
            return
        if not rollout.is_scored:
            self._score()
            if self._rollout is None:
                return
        batch = rollout.batch
        with self._guarded():
            steps.observers.after_step(rollout.update, moved=True)
            metrics = steps.finish(batch, self.step)
            entropies = batch.need("entropies")[batch.response_mask]
            metrics |= batch_metrics(batch) | {"actor/entropy": float(entropies.mean())}
            self._batch = batch
            self._line |= metrics | {"trl/global_step": float(self.trainer.state.global_step)}
        self._still_traced()
        self._drop()

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
            self._line[UNTRACED] = float(self.errors)
            if self._batch is not None:
                self._line |= self._detectors.see(self.step, self._batch, self._line)
            self._batch = None
            self._files.log(self.step, self._line)
        self._line = {}
