"""GRPOTrainer runs of a second: a random transformer on the demo's vocabulary, with a reward that mixes groups."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.settings import ArithmeticConfig
from tests.training.small import model as small_model

transformers_logging.set_verbosity_error()
PROMPTS = ["1+2=", "3*4+5=", "7=", "8-2*2=", "6+6=", "9-1="]


def reward(completions: list[str], **others: Any) -> list[float]:
    """Arbitrary, but the same for the same text; four values, so that most groups are mixed."""
    return [float(zlib.crc32(text.encode()) % 4) for text in completions]


def grpo_config(folder: Path, **options: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    return GRPOConfig(**{**settings, **options})


def grpo_trainer(
    folder: Path,
    cls: type[GRPOTrainer] = GRPOTrainer,
    dtype: torch.dtype = torch.float32,
    model: Any = None,
    reward_funcs: Any = reward,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`options` go to GRPOConfig, `more` to the trainer."""
    tokenizer = ArithmeticTask(ArithmeticConfig(operations=2), 0).tokenizer
    if model is None:
        model = small_model(dtype, tie_word_embeddings=False)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        if options.get("beta"):  # TRL loads the reference from where the model came from
            model.save_pretrained(folder / "model")
            model.config.architectures = ["Qwen2ForCausalLM"]
            model.config._name_or_path = str(folder / "model")
    return cls(
        model=model,
        reward_funcs=reward_funcs,
        args=grpo_config(folder, **options),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        **(more or {}),
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}
