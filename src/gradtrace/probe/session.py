"""From a checkpoint to the results of a probe, in phases that are kept on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.config_loader import to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.estimates import Tokens
from gradtrace.instruments.entropy_probe.passes import TokenBatch, evaluation_batch, update_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Prediction, Progress, Shares, Update
from gradtrace.integrations.verl.launch.checkpoints import opened
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.rollouts import judge
from gradtrace.probe import preflight
from gradtrace.probe.config import ProbeConfig
from gradtrace.probe.results import Fresh, ProbeResults
from gradtrace.rollout.params import EVERY_TOKEN, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.terminal import progress_bar, say
from gradtrace.trace.atomic import DamagedError, atomic_write, seal, unseal
from gradtrace.trace.phases import PhaseStore, belongs_to, load_batch
from gradtrace.trace.run_log import RunLog
from gradtrace.training.source import Loaded, Source

if TYPE_CHECKING:
    from rich.console import Console

FACTS = "clip_factor, grad_norm"
OFF_POLICY = 0.01
"""Mean difference of log-probs, in nats per token, above which E was not sampled from this policy."""


class Phases:
    """Shows the phase that runs, if there is a console, and keeps how long each took, over all attempts, in the
    probe's folder and its run.log."""

    def __init__(self, console: Console | None, folder: Path) -> None:
        self.console = console
        self.file = folder / "seconds.json"
        self.log = RunLog(folder)
        self.seconds: dict[str, float] = {}
        if self.file.is_file():
            with contextlib.suppress(DamagedError):
                self.seconds = unseal(self.file.read_bytes())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Progress]:
        """The value is called with (done, all)."""
        began = time.monotonic()
        with progress_bar(self.console, name) as progress:
            yield progress
        passed = time.monotonic() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + passed, 3)
        atomic_write(self.file, seal(self.seconds))
        self.message(f"{name}: {passed:.2f} s")

    def message(self, text: str) -> None:
        self.log.tell(text)
        if self.console is not None:
            say(self.console, text)


def run_probe(
    checkpoint: Path,
    config: ProbeConfig,
    run_overrides: list[str] | None = None,
    output: Path | None = None,
    console: Console | None = None,
) -> ProbeResults:
    """Probe a checkpoint of a run (RUN/checkpoints/step_N) or a plain transformers folder. `output`: where results go;
    a folder with an interrupted probe of the same settings is continued."""
    source = Source.of(opened(checkpoint), run_overrides or [])
    source.check_optimizer(config.optimizer, "probe")
    rollout = source.run.rollout
    preflight.check_sampling(rollout.temperature, rollout.top_p, rollout.top_k, "rollout", wanted=rollout.temperature)
    identity = {
        "checkpoint": str(source.checkpoint),
        "seal": source.seal,
        "probe": dataclasses.asdict(config),
        "run": to_yaml(dataclasses.replace(source.run, resume="")),
    }
    folder = output or source.output("probes", lambda found: belongs_to(found, "probe", identity))
    store = PhaseStore(folder, "probe", identity)
    phases = Phases(console, store.folder)
    try:
        with phases.phase("loading the model"):
            loaded = source.load(config.optimizer, config.lr, config.precision)
        return _Session(source, config, loaded, store, phases).run()
    finally:
        phases.log.close()


class _Session:
    def __init__(self, source: Source, config: ProbeConfig, loaded: Loaded, store: PhaseStore, display: Phases) -> None:
        self.source = source
        self.config = config
        self.parts, self.policy = loaded.parts, loaded.policy
        self.loaded = loaded
        self.store = store
        self.display = display
        clip = source.run.actor.optim.grad_clip
        self.probe = EntropyProbe(self.policy.model, loaded.optimizer, clip)

    def run(self) -> ProbeResults:
        self._preflight_model()
        rollout, update = self.E_rollout, self.U_rollout
        prediction = self._predict(rollout)
        shares = self._shares(prediction)
        results = ProbeResults(
            source=self.source,
            optimizer=self.config.optimizer,
            step=self.loaded.step,
            rate=self.loaded.rate,
            folder=self.store.folder,
            tokenizer=self.parts.task.tokenizer,
            task=self.parts.task.name,
            evaluation=rollout,
            update=update,
            prediction=prediction,
            shares=shares,
            after={eta: self._after(eta) for eta in self.config.eta},
            fresh={eta: self._fresh(eta, rollout) for eta in self._fresh_etas(rollout)},
            **self._gradient_facts(),
            seconds=self.display.seconds,
        )
        self.store.remove("gradient")  # as large as the model, and made anew if somebody asks again
        return results

    # ------------------------------------------------------------ preflight

    def _preflight_model(self) -> None:
        E, U = self.prompts
        preflight.check_prompts([prompt.ids for prompt in E], [prompt.ids for prompt in U])
        missed = preflight.check_reach(self.policy, (E or U)[0].ids)
        if missed:
            self.display.message(f"{len(missed)} parameters are not reached by the loss, e.g. {min(missed)}")
        if self.config.optimizer == "checkpoint" and self.loaded.step > 0:
            preflight.check_optimizer_state(self.loaded.optimizer, self.policy.trainable(), missed)

    @cached_property
    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts of E and of U: held-out ones, and the next ones of the run."""
        task, config = self.parts.task, self.config
        E = self._given_prompts("evaluation_batch") or task.held_out(
            config.evaluation_prompts, "evaluation_prompts", self.display.message
        )
        U = self._given_prompts("update_batch") or task.next_prompts(config.update_prompts)
        if len(E) < 2:
            raise GradtraceError(
                f"the task has {len(E)} held-out prompts: E needs at least 2. Give data.validation files, or a larger "
                "data.validation_fraction"
            )
        return E, U

    def _given_prompts(self, key: str) -> list[Prompt]:
        """Prompts of a batch that was given in a file, which is checked."""
        path = getattr(self.config, key)
        if not path:
            return []
        batch, sampling = load_batch(Path(path))
        preflight.check_batch(batch, f"{key}={path}", len(self.policy.model.get_input_embeddings().weight))
        if key == "evaluation_batch":
            preflight.check_sampling(**sampling, where=f"{key}={path}", wanted=self.source.run.rollout.temperature)
        elif batch.rewards is None:
            raise GradtraceError(f"{key}={path}: its responses have no rewards")
        return [Prompt(ids, {}) for ids in batch.prompts]

    # ------------------------------------------------------------ batches

    @cached_property
    def E_rollout(self) -> RolloutBatch:
        return self.store.get_batch("evaluation", self._sample_evaluation)

    @cached_property
    def U_rollout(self) -> RolloutBatch:
        return self.store.get_batch("update", self._sample_update)

    @cached_property
    def E(self) -> TokenBatch:
        return evaluation_batch(self.policy, self.E_rollout, self.config.token_budget)

    @cached_property
    def U(self) -> TokenBatch:
        run = self.source.run
        loss = PolicyLoss(self.policy, run.algorithm, run.rollout.max_new_tokens)
        return update_batch(loss, self.U_rollout, self.config.token_budget)

    @property
    def sampling(self) -> dict[str, Any]:
        """How E and U are drawn: from the full distribution, at the temperature that the run trains at."""
        return {"temperature": self.source.run.rollout.temperature, **EVERY_TOKEN}

    def _sample(self, name: str, prompts: list[Prompt], n: int, seed: int) -> RolloutBatch:
        params = SamplingParams.of(self.source.run.rollout, self.parts.task.stop_token_ids, n=n, **EVERY_TOKEN)
        with self.display.phase(name) as progress:
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
        with self.display.phase("log-probs of U"):
            return self.loaded.completed(batch, self.config.token_budget), sampling

    # ------------------------------------------------------------ phases

    @cached_property
    def _update(self) -> Update:
        """Δθ, from the gradient on disk; made when a phase that is not there yet asks for it."""
        found = self.store.get("gradient", self._gradient)
        facts = found.pop(FACTS)
        return self.probe.update_of(found, float(facts[0]), float(facts[1]))

    def _gradient(self) -> dict[str, Tensor]:
        with self.display.phase("gradient of U") as progress:
            update = self.probe.update(self.U, progress)
        facts = torch.tensor([update.clip_factor, update.grad_norm], dtype=torch.float64)
        return {**update.gradient, FACTS: facts}

    def _gradient_facts(self) -> dict[str, float]:
        def compute() -> dict[str, Tensor]:
            return {FACTS: torch.tensor([self._update.clip_factor, self._update.grad_norm])}

        clip_factor, grad_norm = self.store.get("gradient_facts", compute)[FACTS].tolist()
        return {"clip_factor": clip_factor, "grad_norm": grad_norm}

    def _predict(self, rollout: RolloutBatch) -> Prediction:
        def base() -> dict[str, Tensor]:
            with self.display.phase("E before the update") as progress:
                tokens = self.probe.tokens(self.E, progress)
            sampled = rollout.sampler_log_probs[rollout.response_mask].double()
            apart = float((sampled - tokens.log_probs).abs().mean())
            if apart > OFF_POLICY:
                raise GradtraceError(
                    f"E was not sampled from this policy: its log-probs differ by {apart:.3g} nats per token on average"
                )
            return {"log_probs": tokens.log_probs, "entropies": tokens.entropies}

        def change() -> dict[str, Tensor]:
            update = self._update
            with self.display.phase("prediction (forward mode over E)") as progress:
                found = self.probe.predict(self.E, update, self._tokens(before), progress)
            return {"d_log_probs": found.d_log_probs, "d_entropies": found.d_entropies}

        before = self.store.get("evaluation_before", base)
        return Prediction(self._tokens(before), **self.store.get("prediction", change))

    def _tokens(self, found: dict[str, Tensor]) -> Tokens:
        return Tokens(self.E.lengths, self.E.group, found["log_probs"], found["entropies"])

    def _shares(self, prediction: Prediction) -> Shares:
        def compute() -> dict[str, Tensor]:
            update = self._update
            with self.display.phase("shares (backward over E, forward mode over U)") as progress:
                found = self.probe.shares(prediction, self.E, update, self.U, progress)
            rows = torch.tensor([found.momentum, found.decay, found.legacy], dtype=torch.float64)
            return {"tokens": found.tokens, "responses": found.responses, "rows": rows}

        found = self.store.get("shares", compute)
        return Shares(found["tokens"], found["responses"], *found["rows"].tolist())

    def _after(self, eta: float) -> Tokens:
        def compute() -> dict[str, Tensor]:
            update = self._update
            with self.display.phase(f"measuring at {eta:g}·lr") as progress, self.probe.moved(update, eta):
                tokens = self.probe.tokens(self.E, progress)
            return {"log_probs": tokens.log_probs, "entropies": tokens.entropies}

        return self._tokens(self.store.get(f"evaluation_after_{eta:g}", compute))

    def _fresh_etas(self, rollout: RolloutBatch) -> list[float]:
        """Where to sample anew: everywhere, if the prompts of E have equally many responses."""
        n = len(rollout) // len(rollout.prompts)
        regular = torch.arange(len(rollout.prompts)).repeat_interleave(n)
        if self.config.fresh and not torch.equal(rollout.group, regular):
            self.display.message("fresh samples are left out: the prompts of E have different numbers of responses")
            return []
        return self.config.eta if self.config.fresh else []

    def _fresh(self, eta: float, rollout: RolloutBatch) -> Fresh:
        """E's prompts sampled anew at the moved weights, with E's random numbers."""

        def compute() -> dict[str, Tensor]:
            update = self._update
            prompts = [Prompt(ids, {}) for ids in rollout.prompts]
            n = len(rollout) // len(rollout.prompts)
            with self.probe.moved(update, eta):
                fresh = self._sample(f"sampling at {eta:g}·lr", prompts, n, seed=1)
                tokens = self.probe.tokens(evaluation_batch(self.policy, fresh, self.config.token_budget))
            return {
                "lengths": tokens.lengths,
                "log_probs": tokens.log_probs,
                "entropies": tokens.entropies,
                "changed": torch.tensor(
                    sum(a != b for a, b in zip(fresh.response_ids, rollout.response_ids, strict=True))
                ),
            }

        found = self.store.get(f"fresh_{eta:g}", compute)
        tokens = Tokens(found["lengths"], self.E.group, found["log_probs"], found["entropies"])
        return Fresh(tokens, int(found["changed"]))
