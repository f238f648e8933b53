"""The influence trace in a loop of your own, plain PyTorch: python examples/plain_pytorch.py [RUN_FOLDER]
A tiny model learns (REINFORCE) to write more of the letter that its prompt names. ◆ marks what is gradtrace's."""

import sys

import torch
from torch import nn

from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.columns import describe, influence_columns
from gradtrace.instruments.influence.plan import group_status
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import Rules, TokenBytes
from gradtrace.trace.writer import TraceWriter

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
tracer = InfluenceTracer(model, config, optimizer=optimizer)  # ◆
files, writer = RunFiles(run_dir), TraceWriter(run_dir, "influence_trace")  # ◆
files.write_token_bytes(TokenBytes([letter.encode() for letter in "abcdefgh"], [0] * 8, Rules()))  # ◆
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
    old, entropies = log_probs.detach(), -(every.exp() * every).sum(2).detach()  # ◆
    batch = RolloutBatch(prompts.tolist(), group, ids[:, 1:], mask[:, 1:], mask[:, 1], old)  # ◆
    batch = batch.replace(rewards=rewards, advantages=weights, old_log_probs=old, entropies=entropies)  # ◆
    scored = [Scored(rows, 0 * rows, trace)]  # ◆
    columns, said = influence_columns(batch, scored, group_status(batch, 0), config, 64)  # ◆
    writer.write(step, columns, describe(config) | said)  # ◆
    files.log(step, {"critic/rewards/mean": float(rewards.mean()), **trace.metrics})  # ◆
writer.close()  # ◆
print(f"mean reward {float(rewards.mean()):.2f}; look at every token with: gradtrace view {run_dir}")
