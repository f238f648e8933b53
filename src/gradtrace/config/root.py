"""Settings of a run as a whole: all sections together, and what is wrong only in combination."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.attribution.config import choice, number
from gradtrace.errors import GradtraceError
from gradtrace.instruments.findings import FindingsConfig
from gradtrace.instruments.registry import check_run, section_fields
from gradtrace.policy.settings import ActorConfig, CriticConfig, ModelConfig, ReferenceConfig
from gradtrace.rollout.settings import RolloutConfig
from gradtrace.tasks.settings import DataConfig, RewardConfig, TaskConfig

TRACKERS = {"wandb", "tensorboard", "trackio"}


@dataclass
class CheckpointConfig:
    every: int = number(0, minimum=0)
    """Steps between checkpoints; 0 saves at the end (and on Ctrl-C or an error) only."""
    keep_last: int = number(2, minimum=0)
    """Older checkpoints are deleted; 0 keeps all."""


@dataclass
class ValidationConfig:
    every: int = number(10, minimum=0)
    """Steps between validations; 0 is never."""
    before_training: bool = True
    """Validate the starting policy too, as step 0."""
    prompts: int = number(128, minimum=1)
    """At most this many validation prompts, always the same ones."""
    n: int = number(4, minimum=1)
    """Responses per validation prompt."""
    temperature: float = number(1.0, minimum=0)
    """0 is greedy."""
    top_p: float = number(1.0, minimum=0, maximum=1)
    """Nucleus sampling in validation."""
    pass_k: list[int] = field(default_factory=lambda: [1, 4])
    """pass@k for these k ≤ n: the unbiased estimate that at least one of k responses is right."""
    success_threshold: float = 1.0
    """A response is right, for pass@k, if its reward is at least this."""

    def validate(self, path: str) -> None:
        if too_many := [k for k in self.pass_k if k > self.n or k < 1]:
            raise GradtraceError(
                f"{path}pass_k={self.pass_k}: pass@{too_many[0]} cannot be estimated from {path}n={self.n} responses."
            )


@dataclass
class WandbConfig:
    """Of trainer.logger=[wandb], and of trackio as far as it knows them."""

    project: str = "gradtrace"
    """The project that the run is shown in."""
    name: str = ""
    """The run's name there; empty: the name of its folder."""
    group: str = ""
    """A group of runs that belong together: seeds, the cells of a sweep."""
    id: str = ""
    """The run's id; empty: a new one, kept in the run's folder, so that `resume=` goes on with the same run."""


@dataclass
class TrainerBase:
    """All but the sections of instruments."""

    total_steps: int = number(100, minimum=1)
    """One step: a rollout, its rewards and the updates on it."""
    seed: int = 0
    """Seed of prompts, sampling and mini-batches."""
    runs_dir: str = "runs"
    """Where run folders are made."""
    name: str = ""
    """Name of the run's folder; empty: the recipe's. A number is added if the folder exists."""
    logger: list[str] = field(default_factory=list)
    """Trackers besides metrics.jsonl: wandb, tensorboard, trackio."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trace_dir: str = ""
    """Traces go to TRACE_DIR/NAME instead of the run's folder, which then names that place; empty: not."""
    cpu_threads: int = number(0, minimum=0)
    """Threads of CPU tensor operations; 0 chooses by the size of the model."""
    samples_every: int = number(10, minimum=0)
    """Steps between tables of sample responses in the terminal; 0 is never."""
    skip_optimizer: bool = False
    """Make every step but never move the policy's weights, for debugging a trace."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    traces: bool = False
    """One flag for all three: turns entropy_trace, influence_trace and blame on."""
    findings: FindingsConfig = field(default_factory=FindingsConfig)

    def validate(self, path: str) -> None:
        if unknown := set(self.logger) - TRACKERS:
            raise GradtraceError(
                f"{path}logger: there is no tracker '{min(unknown)}'. Valid: {', '.join(sorted(TRACKERS))}."
            )


if TYPE_CHECKING:

    class TrainerConfig(TrainerBase):
        """With a section for every instrument."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    TrainerConfig = make_dataclass("TrainerConfig", section_fields(), bases=(TrainerBase,))
    TrainerConfig.__module__ = __name__


@dataclass
class ClusterConfig:
    num_workers: int = number(1, minimum=1)
    """Workers (GPUs) per node."""
    nodes: int = number(1, minimum=1)
    """Machines."""
    ray_address: str = ""
    """Of a Ray cluster that is running already (`auto` inside of it); empty: Ray is started on this machine."""
    rollout: str = choice("vllm", "sglang")
    """Which of verl's rollout engines samples on GPUs; without a GPU our own sampler does."""
    tensor_parallel: int = number(1, minimum=1)
    """GPUs that share one copy of the model while sampling."""
    max_failures: int = number(3, minimum=0)
    """Restart from the last complete checkpoint this often when a worker dies."""
    pg_timeout_seconds: float = number(0.0, minimum=0)
    """How long ranks wait for each other before the missing one is named and the run ends; 0: as verl has it."""


@dataclass
class Config:
    recipe: str = "demo"
    """A name in conf/ (demo, grpo_gsm8k, dapo_math, archer_math …) or the path of a YAML file of your own."""
    engine: str = choice("embedded", "verl")
    """embedded: one process, CPU or one GPU. verl: several workers and machines (Ray + FSDP2), see `cluster`."""
    resume: str = ""
    """A run folder to continue from its latest checkpoint; its config.yaml is the recipe."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Of engine=verl."""
    verl: dict[str, Any] = field(default_factory=dict)
    """verl's own options, by their paths there: `verl.actor_rollout_ref.actor.fsdp_config.param_offload=true`."""

    def validate(self, path: str = "") -> None:
        """What is wrong only in combination of several sections."""
        if self.engine != "verl" and (self.verl or self.cluster != ClusterConfig()):
            raise GradtraceError("cluster.… and verl.… are settings of engine=verl; add it, or leave them out.")
        if self.task.name == "dataset" and not self.data.train:
            raise GradtraceError("task.name=dataset needs files with prompts: data.train=[train.jsonl].")
        if self.task.name == "dataset" and not self.model.path:
            raise GradtraceError("task.name=dataset needs a model: model.path=FOLDER or a hub name.")
        if self.rollout.max_turns > 1 and self.task.name != "calculator":
            raise GradtraceError(
                f"rollout.max_turns={self.rollout.max_turns}: task.name={self.task.name} has no tool that could answer "
                "between two turns. Leave it at 1, or use task.name=calculator, TRL's or verl's tools."
            )
        self.algorithm.resolve(self.rollout.n, self.rollout.max_new_tokens)
        check_run(self.trainer, "trainer.", self.rollout.n, self.model.lora.dropout)
        self._validate_update()

    def _validate_update(self) -> None:
        actor = self.actor
        if actor.mini_batch_size > self.data.train_batch_size:
            raise GradtraceError(
                f"actor.mini_batch_size={actor.mini_batch_size} is more than "
                f"data.train_batch_size={self.data.train_batch_size}: a mini-batch is a part of the batch."
            )
        own_packing = actor.packing == "always" and not self.model.attention.startswith("flash")
        if self.model.gradient_checkpointing and (own_packing or actor.share_prompts == "always"):
            raise GradtraceError(
                "model.gradient_checkpointing=true runs the model again inside the backward pass, where our attention "
                "for packed rows is not in force: set actor.packing=never and actor.share_prompts=never, or use flash."
            )
