"""From a checkpoint to a verdict on its scores: stored ones of the step after it, or fresh ones of fresh responses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, LossInputs, LossOutputs, policy_loss, token_weights
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.attribution import InfluenceConfig
from gradtrace.batch import RolloutBatch
from gradtrace.commands.pages import write_report
from gradtrace.commands.rollouts.attribution import scoring_run
from gradtrace.commands.verify.page import page, rank_picture
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.own_loop import stored_batch
from gradtrace.instruments.verify.measure import Size
from gradtrace.instruments.verify.trial import Scores, Trial, in_precision, plain_surrogate
from gradtrace.instruments.verify.verification import (
    OWN,
    Scoring,
    Verification,
    Verifier,
    asked_of,
    scoring,
    usual_scores,
)
from gradtrace.metrics import Timer
from gradtrace.rollout.sampler import evaluation_mode
from gradtrace.runs import NotStoredError, Run, open_run
from gradtrace.terminal import StageProgress
from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.results import ResultStore
from gradtrace.trace.step import Step
from gradtrace.training.checkpoint import OPTIMIZER
from gradtrace.training.experience import Experience
from gradtrace.training.state import NextStep, completed

STORED, STORED_OWN = "stored influence", "stored influence on own prompt"
TOKEN_BUDGET = 16384


@dataclass(frozen=True)
class Settings:
    size: Size = field(default_factory=Size)
    seed: int = 0
    budget: float = math.inf
    """Seconds; what is not done by then is done by the next call."""
    fresh: bool = False
    """Sample responses and score them, even where the run has stored scores of this checkpoint."""
    optimizer: str = "checkpoint"
    lr: float = 0.0
    precision: str = "auto"
    output: Path | None = None
    model: str = ""
    """Takes the steps, on stored rollouts of a run that is not its own."""
    step: int | None = None
    """With `model`: of these rollouts; None: the latest that have scores."""


@dataclass(frozen=True, eq=False)
class Material:
    """A mini-batch to take steps on, and what is known of it."""

    batch: RolloutBatch
    weights: Tensor | None
    """float64[R]: what the loss multiplies the terms of each response by; None: by the run's aggregation."""
    given: dict[str, Scores]
    """Stored scores; empty where there are none."""
    origin: str
    """Where the scores that are judged come from."""


@dataclass(frozen=True, eq=False)
class VerifyResult:
    verification: Verification
    folder: Path
    facts: dict[str, Any]
    """What was verified: checkpoint, step, where scores and responses come from."""

    def record(self) -> dict[str, Any]:
        return {**self.facts, **self.verification.record(), "seconds": round(self.verification.seconds, 2)}

    def write(self) -> dict[str, Any]:
        """report.json, report.html and the pictures; returns the record."""
        record = self.record()
        text = json.dumps(record, indent=1, allow_nan=False)
        write_report(self.folder, text, page(record), predicted_vs_measured=rank_picture(record, "predicted"))
        return record


def run_verify(
    path: Path, overrides: list[str], settings: Settings, progress: StageProgress, message: Callable[[str], None]
) -> VerifyResult:
    """`path`: a run, one of its checkpoints, or a plain transformers folder."""
    stored: Step | None
    if settings.model:
        run, stored, settings = of_model(path, overrides, settings, message)
    else:
        run = newest_with_scores(open_run(path, overrides), settings)
        stored = None if settings.fresh or settings.optimizer != "checkpoint" else stored_step(run)
    run.check_optimizer(settings.optimizer, "verify")
    progress("loading the model", 0, 1)
    loaded = run.next_step(settings.optimizer, settings.lr, settings.precision)
    store = run.result_store(
        "verify",
        "verification",
        settings.output,
        size=dataclasses.asdict(settings.size),
        settings=[settings.seed, settings.optimizer, settings.lr, settings.precision],
        stored=stored is not None and (stored.step if settings.model else True),
    )
    material = mini_batch_of(stored, run.settings) if stored is not None else sampled(loaded, settings, store, progress)
    groups = settings.size.groups
    with evaluation_mode(loaded.policy.model):
        trial = trial_of(run.settings, loaded, material)
        scores, question = usual_scores(trial, groups), "token"
        if not material.given:
            question, own = own_score(run.settings, trial, groups)
            scores = own | scores
        verifier = Verifier(trial, scores, material.given, settings.size, settings.seed, store, question)
        found = verifier.run(settings.budget, progress)
    facts = {
        "checkpoint": str(run.checkpoint(resumable=True).folder.resolve()),
        "step": loaded.step,
        "scores": material.origin,
        "optimizer": settings.optimizer,
        "learning_rate": loaded.rate,
        "precision": str(loaded.dtype).removeprefix("torch."),
    }
    return VerifyResult(found, store.folder, facts)


