"""One group of responses and the scores that every tool is asked for.

The question: for every response token t and every response r, the inner product of t's gradient and r's gradient of
F = Σ log-prob of the response tokens, over the same linear layers, without curvature and without projection. Ours is
`InfluenceTracer` with `pairwise`, sums, identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import load_smollm2, tiny_model
from gradtrace.attribution import InfluenceConfig, InfluenceTracer


@dataclass(frozen=True)
class Sizes:
    name: str
    responses: int
    prompt: int
    length: int
    rounds: int


TINY = Sizes("tiny", responses=32, prompt=12, length=24, rounds=9)
TINY_QUICK = Sizes("tiny", responses=16, prompt=8, length=16, rounds=3)
SMOLLM2 = Sizes("smollm2", responses=8, prompt=32, length=64, rounds=6)


@dataclass(eq=False)
class Case:
    sizes: Sizes
    model: nn.Module
    ids: Tensor
    """long[R, P + T]."""
    modules: list[str]
    """Names of the layers that are traced."""

    @property
    def tokens(self) -> Tensor:
        return (torch.arange(self.ids.shape[1]) >= self.sizes.prompt).expand(len(self.ids), -1)


def make_case(sizes: Sizes) -> Case:
    """Deterministic, so that every process (and every environment) makes the same."""
    if sizes.name == "tiny":
        model: Any = tiny_model()
        vocabulary, wanted = 18, ""
    else:
        model, _ = load_smollm2()
        vocabulary, wanted = (
            49000,
            ".2",
        )  # the upper layers: both sides would need minutes and many GB for all
    torch.manual_seed(1)
    ids = torch.randint(3, vocabulary, (sizes.responses, sizes.prompt + sizes.length))
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and "lm_head" not in name
        and f"layers{wanted}" in name
        # kronfluence counts a layer's bias with its weight, ours counts weights: layers that have none.
        and module.bias is None
    ]
    if sizes.name == "smollm2":
        names = [name for name in names if name.split(".")[2] in ("26", "27", "28", "29")]
    # Scores of a part of the model need no gradient below it. kronfluence freezes its model in the same way.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.removesuffix(".weight") in names)
    return Case(sizes, model, ids, names)


def token_log_probs(model: nn.Module, ids: Tensor, prompt: int) -> Tensor:
    """[R, T]: log-probs of the response tokens."""
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1]
    return torch.log_softmax(logits, -1).gather(2, ids[:, prompt:, None]).squeeze(2)


def our_scores(case: Case) -> Tensor:
    """[R, T, R]: effect of each token on each response."""
    rows = torch.arange(len(case.ids))
    config = InfluenceConfig.older(
        hessian_mode="identity",
        projection_dim_factor=0,
        response_reduction="sum",
        module_name_filter=tuple(f"^{name}$".replace(".", r"\.") for name in case.modules),
    )
    accepted, group = rows == 0, torch.zeros(len(rows), dtype=torch.long)
    with InfluenceTracer(case.model, config=config) as tracer:
        with tracer.capture(response=rows, tokens=case.tokens, accepted=accepted, group=group):
            token_log_probs(case.model, case.ids, case.sizes.prompt).sum().backward()
        trace = tracer.score()
    case.model.zero_grad()
    return torch.stack([trace.pairwise_of(int(r))[1] for r in rows])


def our_total(case: Case) -> float:
    """For measuring memory: a small result."""
    return float(our_scores(case).sum())


def difference(theirs: Tensor, ours: Tensor) -> float:
    return float((theirs - ours).norm() / ours.norm())
