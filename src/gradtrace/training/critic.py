"""The critic of PPO: a value for the state before every response token, from a transformer of its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from gradtrace.algorithms import Denominator, aggregate, value_loss
from gradtrace.batch import RolloutBatch
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import OptimizerStep
from gradtrace.policy.load import choose_device, disable_dropout
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import run_model
from gradtrace.policy.settings import CriticConfig
from gradtrace.training.update import UpdateMetrics

HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A transformer without its language-model head, and a linear head of one output, zero at first."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """float[N]: the value of the state that each response token was chosen in."""
        output = run_model(self.backbone, micro)
        hidden = output.last_hidden_state
        at_states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.logit_positions)
        return self.head(at_states).squeeze(-1)


@dataclass(eq=False)
class Critic:
    model: ValueModel
    optimizer: Optimizer
    config: CriticConfig
    device: torch.device

    def values(self, micro: MicroBatch) -> Tensor:
        """float32[r, T]: the value of the state before each response token."""
        micro = micro.to(self.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            values = self.model(micro)
        return micro.unflatten(values.float())

    @torch.no_grad()
    def add_values(self, batch: RolloutBatch, micro_batches: MicroBatches) -> RolloutBatch:
        values = torch.zeros_like(batch.sampler_log_probs)
        for micro in micro_batches(torch.arange(len(batch))):
            values[micro.rows, : micro.mask.shape[1]] = self.values(micro).cpu()
        return batch.replace(values=values)

    def update(
        self, batch: RolloutBatch, micro_batches: MicroBatches, updates: list[OptimizerStep]
    ) -> dict[str, float]:
        """One optimizer step per planned mini-batch towards batch.returns."""
        steps = UpdateMetrics()
        sums: dict[str, float] = defaultdict(float)
        for update in updates:
            denominator = Denominator.of(batch.response_mask[update.rows])
            for micro in micro_batches(update.rows):
                old_values = micro.column(batch, "values", self.device)
                returns = micro.column(batch, "returns", self.device)
                mask = micro.mask.to(self.device)
                clip = self.config.value_clip or None
                outputs = value_loss(self.values(micro), old_values, returns, mask, clip)
                loss = aggregate(outputs.loss, mask, "token_mean", denominator)
                loss.backward()
                sums["critic/vf_loss"] += float(loss.detach()) / len(updates)
                sums["critic/vf_clipfrac"] += float(outputs.metrics["critic/vf_clipfrac"].sum()) / denominator.tokens
            if steps.is_finite(self.optimizer.clip()):
                self.optimizer.step()
            self.optimizer.zero_grad()
        return {**sums, "critic/grad_norm": steps.grad_norm, "critic/skipped_updates": float(steps.skipped)}

    def save(self, folder: Path) -> None:
        self.model.backbone.save_pretrained(folder)
        save_file(self.model.head.state_dict(), folder / HEAD_FILE)


def load_critic(path: str | Path, config: Config, checkpoint: Path | None = None) -> Critic:
    """Load a critic from the weights in `path` with a new head, or from a checkpoint's critic folder."""
    device = choose_device(config.model.device)
    options = {} if config.model.attention == "auto" else {"attn_implementation": config.model.attention}
    try:
        backbone = AutoModel.from_pretrained(
            checkpoint or path, dtype=torch.float32, trust_remote_code=False, **options
        )
    except Exception as error:
        raise GradtraceError(f"critic.path={path}: the model cannot be loaded. {error}") from error
    disable_dropout(backbone)
    model = ValueModel(backbone.eval())
    if checkpoint is not None:
        model.head.load_state_dict(load_file(checkpoint / HEAD_FILE))
    model.to(device)
    optimizer = Optimizer(dict(model.named_parameters()), config.critic.optim, config.trainer.total_steps)
    return Critic(model, optimizer, config.critic, device)
