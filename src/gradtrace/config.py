"""Every setting of a run, typed, with its meaning under it.

`gradtrace train KEY=VALUE …` overrides any of them by its path (`actor.optim.lr=1e-6`); a recipe
(`conf/NAME.yaml`, chosen with `recipe=NAME`) is a set of such values. `config_loader` composes and
checks them. The classes hold no logic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradtrace.attribution.config import InfluenceConfig, choice, number


@dataclass
class LoraConfig:
    rank: int = number(0, minimum=0)
    """Rank of the LoRA adapters; 0 trains all weights."""
    alpha: float = number(16.0, minimum=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = number(0.0, minimum=0, maximum=1)
    """Dropout on the adapters' input."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the layers that get an adapter; `all-linear` for every linear layer but the head."""


@dataclass
class ModelConfig:
    path: str = ""
    """A transformers folder or hub name. Empty: the task brings its own model (the demo does)."""
    device: str = choice("auto", "cpu", "cuda")
    """Where to train; `auto` takes the GPU when there is one."""
    attention: str = choice("auto", "sdpa", "eager", "flash_attention_2", "flex_attention")
    """Attention implementation of transformers; `auto` is sdpa."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class WarmStartConfig:
    target_accuracy: float = number(0.85, minimum=0, maximum=1)
    """Stage 1 (clean chains) ends when sampled accuracy reaches this."""
    max_steps: int = number(600, minimum=1)
    """Stage 1 ends after this many steps in any case."""
    corrupted_steps: int = number(40, minimum=0)
    """Stage 2: steps on chains with wrong habits, which RL then has to unlearn."""
    corruption: float = number(0.4, minimum=0, maximum=1)
    """Stage 2: probability that a step of a chain is done wrong, where it can be."""
    batch_size: int = number(64, minimum=1)
    """Chains per warm-start step."""
    lr: float = number(2e-3, minimum=0)
    """Learning rate of both stages."""
    seed: int = 0
    """Seed of the warm start. It is not `trainer.seed`, so that several seeds share one warm start."""


@dataclass
class ArithmeticConfig:
    operations: int = number(4, minimum=1, maximum=16)
    """Operations in a chain; `3+7*4-2+9=` has 4."""
    hidden_size: int = number(128, minimum=8)
    """Width of the tiny transformer."""
    layers: int = number(2, minimum=1)
    """Its depth."""
    heads: int = number(4, minimum=1)
    """Its attention heads; must divide hidden_size."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass
class TaskConfig:
    name: str = choice("arithmetic", "dataset")
    """`arithmetic`: chains of single-digit operations, generated. `dataset`: prompts from files, see `data`."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    """Settings of the arithmetic task."""


@dataclass
class DataConfig:
    train: list[str] = field(default_factory=list)
    """Training prompts: .jsonl, .json or .parquet files, folders, or hf:OWNER/NAME[:CONFIG][:SPLIT]."""
    validation: list[str] = field(default_factory=list)
    """Validation prompts, likewise. Empty: `validation_fraction` of the training rows is held out."""
    validation_fraction: float = number(0.02, minimum=0, maximum=0.5)
    """Share of the training rows held out (never trained on) when `validation` is empty."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "answer"
    """Column with the answer; dots reach inside. Rows without `answer` may have verl's `reward_model.ground_truth`."""
    system_prompt: str = ""
    """System message of every prompt, instead of the row's own."""
    instruction: str = ""
    """Appended to every user prompt, e.g. how to mark the final answer."""
    chat_template: bool = True
    """Format prompts with the tokenizer's chat template, if it has one."""
    max_prompt_length: int = number(1024, minimum=1)
    """In tokens."""
    filter_overlong_prompts: bool = True
    """Drop prompts longer than max_prompt_length (counted in the log). False: they are an error."""
    shuffle: bool = True
    """A new order in every epoch, from `trainer.seed`."""
    train_batch_size: int = number(32, minimum=1)
    """Prompts per training step; `rollout.n` responses each."""


@dataclass
class RewardConfig:
    name: str = "task"
    """`task`: as the task judges (arithmetic: 1 if the whole chain is right). `gsm8k`: the number after ####.
    `last_number`: the number in the last \\boxed{} or after the last `Answer:`. `math`: any mathematical answer, by
    math-verify. More, and how to add one: docs/rewards.md."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that reward, e.g. {timeout: 10}."""
    path: str = ""
    """Your own: `my_rewards.py:my_reward`, a function (response: str, item: dict) -> float; or the file alone, and
    `name` is a reward that it registers."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further rewards by name, added with these weights: {think_format: 0.1}."""
    flip_probability: float = number(0.0, minimum=0, maximum=1)
    """For studies of robustness: a training reward r becomes 1 − r with this probability. Validation rewards never."""


