"""From a checkpoint to what a probe found, in phases that are kept on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.commands.pages import write_report
from gradtrace.commands.probe import preflight
from gradtrace.commands.probe.config import ProbeConfig
from gradtrace.commands.probe.page import identity_picture, page, sweep_picture
from gradtrace.config.loader import to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE, RECORD
from gradtrace.instruments.entropy_probe.estimates import Estimate, Measured, Prediction, Tokens, fresh_change
from gradtrace.instruments.entropy_probe.passes import TokenBatch, evaluation_batch, update_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Shares, Update
from gradtrace.instruments.entropy_probe.reporter import Probed
from gradtrace.instruments.record import Record
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.rollouts import judge
from gradtrace.rollout.settings import EVERY_TOKEN, SamplingParams
from gradtrace.runs import Run, open_run
from gradtrace.tasks.base import Prompt
from gradtrace.terminal import Progress, progress_bar, say
from gradtrace.trace.files import DamagedError, atomic_write, seal, unseal
from gradtrace.trace.results import ResultStore, load_batch
from gradtrace.trace.run_files import RunFiles, RunLog
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.state import completed

if TYPE_CHECKING:
    from rich.console import Console

OFF_POLICY = 0.01
"""Mean difference of log-probs, in nats per token, above which E was not sampled from this policy."""


@dataclass(frozen=True, eq=False)
class Fresh(Tokens):
    """E's prompts sampled anew at the moved weights, with E's random numbers."""

    changed: int
    """Sequences that came out differently. With few of them the standard error is too small: it cannot know of the rare
    sequence that did not change this time."""


@dataclass(frozen=True)
class Clipping:
    clip_factor: float
    grad_norm: float


def run_probe(
    checkpoint: Path,
    config: ProbeConfig,
    run_overrides: list[str] | None = None,
    output: Path | None = None,
    console: Console | None = None,
) -> Probe:
    """Probe a checkpoint of a run (RUN/checkpoints/step_N) or a plain transformers folder. `output`: where results go;
    a folder with an interrupted probe of the same settings is continued."""
    run = open_run(checkpoint, run_overrides or [])
    run.check_optimizer(config.optimizer, "probe")
    rollout = run.settings.rollout
    preflight.check_sampling(rollout.temperature, rollout.top_p, rollout.top_k, "rollout", wanted=rollout.temperature)
    store = run.result_store("probes", "probe", output, probe=dataclasses.asdict(config))
    log = RunLog(store.folder)
    try:
        return Probe(run, config, store, log, console).complete()
    finally:
        log.close()


class Probe:
    """The next update of a checkpoint and what it does to entropy. Every phase is made when it is first asked for, and
    read from its file after that. `console`: shows the phase that runs."""

    def __init__(self, run: Run, config: ProbeConfig, store: ResultStore, log: RunLog, console: Console | None) -> None:
        self.settings, self.config = run.settings, config
        self.checkpoint = run.checkpoint(resumable=True).folder.resolve()
        self.store, self.log, self.console = store, log, console
        self.folder = store.folder
        self.seconds: dict[str, float] = {}
        """How long each phase took, over all attempts."""
        with contextlib.suppress(DamagedError, FileNotFoundError):
            self.seconds = unseal((self.folder / "seconds.json").read_bytes())
        with self.phase("loading the model"):
            self.loaded = run.next_step(config.optimizer, config.lr, config.precision)
        self.parts, self.policy = self.loaded.components, self.loaded.policy
        self.probe = EntropyProbe(self.policy.model, self.loaded.optimizer, run.settings.actor.optim.grad_clip)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Progress]:
        """The value is called with (done, all)."""
        began = time.monotonic()
        with progress_bar(self.console, name) as progress:
            yield progress
        passed = time.monotonic() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + passed, 3)
        atomic_write(self.folder / "seconds.json", seal(self.seconds))
        self.message(f"{name}: {passed:.2f} s")

    def message(self, text: str) -> None:
        self.log.tell(text)
        if self.console is not None:
            say(self.console, text)

    def complete(self) -> Probe:
        """Make all phases that are not there yet."""
        self._preflight_model()
        _ = self.evaluation, self.update, self.prediction, self.shares, self.after, self.fresh, self.clipping
        self.store.remove("gradient")  # as large as the model, and made anew if somebody asks again
        return self

    # ------------------------------------------------------------ preflight

    def _preflight_model(self) -> None:
        evaluation, update = self.prompts
        preflight.check_prompts([prompt.ids for prompt in evaluation], [prompt.ids for prompt in update])
        missed = preflight.not_reached(self.policy, evaluation[0].ids)
        if missed:
            self.message(f"{len(missed)} parameters are not reached by the loss, e.g. {min(missed)}")
        if self.config.optimizer == "checkpoint" and self.loaded.step > 0:
            preflight.check_optimizer_state(self.loaded.optimizer, self.policy.trainable(), missed)

    @cached_property
    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts of E and of U: held-out ones, and the next ones of the run."""
        task, config = self.parts.task, self.config
        evaluation = self._given_prompts("evaluation_batch") or task.held_out(
            config.evaluation_prompts, "evaluation_prompts", self.message
        )
        update = self._given_prompts("update_batch") or task.next_prompts(config.update_prompts)
        if len(evaluation) < 2:
            raise GradtraceError(
                f"the task has {len(evaluation)} held-out prompts: E needs at least 2. Give data.validation files, "
                "or a larger data.validation_fraction"
            )
        return evaluation, update

    def _given_prompts(self, key: str) -> list[Prompt]:
        """Prompts of a batch that was given in a file, which is checked."""
        path = getattr(self.config, key)
        if not path:
            return []
        batch, sampling = load_batch(Path(path))
        preflight.check_batch(batch, f"{key}={path}", len(self.policy.model.get_input_embeddings().weight))
        if key == "evaluation_batch":
            preflight.check_sampling(**sampling, where=f"{key}={path}", wanted=self.settings.rollout.temperature)
        elif batch.rewards is None:
            raise GradtraceError(f"{key}={path}: its responses have no rewards")
        return [Prompt(ids, {}) for ids in batch.prompts]

    # ------------------------------------------------------------ batches

    @cached_property
    def evaluation(self) -> RolloutBatch:
        return self.store.get_batch("evaluation", self._sample_evaluation)

    @cached_property
    def update(self) -> RolloutBatch:
        return self.store.get_batch("update", self._sample_update)

    @cached_property
    def _evaluation_tokens(self) -> TokenBatch:
        return evaluation_batch(self.policy, self.evaluation, self.config.token_budget)

    @cached_property
    def _update_tokens(self) -> TokenBatch:
        run = self.settings
        loss = PolicyLoss(self.policy, run.algorithm, run.rollout.max_new_tokens)
        return update_batch(loss, self.update, self.config.token_budget)

    @property
    def sampling(self) -> dict[str, Any]:
        """How E and U are drawn: from the full distribution, at the temperature that the run trains at."""
        return {"temperature": self.settings.rollout.temperature, **EVERY_TOKEN}

    def _sample(self, name: str, prompts: list[Prompt], n: int, seed: int) -> RolloutBatch:
        params = SamplingParams.of(self.settings.rollout, self.parts.task.stop_token_ids, n=n, **EVERY_TOKEN)
        with self.phase(name) as progress:
            return self.parts.sampler.generate(
                [prompt.ids for prompt in prompts],
                params,
                generator=torch.Generator().manual_seed(1_000_003 * self.config.seed + seed),
                items=[prompt.item for prompt in prompts],
                progress=progress,
            )

    def _sample_evaluation(self) -> tuple[RolloutBatch, dict[str, Any]]:
        if self.config.evaluation_batch:
            return load_batch(Path(self.config.evaluation_batch))
        return self._sample("sampling E", self.prompts[0], self.config.evaluation_n, seed=1), self.sampling

    def _sample_update(self) -> tuple[RolloutBatch, dict[str, Any]]:
        """U with everything that the loss needs."""
        parts = self.parts
        if self.config.update_batch:
            batch, sampling = load_batch(Path(self.config.update_batch))
        else:
            batch = self._sample("sampling U", self.prompts[1], self.config.update_n, seed=2)
            batch, sampling = judge(batch, parts.task.tokenizer, parts.reward), self.sampling
        with self.phase("log-probs of U"):
            return completed(self.parts, self.policy, batch, self.config.token_budget), sampling

    # ------------------------------------------------------------ phases

    @cached_property
    def _step(self) -> Update:
        """Δθ, from the gradient on disk; made when a phase that is not there yet asks for it."""
        gradient = self.store.get("gradient", self._gradient)
        return self.probe.update_of(gradient, self.clipping.clip_factor, self.clipping.grad_norm)

    def _gradient(self) -> dict[str, Tensor]:
        with self.phase("gradient of U") as progress:
            update = self.probe.update(self._update_tokens, progress)
        self.store.get_numbers("gradient_facts", Clipping, lambda: Clipping(update.clip_factor, update.grad_norm))
        return update.gradient

    @property
    def clipping(self) -> Clipping:
        """What clipping multiplied the gradient by, and its norm before that: kept with the gradient."""
        return self.store.numbers("gradient_facts", Clipping)

    @cached_property
    def prediction(self) -> Prediction:
        def change() -> dict[str, Tensor]:
            step = self._step
            with self.phase("prediction (forward mode over E)") as progress:
                found = self.probe.predict(self._evaluation_tokens, step, base, progress)
            return {"d_log_probs": found.d_log_probs, "d_entropies": found.d_entropies}

        base = self.store.get_numbers("evaluation_before", Tokens, self._before)
        return Prediction(base, **self.store.get("prediction", change))

    def _before(self) -> Tokens:
        with self.phase("E before the update") as progress:
            tokens = self.probe.tokens(self._evaluation_tokens, progress)
        sampled = self.evaluation.sampler_log_probs[self.evaluation.response_mask].double()
        apart = float((sampled - tokens.log_probs).abs().mean())
        if apart > OFF_POLICY:
            raise GradtraceError(
                f"E was not sampled from this policy: its log-probs differ by {apart:.3g} nats per token on average"
            )
        return tokens

    @cached_property
    def shares(self) -> Shares:
        def compute() -> Shares:
            prediction, step = self.prediction, self._step
            with self.phase("shares (backward over E, forward mode over U)") as progress:
                return self.probe.shares(prediction, self._evaluation_tokens, step, self._update_tokens, progress)

        return self.store.get_numbers("shares", Shares, compute)

    @cached_property
    def after(self) -> dict[float, Tokens]:
        """η in units of the learning rate → E at θ + η·Δθ."""
        return {eta: self._after(eta) for eta in self.config.eta}

    def _after(self, eta: float) -> Tokens:
        def compute() -> Tokens:
            step = self._step
            with self.phase(f"measuring at {eta:g}·lr") as progress, self.probe.moved(step, eta):
                return self.probe.tokens(self._evaluation_tokens, progress)

        return self.store.get_numbers(f"evaluation_after_{eta:g}", Tokens, compute)

    @cached_property
    def fresh(self) -> dict[float, Fresh]:
        """η → E sampled anew there, where that was asked for and its prompts have equally many responses."""
        rollout = self.evaluation
        n = len(rollout) // len(rollout.prompts)
        regular = torch.arange(len(rollout.prompts)).repeat_interleave(n)
        if self.config.fresh and not torch.equal(rollout.group, regular):
            self.message("fresh samples are left out: the prompts of E have different numbers of responses")
            return {}
        return {eta: self._fresh(eta, n) for eta in self.config.eta} if self.config.fresh else {}

    def _fresh(self, eta: float, n: int) -> Fresh:
        def compute() -> Fresh:
            step, before = self._step, self.evaluation
            prompts = [Prompt(ids, {}) for ids in before.prompts]
            with self.probe.moved(step, eta):
                fresh = self._sample(f"sampling at {eta:g}·lr", prompts, n, seed=1)
                found = self.probe.tokens(evaluation_batch(self.policy, fresh, self.config.token_budget))
            changed = sum(a != b for a, b in zip(fresh.response_ids, before.response_ids, strict=True))
            return Fresh(found.lengths, before.group, found.log_probs, found.entropies, changed)

        return self.store.get_numbers(f"fresh_{eta:g}", Fresh, compute)

    # ------------------------------------------------------------ what was found

    def measured(self, eta: float) -> Measured:
        return self.prediction.against(self.after[eta], eta)

    def freshly_measured(self, eta: float) -> Estimate:
        return fresh_change(self.prediction.base, self.fresh[eta])

    @property
    def probed(self) -> Probed:
        """The update as it is, at η = 1."""
        rows = torch.arange(len(self.update))
        return Probed(rows, self.evaluation, self.prediction, self.shares, self.after[1.0], self.loaded.rate)

    def sweep(self) -> list[dict[str, float]]:
        """One row for each η, smallest first."""
        predicted = self.prediction.change
        rows = []
        for eta in sorted(self.after):
            measured = self.measured(eta)
            row = {
                "eta": eta,
                "predicted": eta * predicted.value,
                "predicted_stderr": eta * predicted.stderr,
                "predicted_half": eta * predicted.half,
                "measured": measured.change.value,
                "measured_stderr": measured.change.stderr,
                "measured_half": measured.change.half,
                "difference_stderr": measured.difference.stderr,
                "difference_half": measured.difference.half,
                "ess": measured.ess,
                "clipped_weights": measured.clipped,
            }
            if eta in self.fresh:
                fresh = self.freshly_measured(eta)
                row |= {"fresh": fresh.value, "fresh_stderr": fresh.stderr, "fresh_half": fresh.half}
                row["fresh_changed"] = self.fresh[eta].changed
            rows.append(row)
        return rows

    def record(self) -> dict[str, Any]:
        """Everything but the numbers per token, for report.json. Entropy changes in nats per token of E."""
        p, s = self.prediction, self.shares
        sweep = self.sweep()
        return {
            "checkpoint": str(self.checkpoint),
            "step": self.loaded.step,
            "optimizer": self.config.optimizer,
            "learning_rate": self.loaded.rate,
            "grad_norm": self.clipping.grad_norm,
            "clip_factor": self.clipping.clip_factor,
            "evaluation": {
                "sequences": len(self.evaluation),
                "tokens": int(p.base.lengths.sum()),
                "mean_entropy": p.base.mean_entropy,
            },
            "update": {
                "responses": len(self.update),
                "tokens": int(self.update.response_mask.sum()),
                "mean_reward": float(self.update.need("rewards").mean()),
            },
            "predicted": dataclasses.asdict(p.change),
            "predicted_reward_to_go": dataclasses.asdict(p.reward_to_go),
            "predicted_score_function": dataclasses.asdict(p.score_function),
            "predicted_legacy": s.legacy,
            "covariance_estimate": self.probed.covariance(self.update),
            "shares": {
                "responses": s.responses.tolist(),
                "momentum": s.momentum,
                "decay": s.decay,
                "sum": float(s.responses.sum()) + s.momentum + s.decay,
            },
            "sweep": sweep,
            "log_log_slope": log_log_slope(sweep),
            "sign": "positive = entropy rises; shares: positive = raises entropy",
        }

    def write(self) -> Path:
        """report.json, report.html, pictures and the trace; returns the folder, which `gradtrace view` opens."""
        record = self.record()
        text = json.dumps({**record, "phase_seconds": self.seconds}, indent=2)
        pictures = {"predicted_vs_measured": identity_picture(record), "sweep": sweep_picture(record)}
        write_report(self.folder, text, page(record), **pictures)
        files = RunFiles(self.folder)
        files.write_config(to_yaml(dataclasses.replace(self.settings, resume="")))
        files.write_token_bytes(TokenBytes.from_tokenizer(self.parts.task.tokenizer))
        with TraceWriter(self.folder, ENTROPY_PROBE, on_error="raise") as writer:
            meta: dict[str, Any] = {"eta_sweep": record["sweep"], "task": self.parts.task.name}
            if 1.0 in self.fresh:
                fresh = self.freshly_measured(1.0)
                meta |= {"delta_h_fresh": fresh.value, "delta_h_fresh_stderr": fresh.stderr}
            # the step that would come next
            self.probed.write(Record(RECORD, None, writer), self.loaded.step + 1, self.update, **meta)
        return self.folder


def log_log_slope(sweep: list[dict[str, float]]) -> float | None:
    """The slope of log |measured| over log η by least squares, over η ≤ 0.1·lr where that leaves two: 1 = proportional
    to the step. None where the measured change is 0."""
    rows = [row for row in sweep if row["eta"] <= 0.1]
    rows = rows if len(rows) > 1 else sweep
    if len(rows) < 2 or any(row["measured"] == 0 for row in rows):
        return None
    pairs = [(math.log(row["eta"]), math.log(abs(row["measured"]))) for row in rows]
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope
