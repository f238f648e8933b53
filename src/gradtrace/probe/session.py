"""From a checkpoint to the results of a probe, in phases that are kept on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.config import Config
from gradtrace.config_loader import load_config, to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.estimates import Tokens
from gradtrace.instruments.entropy_probe.passes import (
    FullPrecision,
    TokenBatch,
    evaluation_batch,
    update_batch,
)
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Prediction, Progress, Shares, Update
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.rollouts import add_advantages, judge
from gradtrace.probe import preflight
from gradtrace.probe.config import ProbeConfig
from gradtrace.probe.phases import PhaseStore, is_probe, load_batch
from gradtrace.probe.results import Fresh, ProbeResults
from gradtrace.rollout.params import EVERY_TOKEN, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.trace.atomic import unseal
from gradtrace.training.checkpoint import MARKER, checkpoint_of
from gradtrace.training.parts import Parts, build_parts, needs_reference
from gradtrace.training.state import OPTIMIZER, STATE

SMALL_MODEL = 50_000_000
"""Parameters below which float64 costs little."""
OFF_POLICY = 0.01
"""Mean difference of log-probs, in nats per token, above which E was not sampled from this policy."""


class PhaseDisplay(Protocol):
    def phase(self, name: str) -> AbstractContextManager[Progress]:
        """Shows that a phase runs; the value is called with (done, all)."""

    def message(self, text: str) -> None: ...


class SilentPhases:
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Progress]:
        yield lambda done, total: None

    def message(self, text: str) -> None: ...


def run_probe(
    checkpoint: Path,
    config: ProbeConfig,
    run_overrides: list[str] | None = None,
    output: Path | None = None,
    display: PhaseDisplay | None = None,
) -> ProbeResults:
    """Probe a checkpoint of a run (RUN/checkpoints/step_N) or a plain transformers folder. `output`: where results go;
    a folder with an interrupted probe of the same settings is continued."""
    display = display or SilentPhases()
    source = Source.of(checkpoint, config, run_overrides or [])
    store = PhaseStore(output or source.default_output(), source.identity)
    return _Session(source, store, display).run()


@dataclasses.dataclass(frozen=True)
class Source:
    """The run and the checkpoint that are probed, and with which settings."""

    checkpoint: Path
    config: ProbeConfig
    run: Config
    is_plain: bool
    """A transformers folder without a run around it."""
    identity: dict[str, Any]

    @staticmethod
    def of(checkpoint: Path, config: ProbeConfig, overrides: list[str]) -> Source:
        plain = (checkpoint / "config.json").is_file()
        checkpoint = checkpoint.resolve() if plain else checkpoint_of(checkpoint.resolve())
        if plain:
            run = load_config([*overrides, f"model.path={checkpoint}"])
            files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(checkpoint.iterdir())]
            seal = hashlib.sha256(repr(files).encode()).hexdigest()
        else:
            run = load_config([f"resume={checkpoint.parent.parent}", *overrides])
            seal = hashlib.sha256((checkpoint / MARKER).read_bytes()).hexdigest()
        if plain and config.optimizer == "checkpoint":
            raise GradtraceError(
                f"{checkpoint} is a model without optimizer state: say whose update to probe, optimizer=adamw or "
                "optimizer=sgd"
            )
        identity = {
            "checkpoint": str(checkpoint),
            "seal": seal,
            "probe": dataclasses.asdict(config),
            "run": to_yaml(dataclasses.replace(run, resume="")),
        }
        return Source(checkpoint, config, run, plain, identity)

    def default_output(self) -> Path:
        """RUN/probes/step_N, or …_2, _3: the first that is new or was begun by the same probe."""
        if self.is_plain:
            base = Path(self.run.trainer.runs_dir) / "probes" / self.checkpoint.name
        else:
            base = self.checkpoint.parent.parent / "probes" / self.checkpoint.name
        number = 1
        while True:
            folder = base if number == 1 else base.with_name(f"{base.name}_{number}")
            if not folder.exists() or is_probe(folder, self.identity):
                return folder
            number += 1


class _Session:
    def __init__(self, source: Source, store: PhaseStore, display: PhaseDisplay) -> None:
        self.source = source
        self.config = source.config
        self.store = store
        self.display = display

    def run(self) -> ProbeResults:
        self._preflight_config()
        with self.display.phase("loading the model"):
            self._load()
        self._preflight_model()
        E_rollout = self.store.get_batch("evaluation", self._sample_evaluation)
        U_rollout = self.store.get_batch("update", self._sample_update)
        self.E = evaluation_batch(self.policy, E_rollout, self.config.token_budget)
        self.U = self._update_batch(U_rollout)
        prediction = self._predict(E_rollout)
        shares = self._shares(prediction)
        results = ProbeResults(
            source=self.source,
            step=self.step,
            rate=self.rate,
            folder=self.store.folder,
            tokenizer=self.parts.task.tokenizer,
            task=self.parts.task.name,
            evaluation=E_rollout,
            update=U_rollout,
            prediction=prediction,
            shares=shares,
            after={eta: self._after(eta, prediction.base) for eta in self.config.eta},
            fresh={eta: self._fresh(eta, E_rollout) for eta in self._fresh_etas(E_rollout)},
            **self._gradient_facts(),
        )
        self.store.remove("gradient")  # as large as the model, and made anew if somebody asks again
        return results

    # ------------------------------------------------------------ preflight and loading

    def _preflight_config(self) -> None:
        rollout = self.source.run.rollout
        preflight.check_sampling(rollout.temperature, rollout.top_p, rollout.top_k, "rollout")
        if not self.source.is_plain and self.config.optimizer == "checkpoint":
            path = self.source.checkpoint / OPTIMIZER
            if not path.is_file():
                raise GradtraceError(
                    f"{self.source.checkpoint} has no optimizer state ({OPTIMIZER} is not there): probe another update "
                    "with optimizer=adamw or optimizer=sgd"
                )

    def _load(self) -> None:
        run, checkpoint = self.source.run, self.source.checkpoint
        if not self.source.is_plain and not run.model.lora.rank and not needs_reference(run):
            # all weights are in the checkpoint: where the run started (the demo: a warm start) is not needed
            run = dataclasses.replace(
                run, model=dataclasses.replace(run.model, path=str(checkpoint / "policy"))
            )
        self.parts: Parts = build_parts(run, None if self.source.is_plain else checkpoint)
        parameters = sum(p.numel() for p in self.parts.policy.model.parameters())
        double = self.config.precision == "float64" or (
            self.config.precision == "auto" and parameters < SMALL_MODEL
        )
        self.dtype = torch.float64 if double else torch.float32
        self.parts.policy.model.to(
            self.dtype
        )  # parameters stay the same objects: the optimizer still knows them
        self.policy = FullPrecision.of(self.parts.policy)
        if self.parts.reference is not None and self.parts.reference.own is not None:
            self.parts.reference.own.model.to(self.dtype)
        self.step = 0
        if not self.source.is_plain:
            state = unseal((checkpoint / STATE).read_bytes())
            self.step = int(state["step"])
            self.parts.task.load_state_dict(state["data"])
        self.optimizer = self._optimizer()
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        clip = run.actor.optim.grad_clip
        self.probe = EntropyProbe(self.policy.model, self.optimizer, clip or None)

    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose update is probed, at the learning rate of the next step."""
        optim = self.source.run.actor.optim
        if self.config.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.policy.trainable().values(), lr=optim.lr)
        else:
            optimizer = self.parts.optimizer.adamw
            if self.config.optimizer == "checkpoint":
                self.parts.optimizer.load_state_tensors(load_file(self.source.checkpoint / OPTIMIZER))
            if not self.source.is_plain:
                self.parts.optimizer.begin_step(self.step + 1)
        for group in optimizer.param_groups:
            group["lr"] = self.config.lr or group["lr"]
        if not all(float(group["lr"]) > 0 for group in optimizer.param_groups):
            raise GradtraceError(
                f"the learning rate of step {self.step + 1} is 0, and with it the update: give one, e.g. lr=1e-5"
            )
        return optimizer

    def _preflight_model(self) -> None:
        E, U = self._prompts()
        preflight.check_prompts([prompt.ids for prompt in E], [prompt.ids for prompt in U])
        missed = preflight.check_reach(self.policy, (E or U)[0].ids)
        if missed:
            self.display.message(f"{len(missed)} parameters are not reached by the loss, e.g. {min(missed)}")
        if self.config.optimizer == "checkpoint" and self.step > 0:
            preflight.check_optimizer_state(self.optimizer, self.policy.trainable(), missed)

    def _prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts of E and of U: held-out ones, and the next ones of the run."""
        if not hasattr(self, "_chosen"):
            task, config = self.parts.task, self.config
            E = self._given_prompts("evaluation_batch") or task.validation_prompts(config.evaluation_prompts)
            U = self._given_prompts("update_batch") or task.next_prompts(config.update_prompts)
            if len(E) < 2:
                raise GradtraceError(
                    f"the task has {len(E)} held-out prompts: E needs at least 2. Give data.validation files, or a "
                    "larger data.validation_fraction"
                )
            self._chosen = (E, U)
        return self._chosen

    def _given_prompts(self, key: str) -> list[Prompt]:
        """Prompts of a batch that was given in a file, which is checked."""
        path = getattr(self.config, key)
        if not path:
            return []
        batch, sampling = load_batch(Path(path))
        preflight.check_batch(batch, f"{key}={path}", len(self.policy.model.get_input_embeddings().weight))
        if key == "evaluation_batch":
            preflight.check_sampling(**sampling, where=f"{key}={path}")
        elif batch.rewards is None:
            raise GradtraceError(f"{key}={path}: its responses have no rewards")
        return [Prompt(ids, {}) for ids in batch.prompts]

    # ------------------------------------------------------------ batches

    def _sample(self, name: str, prompts: list[Prompt], n: int, seed: int) -> RolloutBatch:
        params = SamplingParams.of(
            self.source.run.rollout, self.parts.task.stop_token_ids, n=n, temperature=1.0, **EVERY_TOKEN
        )
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
        return self._sample("sampling E", self._prompts()[0], self.config.evaluation_n, seed=1), SAMPLING

    def _sample_update(self) -> tuple[RolloutBatch, dict[str, Any]]:
        """U with everything that the loss needs."""
        run, parts = self.source.run, self.parts
        if self.config.update_batch:
            batch, sampling = load_batch(Path(self.config.update_batch))
        else:
            batch = self._sample("sampling U", self._prompts()[1], self.config.update_n, seed=2)
            batch, sampling = judge(batch, parts.task.tokenizer, parts.reward), SAMPLING
        micro_batches = MicroBatches(batch, self.config.token_budget)
        rows = torch.arange(len(batch))
        with self.display.phase("log-probs of U"):
            if parts.critic is not None:
                batch = parts.critic.add_values(batch, micro_batches)
            batch = batch.replace(
                sampler_log_probs=batch.sampler_log_probs.to(self.dtype)
            )  # columns follow it
            batch = fill_statistics(self.policy, batch, micro_batches, rows)
            if parts.reference is not None:
                batch = parts.reference.add_log_probs(batch, micro_batches(rows))
        estimator = advantage(run.algorithm.advantage, **run.algorithm.advantage_options)
        return add_advantages(batch, estimator), sampling

    def _update_batch(self, batch: RolloutBatch) -> TokenBatch:
        run = self.source.run
        loss = PolicyLoss(self.policy, run.algorithm, run.rollout.max_new_tokens)
        return update_batch(loss, batch, self.config.token_budget)

    # ------------------------------------------------------------ phases

    @property
    def _update(self) -> Update:
        """Δθ, from the gradient on disk; made when a phase that is not there yet asks for it."""
        if not hasattr(self, "_made"):
            found = self.store.get("gradient", self._gradient)
            facts = found.pop(FACTS)
            self._made = self.probe.update_of(found, float(facts[0]), float(facts[1]))
        return self._made

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

    def _after(self, eta: float, base: Tokens) -> Tokens:
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
            self.display.message(
                "fresh samples are left out: the prompts of E have different numbers of responses"
            )
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
                "changed": torch.tensor(sum(a != b for a, b in zip(ids(fresh), ids(rollout), strict=True))),
            }

        found = self.store.get(f"fresh_{eta:g}", compute)
        tokens = Tokens(found["lengths"], self.E.group, found["log_probs"], found["entropies"])
        return Fresh(tokens, int(found["changed"]))


def ids(batch: RolloutBatch) -> list[list[int]]:
    """The token ids of every response."""
    lengths = batch.response_lengths.tolist()
    return [row[:length] for row, length in zip(batch.responses.tolist(), lengths, strict=True)]


SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
FACTS = "clip_factor, grad_norm"
