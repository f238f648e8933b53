"""TracIn scores on the ranks that hold the weights.

The validation gradient is what verl's own backward pass leaves in `.grad`: FSDP2 shards, which stay where they are.
Scores are ghost products in another backward pass, of the training responses' own losses: every layer gathers its part
of the validation gradient inside its hook and drops it again. No weight moves, so none has to be put back; it works
in bf16, with recomputation, offload, packed and dynamic batches, and for adapters.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution import GhostProduct
from gradtrace.attribution.collectives import Ranks
from gradtrace.errors import GradtraceError
from gradtrace.instruments.host import Gradient, asked_by
from gradtrace.instruments.tracin.scores import Measures, by_adam, score_parts
from gradtrace.instruments.tracin.selector import VALUE_HEADS, countable
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import layout_of, rows_of, sequences
from gradtrace.integrations.verl.refusals import check_hooks

WEIGHTS = "gradtrace_weights"
"""Field with the weight of every response token's log-prob."""


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of some responses, and the weight of every token's log-prob in a loss Σ w_t ℓ_t. All ranks have
    equally many; what fills up has no row and no weight."""

    rows: Tensor
    """long[b]: their rows in the batch; −1 to fill up."""
    prompts: list[list[int]]
    responses: list[list[int]]
    weights: list[Tensor]
    """float[T_r] each."""


@dataclass(frozen=True, eq=False)
class RankRequest:
    step: int
    train: Share
    validation: list[Share]
    """One for each part of the validation set."""
    preconditioner: str
    temperature: float
    measure: bool
    """Measure the training gradient as well."""


@dataclass(frozen=True, eq=False)
class RankAnswer:
    rows: Tensor
    """long[b]: of `RankRequest.train`, without what fills up."""
    scores: Tensor
    """float64[K, b]: for each part of the validation set."""
    measures: Measures


def score_on_worker(process: Any, request: RankRequest) -> RankAnswer:
    """Runs in a process of verl's worker group, which may hold several workers; one of them trains the actor."""
    workers = process.worker_dict.values()
    engine = next(worker.actor for worker in workers if getattr(worker, "actor", None) is not None).engine
    scorer = getattr(engine, "tracin_scorer", None)
    if scorer is None:
        scorer = engine.tracin_scorer = RankScorer(engine)
    return scorer.answer(request)


class RankScorer:
    """A `TracinHost` over verl's engine; every method is called by all ranks together."""

    def __init__(self, engine: Any) -> None:
        fused = engine.engine_config.use_fused_kernels
        problems = {
            "use_fused_kernels=true hides the output layer from the hooks; use false": fused,
            "a model that sees images is not supported": hasattr(engine.model_config.hf_config, "vision_config"),
        }
        check_hooks(engine, "tracin", problems)
        self.engine = engine
        with asked_by("gradtrace.tracin"):
            self.counted = countable(engine.module, "linear", VALUE_HEADS)
        self.ranks = Ranks(engine.get_data_parallel_group())
        self.meeting = Meeting()
        self._request: RankRequest | None = None
        self._ghost: GhostProduct | None = None
        self._open = ExitStack()

    def answer(self, request: RankRequest) -> RankAnswer:
        self.meeting.wait(f"step {request.step}, TracIn scores")
        self._request = request
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            try:
                scores, measures = score_parts(self, request.train, request.validation, request.measure)
            finally:
                self.engine.optimizer_zero_grad()
        real = request.train.rows >= 0
        return RankAnswer(request.train.rows[real], scores[:, real], measures)

    # ------------------------------------------------------------ the contract

    def gradient(self, responses: Share) -> tuple[Gradient, list[float]]:
        """The gradient of the sum over ranks (FSDP leaves their mean), where parameters count; `.grad` is empty
        afterwards."""
        losses = [value for own in self.ranks.gather(self._pass(responses)) for value in own]
        gradient = {
            name: parameter.grad.detach() * self.engine.get_data_parallel_size()
            for name, parameter in self.counted.items()
            if parameter.grad is not None
        }
        self.engine.optimizer_zero_grad()
        if not gradient:
            raise GradtraceError(
                "gradtrace.tracin: the backward pass left no gradient in any of the "
                f"{len(self.counted)} parameters that count, such as {next(iter(self.counted))}"
            )
        return gradient, losses

    def scores(self, responses: Share, direction: Gradient) -> Tensor:
        self._ghost = GhostProduct(self.engine.module, direction)
        try:
            self._pass(responses)
            self._open.close()
            return self._ghost.scores(len(responses.rows)).cpu()
        finally:
            self._open.close()
            self._ghost.close()
            self._ghost = None
            self.engine.optimizer_zero_grad()

    def preconditioned(self, gradient: Gradient) -> Gradient:
        assert self._request is not None
        if self._request.preconditioner == "none":
            return gradient
        return by_adam(self.engine.optimizer, self.counted, gradient, "gradtrace.tracin.preconditioner")

    # ------------------------------------------------------------ passes

    def _pass(self, responses: Share) -> list[float]:
        """Forward and backward of Σ w_t ℓ_t over the share of every rank; what each response of this one adds."""
        found: list[float] = []

        def objective(
            model_output: Any, data: Any, dp_group: Any = None, **ignored: Any
        ) -> tuple[Tensor, dict[str, Any]]:
            """A loss function for verl. The backward pass of this micro-batch comes right after it."""
            log_probs = no_padding_2_padding(model_output["log_probs"], data)
            losses = (log_probs * data[WEIGHTS].to_padded_tensor(0.0).to(log_probs)).sum(1)
            real = responses.rows[rows_of(data)] >= 0
            found.extend(losses.detach().cpu()[real].tolist())
            if self._ghost is not None:
                self._capture(self._ghost, data)
            return losses.sum(), {}

        self.engine.forward_backward_batch(self._data(responses), objective)
        return found

    def _capture(self, ghost: GhostProduct, data: Any) -> None:
        """Tell the hooks which response the positions of the coming backward pass belong to."""
        self._open.close()
        response, tokens = layout_of(self.engine, data)
        self._open.enter_context(ghost.capture(response=response, tokens=tokens))

    def _data(self, share: Share) -> Any:
        """The share as verl's trainer hands a mini-batch to a rank; `ROW` is the place in the share."""
        assert self._request is not None
        settings = self.engine.engine_config
        places = list(range(len(share.rows)))
        data = sequences(share.prompts, share.responses, places, **{WEIGHTS: share.weights})
        tu.assign_non_tensor(
            data,
            temperature=self._request.temperature,
            global_batch_size=len(share.rows) * self.ranks.size,
            use_remove_padding=settings.use_remove_padding,
            use_dynamic_bsz=settings.use_dynamic_bsz,
            max_token_len_per_gpu=settings.max_token_len_per_gpu,
            micro_batch_size_per_gpu=settings.micro_batch_size_per_gpu,
            use_fused_kernels=False,
            calculate_entropy=False,
        )
        return data


def count_real_responses(engine: Any, data: Any) -> None:
    """Let a mean over responses divide by those of all ranks that have a loss, without what fills up."""
    count = torch.tensor(sum(bool(mask.any()) for mask in data["loss_mask"].unbind()))
    count = count.to(torch.device(engine.device_mesh.device_type))
    dist.all_reduce(count, group=engine.get_data_parallel_group())
    tu.assign_non_tensor(data, global_batch_size=max(1, int(count)))
