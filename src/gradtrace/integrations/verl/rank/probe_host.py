"""Passes of the entropy probe and of blame over verl's engine, where weights, gradients and moments lie in shards.

What a model in one process does in forward mode is done by central differences here: all ranks move their shards along
the direction together and run forward passes. A backward pass over E leaves the gradient of entropy as shards, too.
Only scalars travel beside FSDP's own traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution import directional_derivative
from gradtrace.attribution.collectives import Ranks, forget_gathered, local
from gradtrace.attribution.tangent import CAREFUL
from gradtrace.instruments.entropy_probe.passes import Pass, Progress, TokenBatch
from gradtrace.instruments.host import Gradient
from gradtrace.instruments.padding_row import padded_embeddings, padding_row_stays
from gradtrace.integrations.verl.dealing import PADDING, deal
from gradtrace.integrations.verl.rank.full_precision import full_precision
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, micro_batch_weights
from gradtrace.integrations.verl.rank.sequences import PASS_SETTINGS, plain, rows_of, sequences
from gradtrace.integrations.verl.rank.shared import Values, token_values
from gradtrace.integrations.verl.told import ProbeInputs
from gradtrace.rollout.sampler import evaluation_mode


@dataclass(frozen=True, eq=False)
class EngineBatch(TokenBatch):
    """This rank's sequences of E or of U; one pass of the engine over all of them, which cuts it itself."""

    data: Any
    """The sequences as verl has them, with those that only fill up."""
    rows: list[int]
    """Places of the R sequences in E, or their rows in the step's batch, ascending."""

    def by_row(self, values: Tensor) -> dict[int, Tensor]:
        """Numbers per token [..., N] → row → [..., t]."""
        return dict(zip(self.rows, values.split(self.lengths.tolist(), dim=-1), strict=True))


