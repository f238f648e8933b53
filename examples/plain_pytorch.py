"""The influence trace in a loop of your own, plain PyTorch: python examples/plain_pytorch.py [RUN_FOLDER]
A tiny model learns (REINFORCE) to write more of the letter that its prompt names. ◆ marks what is gradtrace's."""

import sys

import torch
from torch import nn

import gradtrace

GROUP, LENGTH = 8, 10


class Model(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(8, d), nn.Linear(d, d), nn.Linear(d, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # long[B, S] → log-probs [B, S, 8]
        seen = self.embed(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return torch.log_softmax(self.head(torch.tanh(self.mix(seen))), -1)


def terms() -> torch.Tensor:  # every token's own term of the loss, [responses, LENGTH]; the loss is their sum
    return -advantages[:, None] * model(ids)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2) / len(ids)


torch.manual_seed(0)
run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/plain_pytorch"
optimizer = torch.optim.Adam((model := Model()).parameters(), lr=1e-2)
tracer = gradtrace.InfluenceTracer(model, optimizer)  # ◆
prompts, group = torch.arange(4)[:, None], torch.arange(4).repeat_interleave(GROUP)
for step in range(1, 21):
    ids = prompts[group]
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].exp(), 1)], 1)
    rewards = (ids[:, 1:] == ids[:, :1]).float().mean(1)
    advantages = rewards - rewards.view(-1, GROUP).mean(1)[group]
    terms().sum().backward()
    parts = tracer.parts(terms, group=group, measure=1)  # ◆ of the optimizer's step that comes now
    optimizer.step()
    optimizer.zero_grad()
    gradtrace.record(  # ◆
        run_dir, step, prompts=prompts, responses=ids[:, 1:], rewards=rewards, advantages=advantages,
        trace=parts, tokenizer=list("abcdefgh"),
    )  # fmt: skip
print(f"mean reward {float(rewards.mean()):.2f}; look at every token with: gradtrace view {run_dir}")
