"""The influence trace in a Hugging Face `Trainer`: python examples/hf_trainer.py [RUN_FOLDER]

Offline policy gradient on stored responses: a batch holds whole groups (one prompt, several responses with rewards),
the loss is −advantage · log-prob. `TracedTrainer` adds three things to Trainer, marked ◆; the data is made up.
Then: gradtrace view runs/hf_trainer
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import gradtrace
from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig
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


class TracedTrainer(Trainer):
    def __init__(self, *args: Any, run_dir: str, tokenizer: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.run_dir, self.words, self.tracer = run_dir, tokenizer, None

    def log_probs(self, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, LENGTH]: log-probs of the response tokens, and the entropies that they were drawn from."""
        every = torch.log_softmax(model(input_ids=ids).logits[:, PROMPT - 1 : -1], -1)
        return every.gather(2, ids[:, PROMPT:, None]).squeeze(2), -(every.exp() * every).sum(2)

    def advantages(self, inputs: dict[str, Tensor]) -> Tensor:
        grouped = inputs["rewards"].view(-1, GROUP)
        return (grouped - grouped.mean(1, keepdim=True)).flatten()

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        self.seen = self.log_probs(model, inputs["input_ids"])
        return -(self.advantages(inputs)[:, None] * self.seen[0]).mean()

    def training_step(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        if self.tracer is None:  # ◆ 1. hooks on the model, and the geometry of its optimizer
            config = InfluenceConfig(projection_dim_factor=0)
            self.tracer = gradtrace.InfluenceTracer(self.model, config=config, optimizer=self.optimizer)
        ids, group, advantages = inputs["input_ids"], inputs["group"], self.advantages(inputs)
        # The loss is −mean(A ℓ): from it to A ℓ, the step of a token, and to ℓ, whose contrast the step is asked about.
        step = -float(len(ids) * LENGTH * self.current_gradient_accumulation_steps)
        target = torch.where(advantages == 0, 0.0, step / advantages)
        with self.tracer.capture(  # ◆ 2. around the backward pass
            response=torch.arange(len(ids)),
            tokens=(torch.arange(ids.shape[1]) >= PROMPT).expand(len(ids), -1),
            accepted=accepted(inputs["rewards"], group),
            group=group,
            scale=step,
            target_scale=target,
        ):
            loss = super().training_step(model, inputs, *args, **options)

        def terms(chosen: list[int]) -> Tensor:
            return (advantages[chosen, None] * self.log_probs(self.model, ids[chosen])[0]).flatten()

        gradtrace.record(  # ◆ 3. score, and keep it as every gradtrace run is kept
            self.run_dir,
            self.state.global_step + 1,
            prompts=ids[::GROUP, :PROMPT],
            responses=ids[:, PROMPT:],
            rewards=inputs["rewards"],
            advantages=advantages,
            log_probs=self.seen[0],
            entropies=self.seen[1],
            trace=self.tracer.score(terms=terms, coming=True),
            tokenizer=self.words,
        )
        return loss


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
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = StoredResponses(32, len(tokenizer))
    trainer = TracedTrainer(model, arguments, join, data, run_dir=run_dir, tokenizer=tokenizer)
    trainer.train()
    print(f"look at it with: gradtrace view {run_dir}")


if __name__ == "__main__":
    main()