# ---------------------------------------------------------------- which checkpoint, which groups


def newest_with_scores(run: Run, settings: Settings) -> Run:
    """Of a run: its newest checkpoint whose next step was traced, else its latest."""
    if run.chosen is not None:
        return run
    there = [each for each in run.checkpoints if each.made_by != "final"]
    if not there and (run.path / "config.yaml").is_file() and not (run.path / "checkpoints").is_dir():
        raise NotStoredError(
            f"{run.given} has no checkpoints: say with --model whose steps are to be taken on its rollouts, a "
            "transformers folder or a checkpoint"
        )
    traced = set() if settings.fresh or not there else set(run.steps(INFLUENCE_TRACE))
    before_a_trace = [each for each in there if each.step is not None and each.step + 1 in traced]
    return Run(run.given, run.overrides, before_a_trace[-1]) if before_a_trace else run


def of_model(
    path: Path, overrides: list[str], settings: Settings, message: Callable[[str], None]
) -> tuple[Run, Step, Settings]:
    """The model that takes the steps, and the scores of run `path` that are judged by them."""
    run = open_run(path)
    scored = run.steps(INFLUENCE_TRACE)
    if not scored or settings.fresh:
        raise GradtraceError(
            f"--model judges stored scores of {path}, and {'--fresh asks for others' if scored else 'it has none'}: "
            f"make them with `gradtrace attribute {path} --model {settings.model}`"
        )
    stored = run.step(INFLUENCE_TRACE, scored[-1] if settings.step is None else settings.step)
    if stored.n_responses == 0 or "advantage" not in stored:
        raise GradtraceError(
            f"step {stored.step} of {path} has no scored responses with advantages; try another --step"
        )
    if stored.meta.get("model") != settings.model:
        by = stored.meta.get("model", "the run's own training")
        message(f"The scores are those of {by}; they are judged by steps of {settings.model}.")
    scoring = scoring_run(path, settings.model, overrides)
    state = scoring.checkpoint().optimizer_file
    if settings.optimizer == "checkpoint" and state is not None and state.name == OPTIMIZER:
        return open_run(state.parent, overrides), stored, settings
    is_new = settings.optimizer == "checkpoint" and state is None
    return scoring, stored, dataclasses.replace(settings, optimizer="adamw" if is_new else settings.optimizer)


def stored_step(run: Run) -> Step | None:
    """The trace of the step after the checkpoint, if it has scores that were made at the checkpoint's weights."""
    found = run.checkpoint(resumable=True)
    if found.made_by == "plain" or found.step is None or found.step + 1 not in run.steps(INFLUENCE_TRACE):
        return None
    try:
        step = run.step(INFLUENCE_TRACE, found.step + 1)
    except StepUnreadableError as error:
        raise GradtraceError(f"{error}. `--fresh` verifies fresh scores instead") from None
    usable = "advantage" in step and bool((step["optimizer_step"] == 0).any())
    return step if usable else None


