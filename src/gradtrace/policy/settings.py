"""Settings of the policy: which model, how it samples, and how it is updated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gradtrace.attribution.config import choice, number
from gradtrace.errors import GradtraceError


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

    def validate(self, path: str) -> None:
        check_model_folder(self.path, f"{path}path")


@dataclass
class ReferenceConfig:
    path: str = ""
    """Weights of the KL reference; empty: those the policy starts from. Loaded when a KL term asks for it."""

    def validate(self, path: str) -> None:
        check_model_folder(self.path, f"{path}path")


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

    def validate(self, path: str) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise GradtraceError(f"{path}betas={self.betas}: two numbers in [0, 1) are needed.")


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
    share_prompts: str = choice("auto", "always", "never")
    """Compute each prompt once for all its responses in the update: less work, the same gradients. `auto`: on a CPU,
    where the model's attention allows it and a fifth of all tokens is saved. Traces do not change it: what they need
    of each response's own prompt (directions of loss terms, norms of blame) takes passes of its own; with `never` that
    rides on the passes of training, which is cheaper for credit=position or both."""
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

    def validate(self, path: str) -> None:
        check_model_folder(self.path, f"{path}path")


def check_model_folder(path: str, key: str) -> None:
    """A path that cannot be a hub's name is an error if there is no such folder."""
    if path and looks_local(path) and not Path(path).is_dir():
        raise GradtraceError(
            f"{key}={path}: there is no such folder ({Path(path).absolute()}). Give a model's folder, or a hub "
            "name like Qwen/Qwen2.5-0.5B-Instruct; scripts/get_smollm2 makes models/SmolLM2-135M-Instruct."
        )


def looks_local(path: str) -> bool:
    """Not of the form `name` or `owner/name`, which may be on the hub."""
    return path.startswith((".", "/", "~", "models/", "runs/")) or path.count("/") > 1