@dataclass
class RolloutConfig:
    n: int = number(8, minimum=1)
    """Responses per prompt: the size of a group."""
    max_new_tokens: int = number(32, minimum=1)
    """Longest response, stop token included."""
    temperature: float = number(1.0, minimum=0)
    """Log-probs and entropies of training are taken at this temperature too."""
    top_p: float = number(1.0, minimum=0, maximum=1)
    """Nucleus sampling; 1 is off. Below 1 the policy that is trained is not the one that sampled."""
    top_k: int = number(0, minimum=0)
    """Sample among the k likeliest tokens; 0 is off."""
    max_batch_tokens: int = number(32768, minimum=1)
    """Responses × (prompt + response) tokens in the key-value cache at once; the rest waits its turn."""


@dataclass
class DynamicSamplingConfig:
    enable: bool = False
    """DAPO: drop groups whose rewards are all equal and sample new prompts until the batch is full."""
    max_batches: int = number(10, minimum=1)
    """Give up after this many rollouts in one step, and train on what there is (an error if that is nothing)."""


@dataclass
class OverlongConfig:
    enable: bool = False
    """DAPO: a soft penalty for responses that come close to `rollout.max_new_tokens`."""
    buffer: int = number(256, minimum=1)
    """The penalty grows linearly over the last `buffer` tokens before the limit."""
    penalty: float = number(1.0, minimum=0)
    """Subtracted from the reward at the limit."""


@dataclass
class LengthShapingConfig:
    shape: str = choice("none", "cosine", "shortest")
    """`cosine`: right responses lose by length, wrong ones by shortness. `shortest`: by length within the group."""
    strength: float = number(0.5, minimum=0)
    """The most that a reward changes; below 1 a right response stays above a wrong one."""
    threshold: float = 1.0
    """A response is right if its reward is at least this."""


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"
    """How rewards become advantages: a name registered in gradtrace.algorithms (grpo, dr_grpo, rloo, gae …)."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Options of that estimator, e.g. `algorithm.advantage_options.normalize_std=false`; checked by name."""
    policy_loss: str = "ppo"
    """A name registered in gradtrace.algorithms (ppo, gspo, cispo, archer …)."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of that loss, e.g. `algorithm.policy_loss_options.clip_high=0.28`; checked by name. A recipe's
    options belong to the recipe's loss: they are dropped when you choose another loss."""
    aggregation: str = choice("token_mean", "sequence_mean", "fixed_length")
    """How token losses become one number. fixed_length divides by rollout.max_new_tokens (Dr. GRPO)."""
    kl_coef: float = number(0.0, minimum=0)
    """Weight of the KL penalty against the reference policy in the loss; above 0 loads the reference."""
    kl_estimator: str = choice("k3", "k1", "k2", "k1+", "k3+")
    """k3: low variance, never negative. k2 and the + forms: the right gradient. See gradtrace.algorithms.kl."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    length_shaping: LengthShapingConfig = field(default_factory=LengthShapingConfig)


@dataclass
class OptimConfig:
    lr: float = number(1e-6, minimum=0)
    """Learning rate after the warm-up."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of AdamW's two moments."""
    eps: float = number(1e-8, minimum=0)
    """Added to the denominator of AdamW."""
    weight_decay: float = number(0.0, minimum=0)
    """Decoupled weight decay; biases, norms and embeddings have none."""
    warmup_steps: int = number(0, minimum=0)
    """Training steps over which the learning rate rises from 0."""
    schedule: str = choice("constant", "linear", "cosine")
    """What the learning rate does after the warm-up."""
    schedule_steps: int = number(0, minimum=0)
    """Training steps until linear and cosine end; 0 means trainer.total_steps."""
    min_lr_ratio: float = number(0.0, minimum=0, maximum=1)
    """linear and cosine end at this share of lr."""
    grad_clip: float = number(1.0, minimum=0)
    """Largest gradient norm; 0 is off."""