def mini_batch_of(step: Step, run: Config) -> Material:
    """The first mini-batch of a stored step, which was scored at the weights of the checkpoint."""
    if "influence" not in step:
        raise GradtraceError(
            f"step {step.step} has scores from captured factors, whose unit is not nats of the objective: `--fresh` "
            "verifies the run's settings on fresh responses"
        )
    batch = stored_batch(step)
    first = torch.from_numpy(step["optimizer_step"] == 0)
    if "attributed" in step.meta:  # all mini-batches at the same weights
        first &= batch.group < (run.actor.mini_batch_size or len(batch.prompts))
    rows = first.nonzero().squeeze(-1).tolist()
    given: dict[str, Scores] = {}
    for name, column in ((STORED, "influence"), (STORED_OWN, "influence_own")):
        if column in step:
            flat = torch.from_numpy(step[column].astype(np.float64))
            flat[torch.from_numpy(~step["captured"])] = math.nan
            written = torch.from_numpy(step["loss_mask"]) if "loss_mask" in step else torch.ones_like(flat).bool()
            own, masks = (values.split(batch.response_lengths.tolist()) for values in (flat, written))
            given[name] = {place: own[r][masks[r]] for place, r in enumerate(rows)}
    if all(bool(own.isnan().all()) for own in given.get(STORED_OWN, {}).values()):
        given.pop(STORED_OWN, None)
    origin = f"stored by training step {step.step}"
    if "attributed" in step.meta:
        origin = f"of {step.meta['model']} on the rollouts of step {step.step}"
    weights = torch.from_numpy(step["loss_weight"].astype(np.float64))[first] if "loss_weight" in step else None
    return Material(batch.select(first), weights, given, f"{origin}, its first mini-batch")


TRIES = 8
"""Mini-batches that are sampled at most, until one has a response with an advantage."""


def sampled(loaded: NextStep, settings: Settings, store: ResultStore, progress: StageProgress) -> Material:
    """A mini-batch of responses to the next prompts of the run, sampled and judged as training does."""
    run = loaded.components.config

    def sample() -> tuple[Any, dict[str, Any]]:
        progress("sampling", 0, 1)
        experience = Experience.of(loaded.components, run.actor.mini_batch_size or run.data.train_batch_size)
        generator = torch.Generator().manual_seed(1_000_003 * settings.seed + 3)
        for _ in range(TRIES):
            batch, _ = experience.collect(generator, Timer())
            batch = completed(loaded.components, loaded.policy, batch, TOKEN_BUDGET)
            if bool(batch.need("advantages").any()):
                break
        return batch, {"temperature": run.rollout.temperature}

    return Material(store.get_batch("rollout", sample), None, {}, "fresh")


# ---------------------------------------------------------------- what is measured


def trial_of(run: Config, loaded: NextStep, material: Material) -> Trial:
    for parameter, state in loaded.optimizer.state.items():
        for key, value in state.items():
            state[key] = in_precision(value, parameter)
    batch, weights = material.batch, material.weights
    if weights is None:
        mask = batch.response_mask
        denominator = Denominator.of(mask, run.rollout.max_new_tokens)
        weights = token_weights(mask, run.algorithm.aggregation, denominator, torch.float64).amax(1)
    return Trial(
        loaded.policy.model,
        loaded.optimizer,
        batch,
        temperature=run.rollout.temperature,
        grad_clip=run.actor.optim.grad_clip,
        loss=loss_of(run.algorithm),
        weights=weights,
    )


def loss_of(algorithm: AlgorithmConfig) -> Callable[[LossInputs], LossOutputs]:
    """The run's policy loss; the plain surrogate where that needs a reference policy, which is not here."""
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    return plain_surrogate if "ref_log_probs" in loss.needs else loss


def own_score(run: Config, trial: Trial, groups: int) -> tuple[str, dict[str, Scoring]]:
    """The question that the run's own settings answer, and the score where it is none of the usual ones."""
    settings = run.trainer.influence_trace
    names = [field.name for field in dataclasses.fields(InfluenceConfig)]
    config = InfluenceConfig(**{name: getattr(settings, name) for name in names} | {"pairwise": False})
    if config.is_parts and asked_of(config) == "token":
        return "token", {}
    return asked_of(config), {OWN: scoring(trial, config, groups)}
