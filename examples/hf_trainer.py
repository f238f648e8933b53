"""The influence trace in a Hugging Face `Trainer`: python examples/hf_trainer.py [RUN_FOLDER]

Offline policy gradient on stored responses: a batch holds whole groups (one prompt, several responses with rewards),
the loss is −advantage · log-prob. The callback marked ◆ traces it; the data is made up.
Then: gradtrace view runs/hf_trainer
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

import gradtrace
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.settings import ArithmeticConfig

GROUP, PROMPT, LENGTH = 4, 4, 6


class StoredResponses(Dataset[dict[str, Any]]):
    """Groups of `GROUP` responses to one prompt; the reward counts a letter, so that there is something to find."""

    def __init__(self, groups: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, vocabulary, (groups, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
        responses = torch.randint(3, vocabulary, (groups * GROUP, LENGTH), generator=generator)
        self.ids = torch.cat([prompts, responses], 1)
        self.rewards = (responses == 5).float().sum(1) + (responses == 7).float().sum(1)

    def __len__(self) -> int:
        return len(self.ids) // GROUP

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = slice(index * GROUP, (index + 1) * GROUP)
        return {"input_ids": self.ids[rows], "rewards": self.rewards[rows]}


def join(groups: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {name: torch.cat([group[name] for group in groups]) for name in groups[0]}
    return batch | {"group": torch.arange(len(groups)).repeat_interleave(GROUP)}


class PolicyGradient(Trainer):
    def terms(self) -> Tensor:
        """[B, LENGTH]: every response token's own term of the loss, which is their sum."""
        ids, rewards = self.batch["input_ids"], self.batch["rewards"].view(-1, GROUP)
        self.advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        log_probs = torch.log_softmax(self.model(input_ids=ids).logits[:, PROMPT - 1 : -1], -1)
        return -self.advantages[:, None] * log_probs.gather(2, ids[:, PROMPT:, None]).squeeze(2) / len(ids)

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        self.batch = inputs
        return self.terms().sum()


class Trace(TrainerCallback):  # ◆ that is all
    def __init__(self, trainer: PolicyGradient, run_dir: str, tokenizer: Any) -> None:
        self.trainer, self.run_dir, self.tokenizer, self.tracer = trainer, run_dir, tokenizer, None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **others: Any) -> None:
        """The gradient is whole and clipped, and the optimizer's step comes next."""
        self.tracer = self.tracer or gradtrace.InfluenceTracer(self.trainer.model, optimizer)
        batch = self.trainer.batch
        gradtrace.record(
            self.run_dir,
            state.global_step + 1,
            prompts=batch["input_ids"][::GROUP, :PROMPT],
            responses=batch["input_ids"][:, PROMPT:],
            rewards=batch["rewards"],
            advantages=self.trainer.advantages,
            trace=self.tracer.parts(self.trainer.terms, group=batch["group"], measure=1),
            tokenizer=self.tokenizer,
        )


def main() -> None:
    run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer"
    tokenizer = ArithmeticTask(ArithmeticConfig(), seed=0).tokenizer
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads))
    arguments = TrainingArguments(
        output_dir=f"{run_dir}/trainer",
        per_device_train_batch_size=4,
        max_steps=8,
        learning_rate=1e-3,
        max_grad_norm=0.0,  # with clipping, parts() works out the factor
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = StoredResponses(32, len(tokenizer))
    trainer = PolicyGradient(model, arguments, join, data)
    trainer.add_callback(Trace(trainer, run_dir, tokenizer))  # ◆
    trainer.train()
    print(f"look at it with: gradtrace view {run_dir}")


if __name__ == "__main__":
    main()
