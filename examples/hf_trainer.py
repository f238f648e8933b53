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

from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.batch import RolloutBatch
from gradtrace.config import ArithmeticConfig
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.columns import describe, influence_columns
from gradtrace.instruments.influence.plan import group_status
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter

GROUP, PROMPT, LENGTH = 4, 4, 6


class StoredResponses(Dataset[dict[str, Any]]):
    """Groups of `GROUP` responses to one prompt; the reward counts a letter, so that there is something to find."""

    def __init__(self, groups: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, vocabulary, (groups, PROMPT), generator=generator).repeat_interleave(
            GROUP, 0
        )
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
        self.config = InfluenceConfig.older(projection_dim_factor=0)
        self.tracer = InfluenceTracer(self.model, self.config)  # ◆ 1. hooks on the model
        self.files, self.writer = RunFiles(run_dir), TraceWriter(run_dir, "influence_trace")
        self.files.write_token_bytes(TokenBytes.from_tokenizer(tokenizer))

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        log_probs = torch.log_softmax(model(input_ids=inputs["input_ids"]).logits[:, PROMPT - 1 : -1], -1)
        chosen = log_probs.gather(2, inputs["input_ids"][:, PROMPT:, None]).squeeze(2)
        self.seen = chosen.detach(), -(log_probs.exp() * log_probs).sum(2).detach()
        return -(self.advantages(inputs)[:, None] * chosen).mean()

    def advantages(self, inputs: dict[str, Tensor]) -> Tensor:
        grouped = inputs["rewards"].view(-1, GROUP)
        return (grouped - grouped.mean(1, keepdim=True)).flatten()

    def training_step(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        ids = inputs["input_ids"]
        rows = torch.arange(len(ids))
        tokens = (torch.arange(ids.shape[1]) >= PROMPT).expand(len(ids), -1)
        # The loss is a mean over tokens (and accumulated batches): the scale makes it the sum again.
        scale = float(len(ids) * LENGTH * self.current_gradient_accumulation_steps)
        with self.tracer.capture(response=rows, tokens=tokens, scale=scale):  # ◆ 2. around the backward pass
            loss = super().training_step(model, inputs, *args, **options)
        self.write(inputs, rows, tokens)
        return loss

    def write(self, inputs: dict[str, Tensor], rows: Tensor, tokens: Tensor) -> None:
        """◆ 3. score, and keep it as every gradtrace run is kept."""
        ids, group, rewards, advantages = (
            inputs["input_ids"],
            inputs["group"],
            inputs["rewards"],
            self.advantages(inputs),
        )
        sign = torch.where(
            advantages < 0, -1.0, 1.0
        )  # the loss counts each response with its advantage's sign
        trace = self.tracer.score(accepted=accepted(rewards, group), group=group, sign=sign)
        batch = RolloutBatch(
            prompts=ids[::GROUP, :PROMPT].tolist(),
            group=group,
            responses=ids[:, PROMPT:],
            response_mask=tokens[:, PROMPT:],
            finished=torch.ones(len(ids), dtype=torch.bool),
            sampler_log_probs=self.seen[0],
            rewards=rewards,
            advantages=advantages[:, None].expand(-1, LENGTH),
            old_log_probs=self.seen[0],
            entropies=self.seen[1],
        )
        scored = [Scored(rows, torch.full((len(rows),), self.state.global_step), trace)]
        columns, _ = influence_columns(
            batch, scored, group_status(batch, 0), self.config, pairwise_max_mb=64.0
        )
        step = self.state.global_step + 1
        self.writer.write(step, columns, describe(self.config))
        self.files.log(step, {"critic/rewards/mean": float(rewards.mean()), **trace.metrics})


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
    trainer.writer.close()
    print(f"look at it with: gradtrace view {run_dir}")


if __name__ == "__main__":
    main()
