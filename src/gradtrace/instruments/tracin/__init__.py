"""TracIn selection: which responses help a validation set."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gradtrace.attribution.config import choice, number
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.registry import later, register
from gradtrace.instruments.settings import PROMPT_FILES, TraceConfig
from gradtrace.trace.columns import EVERY_KIND, EXPECTED, RUN_META, Column, InstrumentRecord

TRACIN = "tracin"
POOL_BATCHES = 32
"""Validation batches without a repetition, where the task has that many prompts."""


class TracinReason(enum.IntEnum):
    """Why TracIn selection kept or dropped a response."""

    KEPT_POSITIVE = 0
    KEPT_TOP_FRACTION = 1
    KEPT_FALLBACK = 2
    """Too few scores were positive, so the best half was kept."""
    KEPT_NOT_LOWEST = 3
    DROPPED_NEGATIVE = 4
    DROPPED_BELOW_FRACTION = 5
    DROPPED_LOWEST = 6
    DROPPED_NON_FINITE = 7
    KEPT_SCORE_ONLY = 8
    """`selection: none`: scored, and nothing was dropped."""
    VALIDATION = 9
    """No candidate: a response of the validation set, stored so that it can be looked at. Its score is NaN,
    its `kept` False, and its group holds validation responses only."""
    KEPT_NO_SIGNAL = 10
    """The validation gradient says nothing in this step (it is zero), so that everything was kept."""
    KEPT_ZERO = 11
    """Its own gradient is zero, or orthogonal: neither helpful nor harmful, and the rule drops harmful ones only."""
    DROPPED_ZERO = 12
    """Its own gradient is zero, or orthogonal, and the rule keeps helpful ones only."""
    KEPT_WEIGHTED = 13
    """The rule gives every response a weight instead of dropping some."""


@dataclass
class TracinConfig(TraceConfig):
    enable: bool = False
    """Score every response against a validation set, and train on those that help it."""
    method: str = choice("auto", "ghost", "tangent")
    """A backward pass with hooks, or one forward-mode pass; the same scores. `auto` takes the cheaper."""
    parameters: str = choice("linear", "all")
    """Scores over linear layers (biases and tied embeddings included), or over every trainable parameter."""
    preconditioner: str = choice("adam", "none")
    """`adam`: weigh the validation gradient by Adam's second moments, as the real update is."""
    selection: str = choice("drop_lowest", "positive", "top_fraction", "soft", "none")
    """What the update uses. `positive`: scores above 0. `top_fraction`: the best. `drop_lowest`: all but the most
    negative. `soft`: all, weighted. `none`: score only."""
    min_positive_ratio: float = number(0.1, minimum=0, maximum=1)
    """`positive`: if fewer of the batch's responses have a positive score (tracin/positive_ratio), the best
    `fallback_fraction` are kept instead."""
    fallback_fraction: float = number(0.5, minimum=0, maximum=1)
    """The share of the best that this fallback keeps."""
    top_fraction: float = number(0.5, minimum=0, maximum=1)
    """`top_fraction`: the share that is kept."""
    drop_share: float = number(0.5, minimum=0, maximum=1)
    """`drop_lowest`: the share of the negative scores that is dropped, the most negative ones."""
    soft_temperature: float = number(1.0, minimum=0)
    """`soft`: an advantage is multiplied with σ(score / (this · spread of the scores)), mean 1. Towards 0 it becomes
    `positive`."""
    val_batch_size: int = number(64, minimum=1)
    """Validation prompts."""
    val_n: int = number(0, minimum=0)
    """Responses per validation prompt; 0 means rollout.n."""
    val_strategy: str = choice("random", "lowest_reward", "highest_reward", "balanced")
    """Which prompts make the validation set: as they come, or by mean reward among val_candidates as many. `balanced`:
    where right and wrong responses are equally many."""
    val_level: str = choice("prompt", "response")
    """`response`: val_strategy chooses single responses by their own reward, `balanced` as many of the highest as of
    the lowest; their advantage is against all that were sampled. For rewards like toxicity, where extremes count."""
    val_candidates: int = number(2, minimum=1)
    """Prompts sampled for each one chosen, where val_strategy chooses."""
    val_refresh_every: int = number(1, minimum=1)
    """Steps between fresh validation rollouts. Old ones cost nothing, and fit the policy less and less."""
    val_files: list[str] = field(default_factory=list, metadata={PROMPT_FILES: True})
    """Validation prompts of your own (.jsonl, .json, .parquet); empty: the task's validation prompts, without those
    that trainer.validation reports on."""
    train_on_validation: bool | None = None
    """Train on the validation rollouts too, in the step that samples them; they are never scored or left out. In the
    embedded loop alone, where unset is true (except with selection=none or val_level=response, where it is false)."""
    diagnose_every: int = number(10, minimum=0)
    """Steps between diagnoses, which score against parts of the validation set (a few passes more); 0 is never."""

    def validate(self, path: str) -> None:
        if self.enable and self.method == "ghost" and self.parameters == "all":
            raise GradtraceError(
                f"{path}method=ghost sees linear layers only: set {path}parameters=linear or {path}method=tangent."
            )
        if self.enable and self.val_level == "response":
            if self.val_strategy == "random":
                raise GradtraceError(
                    f"{path}val_level=response chooses responses by their rewards: set {path}val_strategy to "
                    "lowest_reward, highest_reward or balanced."
                )
            if self.train_on_validation:
                raise GradtraceError(
                    f"{path}val_level=response leaves groups whose responses were chosen by reward, and training on "
                    f"these would be biased: set {path}train_on_validation=false, or {path}val_level=prompt."
                )

    @property
    def trains_on_validation(self) -> bool:
        """What `train_on_validation` means in a host that can: scoring alone changes nothing, and responses that were
        chosen by their reward are no fair sample."""
        if self.train_on_validation is None:
            return self.selection != "none" and self.val_level == "prompt"
        return self.train_on_validation

    def check_run(self, path: str, responses: int, dropout: float) -> None:
        if (self.val_n or responses) < 2:
            raise GradtraceError(
                f"{path} needs at least 2 responses per validation prompt, whose rewards it compares: set "
                f"{path}.val_n=8."
            )


