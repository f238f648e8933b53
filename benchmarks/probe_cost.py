"""What the entropy probe costs: δH1 with every response's share, against a backward pass for each response.

`speedup_shares_*`: theirs is a backward pass over E for the entropy gradient, then for each response of U a backward
pass of its own and the product with the preconditioned gradient; ours is the same pass over E and one forward-mode
pass over U (which gives the shares of single tokens as well). Both begin with the update and the entropies of E
known; the shares are compared. On the demo's model (128 responses) and on SmolLM2-135M (16).
`overhead_memory_2048`: peak memory of a probe (prediction, shares, measurement) with 2,048 sequences in E over that
with 64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    Timing,
    alternate,
    emit,
    load_smollm2,
    machine,
    parse_arguments,
    peak_memory,
    tiny_model,
)
from benchmarks.probe_accuracy import loss_batch
from gradtrace.attribution.update import parameter_updates
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.entropy_probe.estimates import Prediction
from gradtrace.instruments.entropy_probe.passes import TokenBatch, evaluation_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Update
from gradtrace.policy.policy import Policy
from gradtrace.rollout import Sampler, SamplingParams


class Setting:
    """A model, its AdamW with a state of one step, E and U sampled from it; random rewards."""

    def __init__(self, model: Any, E: int, groups: int, n: int, prompt: int, length: int, budget: int) -> None:
        self.config = load_config([f"rollout.max_new_tokens={length}"])
        self.model = model
        self.budget = budget
        self.policy = Policy(model, torch.device("cpu"), 1.0, full_precision=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.probe = EntropyProbe(model, self.optimizer, 1.0)
        self.shape = (prompt, length)
        for one in self.loss(self.sample(groups, n, 1)).passes():
            one.run().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rollout = self.sample(groups, n, 2)
        self.U = self.loss(self.rollout)
        self.alone = self.loss(self.rollout, token_budget=1)  # a pass for every response
        self.E = evaluation_batch(self.policy, self.sample(E, 1, 3), budget)

    def sample(self, prompts: int, n: int, seed: int) -> RolloutBatch:
        generator = torch.Generator().manual_seed(seed)
        vocabulary, (prompt, length) = self.model.config.vocab_size, self.shape
        ids = torch.randint(3, vocabulary, (prompts, prompt), generator=generator).tolist()
        batch = Sampler(self.model).generate(ids, SamplingParams(n=n, max_new_tokens=length), generator=generator)
        return batch.replace(rewards=torch.rand(len(batch), generator=generator))

    def loss(self, batch: RolloutBatch, token_budget: int = 0) -> TokenBatch:
        return loss_batch(self.policy, batch, self.config, token_budget or self.budget)


def per_response(setting: Setting, prediction: Prediction, update: Update) -> Tensor:
    """[R]: the shares, one backward pass each."""
    probe = setting.probe
    target = probe._entropy_gradient(prediction.base, setting.E, None)
    weights = {
        name: -update.clip_factor * part.factor * target[name]
        for name, part in parameter_updates(probe.optimizer, probe.parameters, update.gradient)
    }
    parameters = [probe.parameters[name] for name in weights]
    shares = torch.zeros(len(setting.alone.lengths), dtype=torch.float64)
    for one in setting.alone.passes():
        gradients = torch.autograd.grad(one.run().sum(), parameters)
        products = [float((g * w).sum()) for g, w in zip(gradients, weights.values(), strict=True)]
        shares[one.rows] = sum(products)
    return shares


def compare(setting: Setting, rounds: int) -> tuple[Timing, dict[str, Any]]:
    update = setting.probe.update(setting.U)
    base = setting.probe.tokens(setting.E)
    zeros = torch.zeros_like(base.entropies)
    prediction = Prediction(base, zeros, zeros)  # shares need E's entropies only
    found: dict[str, Tensor] = {}

    def theirs() -> None:
        found["theirs"] = per_response(setting, prediction, update)

    def ours() -> None:
        found["ours"] = setting.probe.shares(prediction, setting.E, update, setting.U).responses

    ours()  # warms up; the many passes of the other side warm themselves
    timing = alternate(theirs, ours, rounds, warmup=0)
    apart = float((found["theirs"] - found["ours"]).abs().max() / found["theirs"].abs().max())
    return timing, timing.detail() | {"largest_difference": apart, "responses": len(found["ours"])}


def prepare(sequences: int) -> Setting:
    torch.set_num_threads(1)
    return Setting(tiny_model(), E=sequences, groups=4, n=4, prompt=10, length=20, budget=2048)


def probe_once(setting: Setting) -> float:
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    setting.probe.shares(prediction, setting.E, update, setting.U)
    return setting.probe.measure(prediction, setting.E, update)[0].change.value


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    rounds = 2 if args.quick else 5
    tiny = Setting(tiny_model(), E=128, groups=16, n=8, prompt=10, length=20, budget=4096)
    timing, tiny_detail = compare(tiny, rounds)
    ratios: dict[str, float | Timing] = {"speedup_shares_tiny": timing}
    detail: dict[str, Any] = {"machine": machine(), "tiny": tiny_detail}
    print(f"tiny: {tiny_detail}", flush=True)
    if not args.quick:
        model = load_smollm2()[0]
        timing, detail["smollm2"] = compare(
            Setting(model, E=8, groups=2, n=8, prompt=24, length=24, budget=1024), rounds=4
        )
        ratios["speedup_shares_smollm2"] = timing
        print(f"SmolLM2-135M: {detail['smollm2']}", flush=True)
        del model
    few, many = (peak_memory(prepare, probe_once, count) for count in (64, 256 if args.quick else 2048))
    ratios["overhead_memory_2048"] = many.peak_bytes / few.peak_bytes
    detail["memory"] = {
        "64": few.peak_bytes,
        "2048": many.peak_bytes,
        "extra_64": few.extra_bytes,
        "extra_2048": many.extra_bytes,
    }
    emit("probe_cost", ratios, detail)


if __name__ == "__main__":
    main()
