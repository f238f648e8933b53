"""Continuations per second of `gradtrace counterfactual` against transformers' `generate`, one prefix after the other.

Both draw k continuations of every prefix of a group's responses, at temperature 1 from the whole vocabulary, up to the
same length; nothing may stop early, and the prefixes that siblings share are counted once on both sides. Ours includes
all that the command does: the probabilities of the responses' tokens, the plan, texts and rewards.

- demo: its architecture, a prompt of 10 tokens, 4 responses of 18 tokens, k = 8.
- smollm2: SmolLM2-135M in float32, a prompt of 64 tokens, 2 responses of 8 tokens, k = 8.

In the details, for the demo's size: how many plain continuations of each prefix would give the same standard errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common import Timing, alternate, emit, load_smollm2, parse_arguments, tiny_model
from gradtrace.instruments.counterfactual.sampling import Continuations
from gradtrace.instruments.counterfactual.tree import Measurement
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.arithmetic import build_tokenizer


class Case:
    """A model, a prompt, and responses that it gave."""

    def __init__(self, model: Any, tokenizer: Any, prompt: int, responses: int, length: int, k: int) -> None:
        self.model, self.tokenizer, self.k = model, tokenizer, k
        model.generation_config.eos_token_id = None
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(4, 18, (prompt,), generator=generator).tolist()
        self.params = SamplingParams(n=responses, max_new_tokens=length)
        batch = Sampler(model).generate([self.prompt], self.params, generator)
        self.responses = [list(ids) for ids in batch.response_ids]
        self.continuations = Continuations(Sampler(model), tokenizer, self.params, self.judge)
        self.prefixes = sorted({tuple(ids[:t]) for ids in self.responses for t in range(length)}, key=len)

    @staticmethod
    def judge(texts: list[str]) -> list[float]:
        return [float(len(text) % 2) for text in texts]

    def ours(self) -> Measurement:
        group = self.continuations.begin(self.prompt, self.responses)
        group.measure(np.ones(len(group.tree), bool))
        self.continuations.run(group, self.k)
        assert len(group.samples) == self.samples, (len(group.samples), self.samples)
        return group

    def theirs(self) -> None:
        for prefix in self.prefixes:
            ids = torch.tensor([[*self.prompt, *prefix]])
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=self.k,
                    max_new_tokens=self.params.max_new_tokens - len(prefix),
                    pad_token_id=0,
                )

    @property
    def samples(self) -> int:
        return self.k * len(self.prefixes)

    def described(self, timing: Timing) -> dict[str, Any]:
        return {
            **timing.detail(),
            "prefixes": len(self.prefixes),
            "continuations": self.samples,
            "theirs_per_s": round(self.samples / timing.theirs_median, 1),
            "ours_per_s": round(self.samples / timing.ours_median, 1),
        }


def plain_equivalent(group: Measurement, k: int) -> float:
    """Plain continuations of each prefix, per one of ours, for the same mean squared standard error of ΔV."""
    values = group.values()
    low, high = group.stretches().bounds
    share = ((values.value - low) / (high - low)).clip(0, 1)
    variance = share * (1 - share) * (high - low) ** 2  # rewards are the lowest or the highest one here
    tokens = np.flatnonzero(np.isfinite(values.delta))
    plain = variance[tokens] + variance[np.array(group.tree.parent)[tokens]]
    return float(plain.mean() / (k * (values.delta_stderr[tokens] ** 2).mean()))


def compare(case: Case, rounds: int) -> tuple[Timing, dict[str, Any]]:
    ours: Callable[[], object] = case.ours
    timing = alternate(case.theirs, ours, rounds, warmup=0)
    return timing, case.described(timing)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    model, tokenizer = load_smollm2()
    rounds = 1 if args.quick else 2
    demo = Case(tiny_model(), build_tokenizer(), prompt=10, responses=2 if args.quick else 4, length=18, k=8)
    smollm2 = Case(model, tokenizer, 64, 1 if args.quick else 2, 6 if args.quick else 8, k=8)
    timing_demo, detail_demo = compare(demo, 2 * rounds)
    timing_smollm2, detail_smollm2 = compare(smollm2, rounds)
    detail_demo["plain_continuations_per_ours"] = round(plain_equivalent(demo.ours(), demo.k), 2)
    emit(
        "counterfactual",
        {"speedup_prefixes_demo": timing_demo, "speedup_prefixes_smollm2": timing_smollm2},
        {"demo": detail_demo, "smollm2": detail_smollm2, "threads": torch.get_num_threads()},
    )


if __name__ == "__main__":
    main()
