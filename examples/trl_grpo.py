"""The traces inside TRL's GRPOTrainer: python examples/trl_grpo.py [RUN_FOLDER]

A random tiny model learns to write even digits: no GPU, no download, half a minute. ◆ marks what is gradtrace's.
Then: gradtrace view runs/trl_grpo
"""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from gradtrace.integrations.trl import attach  # ◆
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.settings import ArithmeticConfig


def even_digits(completions: list[str], **columns: Any) -> list[float]:
    """TRL's form of a reward function: texts in, numbers out."""
    return [sum(text.count(digit) for digit in "02468") / 8 for text in completions]


def main() -> None:
    run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/trl_grpo"
    set_seed(0)
    tokenizer = ArithmeticTask(ArithmeticConfig(), seed=0).tokenizer  # 18 characters; yours comes with your model
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **ends))
    arguments = GRPOConfig(
        output_dir=f"{run_dir}/trl",
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        max_steps=20,
        learning_rate=3e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]})
    trainer = GRPOTrainer(model, even_digits, arguments, prompts, processing_class=tokenizer)
    attach(trainer, run_dir=run_dir)  # ◆ that is all
    trainer.train()
    print(f"look at it with: gradtrace view {run_dir}")


if __name__ == "__main__":
    main()
