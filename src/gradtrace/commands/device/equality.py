"""Scores of a small model on a device against those of the CPU in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer

GROUPS, EACH, PROMPT, LENGTH, VOCABULARY = 4, 4, 6, 12, 97
TOLERANCE = {"float32": 0.9999, "bf16": 0.98}
"""Rank correlations below these are a fault of the device, its driver or our code, and no matter of rounding."""


@dataclass(frozen=True)
class Agreement:
    """How well scores of one kind agree with the CPU's in float64."""

    score: str
    precision: str
    correlation: float
    """Spearman's, over all tokens."""
    error: float
    """‖difference‖ / ‖scores‖."""

    @property
    def is_good(self) -> bool:
        return self.correlation >= TOLERANCE[self.precision]


def kinds() -> dict[str, InfluenceConfig]:
    common: dict[str, Any] = {"projection_dim_factor": 0, "loss_term_prompts": 0}
    inverse: dict[str, Any] = {"hessian_mode": "inverse", "reg_scale": 1.0}
    return {
        "optimizer, loss term": InfluenceConfig(**common),
        "optimizer factored, loss term": InfluenceConfig(**common, preconditioner_form="factored"),
        "optimizer, tail": InfluenceConfig(**common, credit="tail"),
        "identity, position": InfluenceConfig(**common, credit="position", hessian_mode="identity"),
        "inverse, loss term": InfluenceConfig(**common, **inverse),
    }


class SmallCase:
    """A random model with an optimizer that has made a few steps, and a batch of responses to trace."""

    def __init__(self) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.2,
            )
            self.model = Qwen2ForCausalLM(config).double().eval()
        rows = GROUPS * EACH
        self.ids = torch.randint(VOCABULARY, (rows, PROMPT + LENGTH), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows,), generator=generator)
        places = torch.arange(PROMPT + LENGTH)
        self.tokens = (places >= PROMPT) & (places < PROMPT + lengths[:, None])
        self.accepted = torch.arange(rows) % 2 == 0
        self.advantages = torch.where(self.accepted, 1.0, -1.0)
        self.group = torch.arange(GROUPS).repeat_interleave(EACH)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(3):
            self.model(input_ids=self.ids).logits.logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.state = optimizer.state_dict()

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(self.model).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.load_state_dict(copy.deepcopy(self.state))
        return model, optimizer

    def terms(
        self,
        model: nn.Module,
        device: torch.device,
        responses: list[int],
        dtype: torch.dtype = torch.float32,
        half: bool = False,
    ) -> Tensor:
        """A · log-prob of the tokens of these responses."""
        rows = torch.tensor(responses)
        ids, mask = self.ids[rows].to(device), self.tokens[rows].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(input_ids=ids, use_cache=False).logits
        found = logits[:, :-1].to(dtype).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return found[mask[:, 1:]] * self.advantages[rows].to(device, dtype).repeat_interleave(mask.sum(1))

    def scores(
        self,
        config: InfluenceConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        half: bool = False,
    ) -> Tensor:
        """Scores of all response tokens, one after the other, on the CPU. `half`: passes under bf16 autocast."""
        model, optimizer = self.on(device, dtype)
        terms = partial(self.terms, model, device, dtype=dtype, half=half)
        everything = torch.arange(len(self.ids))
        with InfluenceTracer(model, config, optimizer=optimizer) as tracer:
            with tracer.capture(
                response=everything,
                tokens=self.tokens,
                accepted=self.accepted,
                group=self.group,
                target_scale=1 / self.advantages,
            ):
                terms(everything.tolist()).sum().backward()
            trace = tracer.score(terms=terms if config.wants_loss_term else None)
        return torch.cat([scores.double().cpu() for scores in trace.token_scores])


def agreements(device: torch.device) -> list[Agreement]:
    """Every kind of score in float32 and with bf16 passes on `device`, against float64 on the CPU."""
    from gradtrace.instruments.verify.agreement import spearman

    case, found = SmallCase(), []
    for name, config in kinds().items():
        exact = case.scores(config, torch.device("cpu"), torch.float64)
        for precision in TOLERANCE:
            ours = case.scores(config, device, half=precision == "bf16")
            error = float((ours - exact).norm() / exact.norm())
            found.append(Agreement(name, precision, spearman(ours, exact), error))
    return found
