"""Settings of the instruments, the same in every host."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradtrace.attribution.config import InfluenceConfig, choice, number
from gradtrace.attribution.errors import AttributionError
from gradtrace.errors import GradtraceError


@dataclass
class FilesConfig:
    """How an instrument writes its files."""

    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    on_error: str = choice("warn", "raise")
    """What a failed write, or a step that could not be traced, does to the run."""


@dataclass
class TraceConfig(FilesConfig):
    write_every: int = number(1, minimum=1)
    """Steps between traces."""


@dataclass
class EntropyTraceConfig(TraceConfig):
    enable: bool = False
    """Store entropy and log-prob of every response token."""


@dataclass
class InfluenceTraceConfig(InfluenceConfig, TraceConfig):
    """The tracer's knobs, and what a run adds to them."""

    enable: bool = False
    """Score every response token: did its gradient help the accepted responses against the rejected ones?"""
    accepted_threshold: float | None = None
    """A response is accepted if its reward is at least this; unset: if it is the best of a group with mixed rewards."""
    scope_pass: bool = False
    """Score the whole batch of a step at its first weights, in passes of the trace's own: then `all_selected` means all
    mini-batches. Otherwise every mini-batch is scored by itself, on its training pass, at the weights it meets."""
    verify_every: int = number(0, minimum=0)
    """Steps between checks of the scores, which take real optimizer steps on a few random halves of one group and put
    everything back: influence_trace/validity, and validity_baseline of |A|(1−p) beside it; 0 is never."""
    max_prompts_per_step: int = number(0, minimum=0)
    """Trace at most this many prompts with mixed rewards; 0 is no cap."""
    pairwise_max_mb: float = number(64.0, minimum=0)
    """Store the effect of each token on each sibling response while a step's file stays below this; 0 is never."""

    def __post_init__(self) -> None:
        """Values are checked by `validate`, which names a key by its whole path."""
        self.pairwise = self.pairwise and self.pairwise_max_mb > 0

    def validate(self, path: str) -> None:
        try:
            self.check()
        except AttributionError as error:
            raise GradtraceError(f"{path.rstrip('.')}: {error}.") from None
        if self.verify_every % self.write_every:
            raise GradtraceError(
                f"{path}verify_every={self.verify_every}: scores are made every {self.write_every} steps "
                "(write_every), so it must be a multiple of that."
            )


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
    val_files: list[str] = field(default_factory=list)
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

    def validate_with(self, responses: int, path: str) -> None:
        """`responses`: to each training prompt."""
        if self.enable and (self.val_n or responses) < 2:
            raise GradtraceError(
                f"{path.rstrip('.')} needs at least 2 responses per validation prompt, whose rewards it compares: set "
                f"{path}val_n=8."
            )


@dataclass
class EntropyProbeConfig(FilesConfig):
    every: int = number(0, minimum=0)
    """Steps between probes: the entropy change of the step's first optimizer step, predicted before it and measured
    after it; 0 is never."""
    prompts: int = number(128, minimum=2)
    """Held-out prompts that entropy is measured on, at most; a new response to each in every probe."""
    n: int = number(1, minimum=1)
    """Responses per prompt."""


@dataclass
class BlameConfig(TraceConfig):
    enable: bool = False
    """Share the squared norm of a step's gradient out to responses and tokens; `trainer.traces` turns it on."""
    write_every: int = number(5, minimum=1)
    """Steps between those that are shared out, which takes about as long as the update itself."""
    unusual_ratio: float = 3.0
    """And in whatever step the gradient's norm is so many times its median of late (0 = not)."""
    sketch_dim: int = number(16, minimum=1)
    """Either side of the sketch that is kept of a layer's gradient for each response, to tell who opposes whom."""