def _needs(settings: TracinConfig) -> dict[str, str]:
    found = {"hooks": "", "output_layer": "", "samples": ""}
    if settings.method == "tangent":
        found["forward_mode"] = "method=tangent"
    if settings.parameters != "linear":
        found["every_parameter"] = f"parameters={settings.parameters}"
    if settings.train_on_validation:
        found["more_rollouts"] = "train_on_validation=true"
    if settings.val_files:
        found["files"] = "val_files"
    return found


_INNER = "inner product"
# fmt: off
_COLUMNS = (
    Column("score", "float32", "response", "TracIn score against the validation objective",
           unit=_INNER, is_signed=True),
    Column("kept", "bool", "response", "used by the update"),
    Column("reason", "uint8", "response", "why it was kept or dropped", values=TracinReason),
    Column("score_low", "float32", "response",
           "lower end of the score's 90 % interval over validation prompts; NaN = not measured", unit=_INNER),
    Column("score_high", "float32", "response", "upper end of that interval; NaN = not measured", unit=_INNER),
    Column("weight", "float32", "response", "what the update multiplies its advantage with; 0 = dropped"),
    Column("flipped", "bool", "response", "its reward was flipped on purpose (reward.flip_probability)"),
)
# fmt: on

RECORD = InstrumentRecord(
    name=TRACIN,
    label="TracIn",
    meaning="score of every response against a validation objective, and what selection made of it",
    switch="trainer.tracin.enable=true",
    required=(*EVERY_KIND, "score", "kept", "reason"),
    optional=(
        *EXPECTED,
        *("accepted", "advantage", "entropy", "log_prob", "first_wrong"),
        *("score_low", "score_high", "weight", "flipped"),
    ),
    brings=_COLUMNS,
    meta={
        **RUN_META,
        "diagnosis": "list of sentences: what is notable about this step's scores",
        "selection": "the rule that kept and dropped",
        "val_strategy": "how the validation responses were chosen",
        "method": "how the scores were computed: ghost or tangent",
        "val_loss": "validation loss −mean_r(A_r Σ_t log-prob)",
        "val_loss_min": "the smallest part of one response in it",
        "val_loss_max": "the largest",
        "weighed": "Adam's moments weighed the scores; false before its first step, where they have another unit",
        "val_norm": "norm of the validation gradient",
        "train_norm": "norm of the gradient of the whole training batch; absent where it was not measured",
        "direction_norm": "norm of the preconditioned validation gradient, which scores are products with",
        "cosine": "cosine of the whole batch's gradient and the validation gradient",
        "val_norms": "norm of the validation gradient by layer group",
    },
)

INSTRUMENT = register(
    Instrument(
        TracinConfig,
        later("gradtrace.instruments.tracin.reporter:TracinReporter"),
        later("gradtrace.instruments.tracin.observer:TracinObserver"),
        RECORD,
        needs=_needs,
        held_out=lambda settings: POOL_BATCHES * settings.val_batch_size,
        unreported=True,
        selects=True,
    )
)