class EngineProbeHost:
    """A `ProbeHost` over verl's engine; every method is called by all ranks together."""

    is_exact = False

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        self.engine = engine
        self.loss = loss
        self.ranks = Ranks(engine.get_data_parallel_group())

    # ------------------------------------------------------------ the contract

    def still(self) -> AbstractContextManager[None]:
        """`RankProbe` stands `aside` for the whole of a probe already."""
        return nullcontext()

    def derivative(
        self, run: Callable[[], Tensor], direction: Mapping[str, Tensor], step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        usual = step if rate is None else CAREFUL * step
        return directional_derivative(
            self.engine.module, run, direction, "finite_difference", ranks=self.ranks, rate=rate, step_scale=usual
        )

    def entropy_gradient(self, batch: TokenBatch, weights: Tensor, progress: Progress | None = None) -> Gradient:
        assert isinstance(batch, EngineBatch)
        weight_of = dict(zip(batch.rows, weights.tolist(), strict=True))
        scale = self.engine.get_data_parallel_size()  # FSDP takes the mean over ranks

        def objective(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
            log_probs, entropies = log_probs_and_entropies(model_output, data)
            rows = rows_of(data).tolist()
            own = log_probs.new_tensor([weight_of.get(row, 0.0) for row in rows])[:, None]
            lengths = data["responses"].offsets().diff()
            real = log_probs.new_tensor([float(row != PADDING) for row in rows])[:, None]
            mask = real * (torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None])
            return scale * (mask * (entropies + own * log_probs)).sum(), {}

        parameters = dict(self.engine.module.named_parameters())
        kept = {name: p.grad for name, p in parameters.items()}
        try:
            for p in parameters.values():
                p.grad = None
            with self._recomputing():
                self.engine.plain_passes(batch.data, objective, forward_only=False)
            return {name: p.grad for name, p in parameters.items() if p.grad is not None}
        finally:
            for name, p in parameters.items():
                p.grad = kept[name]

    def padding_held(self) -> AbstractContextManager[None]:
        return padding_row_stays(self.engine.module, self._padding_rows())

    def _padding_rows(self) -> list[Tensor]:
        """[D] of each padded embedding, from the rank that has it."""
        rows = []
        for module in padded_embeddings(self.engine.module):
            weight: Any = module.weight
            own, place = local(weight.detach()), int(module.padding_idx or 0)
            if isinstance(weight, DTensor):
                _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
                place -= offsets[0]
            found = self.ranks.gather(own[place].clone().cpu() if 0 <= place < len(own) else None)
            rows.append(next(row for row in found if row is not None))
        return rows

    # ------------------------------------------------------------ batches

    def evaluation(self, inputs: ProbeInputs, update: Any) -> EngineBatch:
        """This rank's part of E, run as the mini-batch `update` is."""
        settings = {key: plain(update, key) for key in PASS_SETTINGS if key in update}
        multiple = 1 if settings.get("use_dynamic_bsz", True) else int(settings["micro_batch_size_per_gpu"])
        lengths = [len(p) + len(r) for p, r in zip(inputs.prompts, inputs.responses, strict=True)]
        place = dist.get_rank(self.engine.get_data_parallel_group())
        rows = deal(lengths, self.ranks.size, multiple)[place]
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        chosen = [shortest if row == PADDING else row for row in rows]
        data = sequences([inputs.prompts[row] for row in chosen], [inputs.responses[row] for row in chosen], rows)
        tu.assign_non_tensor(data, calculate_entropy=True, global_batch_size=len(lengths), **settings)
        return self._batch(data, log_probs_and_entropies)

    def update(self, data: Any, with_log_probs: bool = False) -> EngineBatch:
        """This rank's part of U: its tokens' own terms of the loss, which sum to it over all ranks; [2, N] with their
        log-probs."""
        size = self.engine.get_data_parallel_size()

        def terms(model_output: Any, micro: Any) -> Tensor:
            losses = self.loss.token_losses(model_output, micro)
            losses = losses * (micro_batch_weights(micro, self.loss.actor) / size).to(losses)[:, None]
            if not with_log_probs:
                return losses
            return torch.stack([losses, no_padding_2_padding(model_output["log_probs"], micro)])

        return self._batch(data, terms)

    def _batch(self, data: Any, values_of: Values) -> EngineBatch:
        counts = [int(mask.sum()) for mask in data["response_mask"].unbind()]
        lengths = dict(zip(rows_of(data).tolist(), counts, strict=True))
        rows = sorted(row for row in lengths if row != PADDING)
        one = Pass(torch.arange(len(rows)), lambda: self._run(data, values_of))
        return EngineBatch(
            lengths=torch.tensor([lengths[row] for row in rows], dtype=torch.long),
            group=torch.tensor(rows, dtype=torch.long),
            passes=lambda: [one],
            data=data,
            rows=rows,
        )

    # ------------------------------------------------------------ passes

    def _run(self, data: Any, values_of: Values) -> Tensor:
        """float64[..., N]: a forward pass over this rank's `data`, rows in order. Every rank runs equally many."""
        found = token_values(self.engine, data, values_of)
        nothing = next(iter(found.values()))[..., :0]
        return torch.cat([nothing, *(found[row] for row in sorted(found) if row != PADDING)], dim=-1)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Training does not notice what happens in here: modes, random numbers and gathered weights are put back."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), evaluation_mode(self.engine.module):
            forget_gathered(self.engine.module)
            try:
                with full_precision(self.engine):
                    yield
            finally:
                forget_gathered(self.engine.module)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """transformers recomputes activations in training mode only, and a backward pass needs the memory."""
        module = self.engine.module
        if not getattr(module, "is_gradient_checkpointing", False):
            yield
            return
        module.train()
        try:
            yield
        finally:
            module.eval()


def log_probs_and_entropies(model_output: Any, data: Any) -> Tensor:
    """[2, b, T]: log-probs and entropies of the response tokens."""
    return torch.stack([no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy")])
