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

from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig
from gradtrace.commands.pages import write_report
from gradtrace.commands.rollouts.attribution import scoring_run
from gradtrace.commands.verify.page import page, rank_picture
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import response_advantages
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.verify.measure import Scores, Size
from gradtrace.instruments.verify.trial import Trial, in_precision
from gradtrace.instruments.verify.verification import OWN, Verification, Verifier, usual_scores
from gradtrace.metrics import Timer
from gradtrace.rollout.sampler import evaluation_mode
from gradtrace.runs import NotStoredError, Run, open_run
from gradtrace.terminal import StageProgress
from gradtrace.trace.columns import Credit
from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.results import ResultStore
from gradtrace.trace.step import Step
from gradtrace.training.checkpoint import OPTIMIZER
from gradtrace.training.experience import Experience
from gradtrace.training.state import NextStep, completed

STORED = "stored scores"
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
    """Groups to take steps on, and what is known of them."""

    sequences: list[Tensor]
    prompt_lengths: list[int]
    group: Tensor
    accepted: Tensor
    advantages: Tensor
    given: dict[str, Scores]
    """Stored scores; empty where there are none."""
    origin: str
    """Where the scores that are judged come from."""
    written: list[Tensor]
    """Of each response which tokens the policy wrote."""


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
    material = (
        of_trace(stored, settings.size.groups) if stored is not None else sampled(loaded, settings, store, progress)
    )
    trial = trial_of(run.settings, loaded, material)
    scores = {OWN: own} if (own := own_score(run.settings, message)) is not None else {}
    with evaluation_mode(trial.model):
        verifier = Verifier(trial, scores | usual_scores(), material.given, settings.size, settings.seed, store)
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


def of_trace(step: Step, groups: int) -> Material:
    """The first so many groups of a stored step, which the checkpoint's weights sampled. Those that were scored
    at these weights come first, then those of later mini-batches; of both, groups with loss-term scores."""
    credit = step["credit"] if "credit" in step else np.zeros(step.n_responses, dtype=np.uint8)
    number, late = step["group"], step["optimizer_step"]
    order = sorted(set(number.tolist()), key=lambda g: (late[number == g].max(), credit[number == g].max(), g))
    rows = [r for g in order[:groups] for r in np.flatnonzero(number == g).tolist()]
    prompts = [torch.from_numpy(step.group(int(number[r])).prompt_ids.astype(np.int64)) for r in rows]
    tokens = [torch.from_numpy(step.tokens(r)["token_id"].astype(np.int64)) for r in rows]
    written = [torch.from_numpy(step.written(r)) for r in rows]
    scores = {
        place: torch.from_numpy(np.array(step.influence(r))).double()[written[place]] for place, r in enumerate(rows)
    }
    given: dict[str, Scores] = {STORED: scores}
    kinds = sorted({int(credit[r]) for r in rows})
    for kind in kinds if len(kinds) > 1 else ():
        own = {place: scores[place] for place, r in enumerate(rows) if credit[r] == kind}
        given[f"{STORED}, {Credit(kind).name.lower().replace('_', ' ')}"] = own
    later = {int(number[r]) for r in rows if late[r]}
    origin = f"stored by training step {step.step}"
    if "attributed" in step.meta:
        origin = f"of {step.meta['model']} on the rollouts of step {step.step}"
    if later:
        most = int(late[rows].max())
        origin += f", {len(later)} of {len(order[:groups])} groups up to {most} optimizer step{'s' * (most > 1)} later"
    return Material(
        [torch.cat(pair) for pair in zip(prompts, tokens, strict=True)],
        [len(prompt) for prompt in prompts],
        torch.tensor([order.index(int(number[r])) for r in rows]),
        torch.from_numpy(step["accepted"][rows]),
        torch.from_numpy(step["advantage"][rows].astype(np.float64)),
        given,
        origin,
        written,
    )


def sampled(loaded: NextStep, settings: Settings, store: ResultStore, progress: StageProgress) -> Material:
    """Responses to the next prompts of the run, sampled and judged as training does."""
    run = loaded.components.config

    def sample() -> tuple[Any, dict[str, Any]]:
        progress("sampling", 0, 1)
        experience = Experience.of(loaded.components, max(2 * settings.size.groups, run.actor.mini_batch_size))
        generator = torch.Generator().manual_seed(1_000_003 * settings.seed + 3)
        batch, _ = experience.collect(generator, Timer())
        batch = completed(loaded.components, loaded.policy, batch, TOKEN_BUDGET)
        return batch, {"temperature": run.rollout.temperature}

    batch = store.get_batch("rollout", sample)
    rewards = batch.need("rewards")
    return Material(
        [torch.tensor(batch.prompts[g] + ids) for g, ids in zip(batch.group.tolist(), batch.response_ids, strict=True)],
        batch.prompt_lengths.tolist(),
        batch.group,
        accepted(rewards, batch.group, run.trainer.influence_trace.accepted_threshold),
        response_advantages(batch).double(),
        {},
        "fresh",
        [mask[:n] for mask, n in zip(batch.response_mask, batch.response_lengths.tolist(), strict=True)],
    )


# ---------------------------------------------------------------- what is measured


def trial_of(run: Config, loaded: NextStep, material: Material) -> Trial:
    for parameter, state in loaded.optimizer.state.items():
        for key, value in state.items():
            state[key] = in_precision(value, parameter)
    lengths = [int(mask.sum()) for mask in material.written]
    per_step = (run.actor.mini_batch_size or run.data.train_batch_size) * run.rollout.n
    return Trial(
        loaded.policy.model,
        loaded.optimizer,
        material.sequences,
        material.prompt_lengths,
        material.group,
        material.accepted,
        material.advantages,
        temperature=run.rollout.temperature,
        grad_clip=run.actor.optim.grad_clip,
        tokens=round(per_step * sum(lengths) / len(lengths)),
        written=material.written,
    )


def own_score(run: Config, message: Callable[[str], None]) -> InfluenceConfig | None:
    """The run's own settings, for every group; None where they are not about the step that training takes."""
    settings = run.trainer.influence_trace
    if settings.output_function not in ("training_loss", "log_prob_advantage"):
        message(
            f"trainer.influence_trace.output_function={settings.output_function} scores another step than the one that "
            "training takes: the run's own settings are left out."
        )
        return None
    names = [field.name for field in dataclasses.fields(InfluenceConfig)]
    knobs = {name: getattr(settings, name) for name in names}
    return InfluenceConfig(**{**knobs, "pairwise": False, "loss_term_prompts": 0})