@dataclass
class ActorConfig:
    mini_batch_size: int = number(0, minimum=0)
    """Prompts per optimizer step; 0 takes the whole batch in one."""
    epochs: int = number(1, minimum=1)
    """Passes over each rollout."""
    shuffle: bool = True
    """Deal prompts to mini-batches at random; groups stay whole."""
    token_budget: int = number(16384, minimum=1)
    """Tokens (padding counted) per forward/backward pass. Gradients do not depend on it; memory does."""
    old_log_probs: str = choice("auto", "recompute", "sampler")
    """Where log-probs of the sampling policy come from. The first optimizer step of a rollout has them from its own
    forward pass, exactly. For the others: `sampler` takes what the sampler recorded, `recompute` runs one more
    forward pass, `auto` takes the sampler's when it drew from the full float32 distribution."""
    packing: str = choice("auto", "never", "always")
    """Responses behind one another without padding. `auto`: where the attention implementation allows it and more
    than a tenth of a padded batch would be padding. Gradients are the same."""
    share_prompts: bool = False
    """Compute each prompt once for all its responses in the update: less work, the same gradients. Not together
    with instruments that need every response's own gradient (influence_trace); so it is off unless asked for:
    turning a trace on must not change what is trained, not even in the last bit."""
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class CriticConfig:
    path: str = ""
    """Weights the critic starts from; empty: those of the policy. Used by advantage=gae only."""
    epochs: int = number(1, minimum=1)
    """Passes over each rollout."""
    value_clip: float = number(0.2, minimum=0)
    """New values may move this far from the old ones before their loss is clipped; 0 is off."""
    warmup_steps: int = number(0, minimum=0)
    """Training steps in which only the critic learns."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))


@dataclass
class ReferenceConfig:
    path: str = ""
    """Weights of the KL reference; empty: those the policy starts from. Loaded when a KL term asks for it."""


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


@dataclass
class EntropyTraceConfig:
    enable: bool = False
    """Store entropy and log-prob of every response token."""
    write_every: int = number(1, minimum=1)
    """Steps between traces."""
    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    on_error: str = choice("warn", "raise")
    """What a failed write does to the run."""


@dataclass
class InfluenceTraceConfig(InfluenceConfig):
    """The tracer's knobs, and what a run adds to them."""

    enable: bool = False
    """Score every response token: did its gradient help the accepted responses against the rejected ones?"""
    max_prompts_per_step: int = number(0, minimum=0)
    """Trace at most this many prompts with mixed rewards; 0 is no cap."""
    write_every: int = number(1, minimum=1)
    """Steps between traces."""
    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    on_error: str = choice("warn", "raise")
    """What a failed trace does to the run."""
    pairwise_max_mb: float = number(64.0, minimum=0)
    """Store the effect of each token on each sibling response while a step's file stays below this; 0 is never."""

    def __post_init__(self) -> None:
        """Values are checked by `config_loader`, which names a key by its whole path."""
        self.pairwise = self.pairwise and self.pairwise_max_mb > 0


@dataclass
class TracinConfig:
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
    """`positive`: with a smaller share of positive scores the best `fallback_fraction` are kept instead."""
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
    val_candidates: int = number(2, minimum=1)
    """Prompts sampled for each one chosen, where val_strategy chooses."""
    val_refresh_every: int = number(1, minimum=1)
    """Steps between fresh validation rollouts. Old ones cost nothing, and fit the policy less and less."""
    val_files: list[str] = field(default_factory=list)
    """Validation prompts of your own (.jsonl, .json, .parquet); empty: the task's validation prompts, without those
    that trainer.validation reports on."""
    diagnose_every: int = number(10, minimum=0)
    """Steps between diagnoses, which score against parts of the validation set (a few passes more); 0 is never."""
    write_every: int = number(1, minimum=1)
    """Steps between traces."""
    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    on_error: str = choice("warn", "raise")
    """What a failed write does to the run."""


@dataclass
class EntropyProbeConfig:
    every: int = number(0, minimum=0)
    """Steps between probes: the entropy change of the step's first optimizer step, predicted before it and measured
    after it; 0 is never."""
    prompts: int = number(128, minimum=2)
    """Held-out prompts that entropy is measured on, at most; a new response to each in every probe."""
    n: int = number(1, minimum=1)
    """Responses per prompt."""
    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    on_error: str = choice("warn", "raise")
    """What a failed probe does to the run."""


@dataclass
class TrainerConfig:
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
    cpu_threads: int = number(0, minimum=0)
    """Threads of CPU tensor operations; 0 chooses by the size of the model."""
    samples_every: int = number(10, minimum=0)
    """Steps between tables of sample responses in the terminal; 0 is never."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    traces: bool = False
    """One flag for both: turns entropy_trace and influence_trace on."""
    entropy_trace: EntropyTraceConfig = field(default_factory=EntropyTraceConfig)
    influence_trace: InfluenceTraceConfig = field(default_factory=InfluenceTraceConfig)
    tracin: TracinConfig = field(default_factory=TracinConfig)
    entropy_probe: EntropyProbeConfig = field(default_factory=EntropyProbeConfig)


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
