"""Continuations from a sampler: what the policy writes after it has left the responses of a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual.tree import NEGLIGIBLE, Measurement, PrefixTree, Sample
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.draw import distribution
from gradtrace.rollout.sampler import Start, evaluation_mode
from gradtrace.terminal import Progress

AT_LEAST = 4
"""Samples of every stretch before the rest goes to where it helps most."""
LOGIT_ROWS = 256
"""Positions whose distributions are looked at together."""

Judge = Callable[[list[str]], list[float]]
"""Texts of whole responses to one prompt → their rewards."""


@dataclass(eq=False)
class Continuations:
    """Draws continuations of one group's responses and has them judged."""

    sampler: Sampler
    tokenizer: Any
    params: SamplingParams
    """The distribution, and how long a whole response may be (`max_new_tokens`)."""
    judge: Judge
    seed: int = 0
    _known: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.params.temperature == 0:
            raise GradtraceError("temperature 0 always writes the same continuation: sample with another, e.g. 1")

    def begin(
        self, prompt: list[int], responses: list[list[int]], written: list[np.ndarray] | None = None
    ) -> Measurement:
        """The responses with their rewards and probabilities; nothing is measured yet. `written`: which of their tokens
        the policy wrote; None: all."""
        longest = max(len(response) for response in responses)
        if longest > self.params.max_new_tokens:
            raise GradtraceError(
                f"a response has {longest} tokens, more than max_new_tokens={self.params.max_new_tokens}: raise it"
            )
        ended = [
            len(response) == self.params.max_new_tokens
            or response[-1:] in [[s] for s in self.params.stop_token_ids]
            or self.sampler.environment is not None
            for response in responses
        ]
        log_probs = [self.log_probs(prompt, response) for response in responses]
        for own, mask in zip(log_probs, written or [], strict=False):
            own[~mask] = np.nan
        return Measurement(
            prompt=list(prompt),
            responses=[list(response) for response in responses],
            rewards=np.array(self.rewards(responses)),
            ended=np.array(ended),
            log_probs=log_probs,
            measured=np.zeros(len(PrefixTree(responses)), bool),
            samples=[],
            written=written,
        )

    def log_probs(self, prompt: list[int], response: list[int]) -> np.ndarray:
        """float64[T]: of the response's tokens, in the distribution that is sampled from."""
        model = self.sampler.model
        device = model.get_input_embeddings().weight.device
        ids = torch.tensor([prompt + response], device=device)
        with evaluation_mode(model), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            parts = [distribution(part.double(), self.params) for part in logits.split(LOGIT_ROWS)]
        tokens = ids[0, len(prompt) :].split(LOGIT_ROWS)
        found = [part.gather(1, own[:, None])[:, 0] for part, own in zip(parts, tokens, strict=True)]
        return torch.cat(found).cpu().numpy() if found else np.zeros(0)

    def rewards(self, responses: list[list[int]]) -> list[float]:
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self.judge(new), strict=True))
        return [self._known[text] for text in texts]

    def extend(self, group: Measurement, plan: np.ndarray, progress: Progress | None = None) -> None:
        """Draw `plan` samples (int[N]) in the stretches. They depend on the seed and on how many there are already."""
        rng = np.random.default_rng([self.seed, len(group.samples), len(group.prompt), *group.prompt])
        nodes = group.stretches().draw_nodes(plan, rng)
        chosen = np.flatnonzero(nodes).tolist()
        tree = group.tree
        prefixes = [group.responses[tree.owner[node]][: tree.depth[node]] for node in chosen]
        starts = [
            Start(
                group.prompt + prefix,
                int(nodes[node]),
                self.params.max_new_tokens - len(prefix),
                tuple(tree.children[node]),
                group.turn(node),
            )
            for node, prefix in zip(chosen, prefixes, strict=True)
        ]
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        drawn = self.sampler.respond(starts, self.params, generator, progress)
        rows = zip(drawn.tokens, drawn.lengths.tolist(), strict=True)
        continuations = [tokens[:length].tolist() for tokens, length in rows]
        at = [index for index, start in enumerate(starts) for _ in range(start.n)]
        rewards = self.rewards([prefixes[i] + ids for i, ids in zip(at, continuations, strict=True)])
        group.samples += [
            Sample(chosen[i], ids, reward, finished)
            for i, ids, reward, finished in zip(at, continuations, rewards, drawn.finished.tolist(), strict=True)
        ]

    def round_size(self, group: Measurement) -> int:
        """How many continuations fill the sampler once."""
        return max(16, self.sampler.max_batch_tokens // (len(group.prompt) + self.params.max_new_tokens))

    def run(
        self,
        group: Measurement,
        k: int,
        *,
        budget: float = 0.0,
        progress: Progress | None = None,
        after_round: Callable[[], None] | None = None,
    ) -> bool:
        """Sample until there are `k` continuations for each measured prefix on average, or `budget` seconds are over
        (0: no limit). Whether all are there. `after_round` is called when a batch has been added."""
        until = time.monotonic() + budget if budget else float("inf")
        while (left := missing(group, k)) > 0:
            if time.monotonic() > until:
                return False
            plan = group.stretches().plan(min(left, self.round_size(group)), min(k, AT_LEAST))
            if not plan.any():
                break
            done = len(group.samples)
            extent = done + left

            def report(ended: int, _: int, done: int = done, extent: int = extent) -> None:
                if progress is not None:
                    progress(done + ended, extent)

            self.extend(group, plan, report)
            if after_round is not None:
                after_round()
        return True


def missing(group: Measurement, k: int) -> int:
    """How many continuations are still to be drawn until there are `k` for each measured prefix on average."""
    stretches = group.stretches()
    wanted = group.measured & (stretches.leaving > NEGLIGIBLE)
    return int(k * wanted.sum() - stretches.count[wanted].sum())
