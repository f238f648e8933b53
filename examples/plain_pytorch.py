"""The influence trace in a loop of your own, plain PyTorch: python examples/plain_pytorch.py [RUN_FOLDER]
A tiny model learns (REINFORCE) to write more of the letter that its prompt names. ◆ marks what is gradtrace's."""

import sys

import torch
from torch import nn

import gradtrace
from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig

GROUP, LENGTH = 8, 10


class Model(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(8, d), nn.Linear(d, d), nn.Linear(d, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # long[B, S] → log-probs [B, S, 8]
        seen = self.embed(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return torch.log_softmax(self.head(torch.tanh(self.mix(seen))), -1)


def terms(chosen: list[int]) -> torch.Tensor:  # ◆ every token's own term of what the loss raises
    return (weights * model(ids)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2))[chosen].flatten()


torch.manual_seed(0)
run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/plain_pytorch"
optimizer = torch.optim.Adam((model := Model()).parameters(), lr=1e-2)
config = InfluenceConfig(projection_dim_factor=0, credit="both")  # ◆ a model without blocks has no last one
tracer = gradtrace.InfluenceTracer(model, config=config, optimizer=optimizer)  # ◆
prompts, group = torch.arange(4)[:, None], (rows := torch.arange(4 * GROUP)) // GROUP
for step in range(1, 21):
    ids = prompts[group]
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].exp(), 1)], 1)
    rewards = (ids[:, 1:] == ids[:, :1]).float().mean(1)
    weights = (rewards - rewards.view(-1, GROUP).mean(1)[group])[:, None].expand(-1, LENGTH)  # advantages
    log_probs = (every := model(ids)[:, :-1]).gather(2, ids[:, 1:, None]).squeeze(2)
    mask = (torch.arange(1 + LENGTH) > 0).expand(len(ids), -1)  # ◆ where ids holds response tokens
    about = {"response": rows, "tokens": mask, "accepted": accepted(rewards, group), "group": group}  # ◆
    with tracer.capture(**about, role="target"):  # ◆ what a step is asked about: the log-probs
        torch.autograd.grad(log_probs.sum(), list(model.parameters()), retain_graph=True)
    with tracer.capture(**about, role="step", scale=-float(len(ids))):  # ◆ from the loss to what it raises
        (-(weights * log_probs).sum() / len(ids)).backward()
    trace = tracer.score(terms=terms, coming=True)  # ◆ for the optimizer's step that comes now
    optimizer.step()
    optimizer.zero_grad()
    gradtrace.record(  # ◆
        run_dir, step, prompts=prompts, responses=ids[:, 1:], rewards=rewards, advantages=weights, log_probs=log_probs,
        entropies=-(every.exp() * every).sum(2), trace=trace, tokenizer=list("abcdefgh"),
    )  # fmt: skip
print(f"mean reward {float(rewards.mean()):.2f}; look at every token with: gradtrace view {run_dir}")
