"""`InfluenceTracer`: scores of tokens in a custom training loop. Start here when you use the package alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.parts import OwnTerms, TokenParts, groups_in_turn, token_parts

if TYPE_CHECKING:
    from gradtrace.attribution.factors.engine import FactorScores
    from gradtrace.attribution.factors.layers import Block
    from gradtrace.attribution.factors.one_pass import MemoryEstimate
    from gradtrace.attribution.factors.result import InfluenceTrace


class InfluenceTracer:
    """Scores response tokens by what training does.

    ```python
    tracer = InfluenceTracer(model, optimizer)
    loss.backward()                                     # and clip, as ever
    parts = tracer.parts(terms)                         # before optimizer.step()
    ```

    With an `InfluenceConfig` that names another definition, scores are made of gradient factors of the model's layers,
    which hooks capture during backward passes:

    ```python
    tracer = InfluenceTracer(model, optimizer, InfluenceConfig(credit="position"))
    with tracer.capture(response=rows, tokens=mask, accepted=accepted, group=group, scale=…, target_scale=…):
        loss.backward()                                 # as often as there are micro-batches
    trace = tracer.score(coming=True)                   # before optimizer.step()
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        config: InfluenceConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        defer_errors: bool = False,
    ) -> None:
        """`optimizer`: the one that takes the steps. With `defer_errors` a failure inside a captured backward pass does
        not interrupt it: `score` raises it instead."""
        self.model = model
        self.optimizer = optimizer
        self.config = config or InfluenceConfig()
        self.ranks = Ranks(process_group)
        self._turn = 0
        self._factors: FactorScores | None = None
        if not self.config.is_parts:
            from gradtrace.attribution.factors.engine import FactorScores

            self._factors = FactorScores(model, optimizer, self.config, self.ranks, defer_errors)

    def parts(
        self,
        terms: OwnTerms,
        clip_factor: float | None = None,
        group: Tensor | None = None,
        measure: int = 0,
    ) -> TokenParts:
        """What the coming step does to every token's own term of the loss; after `loss.backward()` and clipping, before
        `optimizer.step()`. See `TokenParts`.

        `terms()` runs the model and returns each response's own terms of that loss, one tensor per response; together
        they sum to the loss. `clip_factor`: what clipping has multiplied the gradient by.

        With `group`, long[R], the parts of `measure` groups in the objective of their own prompt are taken as well; the
        groups take turns from call to call. Each costs two more forward passes and a backward pass, and holds the
        graph of all of `terms()`.
        """
        if self.optimizer is None:
            raise AttributionError(
                "parts are of an optimizer's step: make the tracer as InfluenceTracer(model, optimizer)"
            )
        if measure and group is None:
            raise AttributionError(f"measure={measure} asks about groups: give group, long[R], as well")
        chosen = None if group is None else groups_in_turn(group, measure, self._turn, self.ranks)
        self._turn += 1
        return token_parts(
            self.model, self.optimizer, terms, clip_factor=clip_factor, measured=chosen, ranks=self.ranks
        )

    # ---------------------------------------------------------------- scores from captured factors

    @property
    def factors(self) -> FactorScores:
        """What captures and scores; its `capture` and `score` say what they take."""
        if self._factors is None:
            raise AttributionError(
                "the default score has no captured factors: call parts(terms), or name another definition, such as"
                " InfluenceTracer(model, optimizer, InfluenceConfig(credit='position')) or InfluenceConfig.older()"
            )
        return self._factors

    def capture(self, **backward: Any) -> AbstractContextManager[None]:
        """The backward pass inside is captured: `FactorScores.capture`."""
        return self.factors.capture(**backward)

    def score(self, **how: Any) -> InfluenceTrace:
        """Scores of everything captured since the last call: `FactorScores.score`."""
        return self.factors.score(**how)

    def begin(self) -> None:
        """Read the optimizer's state, before the first capture: `FactorScores.begin`."""
        self.factors.begin()

    def reset(self) -> None:
        """Forget everything captured since the last `score()`."""
        self.factors.reset()

    @property
    def blocks(self) -> list[Block]:
        """The layers that are captured."""
        return self.factors.blocks

    def memory_estimate(self, responses: int, tokens: int, whole_groups: bool = False) -> MemoryEstimate:
        """Bytes that a batch of this size will need, before anything is allocated."""
        return self.factors.memory_estimate(responses, tokens, whole_groups)

    def attach(self) -> None:
        """Needed only after `close`: a tracer that captures has its hooks on the model from the start."""
        self.factors.hooks.attach()

    def close(self) -> None:
        """Remove the hooks from the model, if there are any; `attach` puts them back."""
        if self._factors is not None:
            self._factors.hooks.close()

    def __enter__(self) -> InfluenceTracer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
