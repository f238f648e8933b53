"""The entropy probe on the ranks of a verl job: ΔH of a training step's first optimizer step, predicted and measured.

Weights, gradients and the optimizer's moments lie in shards. What the embedded loop does in forward mode is done by
central differences here: all ranks move their shards along the update together and run forward passes. Its backward
pass over E leaves the gradient of entropy as shards, too. Only scalars travel beside FSDP's own traffic.

E comes from the driver and is dealt to the ranks; of U each rank has the responses it trains on. Each rank writes what
it knows to a part file, which the driver joins (`probe_record`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution.collectives import Ranks, forget_gathered
from gradtrace.attribution.tangent import Shards
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.padding_row import (
    padded_embeddings,
    padding_row_counts,
    padding_row_stays,
)
from gradtrace.instruments.entropy_probe.update_direction import ParameterUpdate, parameter_updates
from gradtrace.integrations.verl.dealing import PADDING, deal
from gradtrace.integrations.verl.probe_parts import PROBE, ProbeInputs, ProbePart, write_probe_part
from gradtrace.integrations.verl.rank.full_precision import full_precision
from gradtrace.integrations.verl.rank.influence import plain, rows_of
from gradtrace.integrations.verl.rank.losses import GradtraceLoss
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.rank.sequences import sequences, token_weight
from gradtrace.rollout.sampler import evaluation_mode

PASS_SETTINGS = (
    *("temperature", "use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu", "use_fused_kernels"),
    *("micro_batch_size_per_gpu", "pad_mode"),
)
"""How verl cuts and runs micro-batches; E is run as U is."""

Values = Callable[[Any, Any], Tensor]
"""(model output, micro-batch of b sequences) → [..., b, T]: numbers per response token."""


@dataclass(eq=False)
class _Step:
    """What is known between the prediction and the measurement."""

    inputs: ProbeInputs
    data: Any
    """U: this rank's part of the mini-batch."""
    part: ProbePart = field(default_factory=ProbePart)
    evaluation: Any = None


class RankProbe:
    """Lives in the engine of a rank: `begin` with a mini-batch, `predict` and `measure` around its optimizer step."""

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        self.engine = engine
        self.loss = loss
        self.rank = dist.get_rank()
        group = engine.get_data_parallel_group()
        self.ranks = Ranks(group if dist.get_world_size(group) > 1 else None)
        self.parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.meeting = Meeting()
        self.last_step = -1
        print(
            f"gradtrace: entropy probe active on rank {self.rank} of {dist.get_world_size()}: "
            f"{len(self.parameters)} parameters",
            flush=True,
        )

    def begin(self, data: Any) -> bool:
        """True if the optimizer step of this mini-batch is probed: the first of a step that the driver has chosen."""
        inputs: ProbeInputs | None = plain(data, PROBE)
        if inputs is None or inputs.step == self.last_step:
            return False
        self.last_step = inputs.step
        self.step = _Step(inputs, data)
        return True

    # ------------------------------------------------------------ before the optimizer step

    def predict(self) -> None:
        """All ranks together. The gradient is complete and not clipped yet; it is the same bits afterwards."""
        begin = time.perf_counter()
        step = self.step
        self.meeting.wait(f"step {step.inputs.step}, entropy probe")
        try:
            with self._aside():
                gradient, clip_factor = self._clipped_gradient()
                step.evaluation = self._deal(step.inputs, step.data)
                step.part.base = self._evaluation_tokens(step.evaluation)
                self._predict(step, gradient)
                self._shares(step, gradient, clip_factor)
        except GradtraceError as error:  # of what all ranks see alike; the run goes on
            step.part.failure = str(error)
        step.part.rate = float(self.engine.optimizer.param_groups[0]["lr"])
        step.part.seconds = time.perf_counter() - begin

    def _clipped_gradient(self) -> tuple[dict[str, Tensor], float]:
        """What the optimizer will see, as shards, and what clipping multiplies by."""
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm: Any = torch.nn.utils.get_total_norm(list(found.values()))
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(norm):
            raise GradtraceError("the gradient is not finite: verl skips this update")
        factor = min(1.0, float(self.engine.optimizer_config.clip_grad) / (norm + 1e-6))  # as clip_grad_norm_
        return {name: gradient * factor for name, gradient in found.items()}, factor

    def _predict(self, step: _Step, gradient: dict[str, Tensor]) -> None:
        """The change of every E token to first order, along the update that the optimizer is about to make."""
        direction = {name: part.whole(gradient[name]) for name, part in self._updates(gradient)}
        derivative = self._shards(direction).derivative(
            lambda: flat(self._evaluation_tokens(step.evaluation), (2, 0))
        )
        lengths = [tokens.shape[1] for _, tokens in sorted(step.part.base.items())]
        pieces = derivative.view(2, -1).split(lengths, dim=1)
        step.part.derivative = dict(zip(sorted(step.part.base), pieces, strict=True))

    def _shares(self, step: _Step, gradient: dict[str, Tensor], clip_factor: float) -> None:
        """Who does it: one backward pass over E, and forward passes over U at two places."""
        target = self._entropy_gradient(step)
        direction: dict[str, Tensor] = {}
        sums = [0.0, 0.0, 0.0]
        for name, part in self._updates(gradient):
            if name not in target:
                continue
            direction[name] = -clip_factor * part.factor * target[name]
            for place, of in enumerate((part.momentum, part.decay, part.whole(gradient[name]))):
                sums[place] += product(target[name], of)
        gathered = self.ranks.gather(sums)
        step.part.momentum, step.part.decay, step.part.legacy = (
            sum(own[i] for own in gathered) for i in range(3)
        )
        del target
        with padding_row_stays(self.engine.module, self._padding_rows()):
            derivative = self._shards(direction).derivative(lambda: flat(self._terms(step.data), (0,)))
        rows = sorted(row for row in rows_of(step.data).tolist() if row >= 0)
        lengths = {
            row: int(length)
            for row, length in zip(
                rows_of(step.data).tolist(), step.data["responses"].offsets().diff().tolist(), strict=True
            )
        }
        pieces = derivative.split([lengths[row] for row in rows])
        step.part.shares = dict(zip(rows, pieces, strict=True))

    def _entropy_gradient(self, step: _Step) -> dict[str, Tensor]:
        """X̄ = ∇[Σ H_k + Σ (h_i − H̄T_i) ℓ_k] / ΣT over all of E, as shards; the weights held fixed."""
        base = step.part.base
        own = (
            sum(float(tokens[1].sum()) for tokens in base.values()),
            sum(t.shape[1] for t in base.values()),
        )
        h, total = (float(sum(column)) for column in zip(*self.ranks.gather(own), strict=True))
        weights = {row: float(t[1].sum()) - h / total * t.shape[1] for row, t in base.items()}
        scale = self.engine.get_data_parallel_size() / total  # FSDP takes the mean over ranks

        def surrogate(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
            log_probs, entropies = evaluation_values(model_output, data)
            rows = rows_of(data).tolist()
            weight = log_probs.new_tensor([weights.get(row, 0.0) for row in rows])[:, None]
            counts = log_probs.new_tensor([float(row >= 0) for row in rows])[:, None] * mask_of(data)
            return scale * (counts * (entropies + weight * log_probs)).sum(), {}

        kept = {name: p.grad for name, p in self.parameters.items()}
        try:
            for p in self.parameters.values():
                p.grad = None
            with padding_row_counts(self.engine.module), self._recomputing():
                self.engine.plain_passes(step.evaluation, surrogate, forward_only=False)
            return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        finally:
            for name, p in self.parameters.items():
                p.grad = kept[name]

    # ------------------------------------------------------------ after the optimizer step

    def measure(self) -> None:
        """The same E at the weights that the optimizer has really made; then this rank's part is complete."""
        step = self.step
        begin = time.perf_counter()
        if not step.part.failure:
            with self._aside():
                step.part.after = self._evaluation_tokens(step.evaluation)
        step.part.seconds += time.perf_counter() - begin
        write_probe_part(Path(step.inputs.parts_dir), step.inputs.step, self.rank, step.part)
        del self.step

    # ------------------------------------------------------------ passes

    @contextmanager
    def _aside(self) -> Iterator[None]:
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

    def _run(self, data: Any, values_of: Values) -> dict[int, Tensor]:
        """Row → float64[..., t], a forward pass over this rank's `data`. Every rank runs equally many."""
        found: dict[int, Tensor] = {}

        def keep(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
            values = values_of(model_output, data)
            lengths = data["responses"].offsets().diff().tolist()
            for place, row in enumerate(rows_of(data).tolist()):
                if row >= 0:
                    found[row] = values[..., place, : lengths[place]].detach().double().cpu()
            return values.sum(), {}

        self.engine.plain_passes(data, keep, forward_only=True)
        return found

    def _evaluation_tokens(self, data: Any) -> dict[int, Tensor]:
        """Sequence of E → float64[2, t]: log-probs and entropies at the current weights."""
        return self._run(data, evaluation_values)

    def _terms(self, data: Any) -> dict[int, Tensor]:
        """Row of U → float64[t]: its tokens' own terms of the loss; over all ranks they sum to it."""
        size = self.engine.get_data_parallel_size()

        def values(model_output: Any, micro: Any) -> Tensor:
            losses = self.loss.token_losses(model_output, micro)
            return losses * (token_weight(self.loss.actor, micro) / size).to(losses)[:, None]

        return self._run(data, values)

    def _deal(self, inputs: ProbeInputs, update: Any) -> Any:
        """This rank's sequences of E as verl's data; `ROW` is the place in E, −1 for what only fills up."""
        settings = {key: plain(update, key) for key in PASS_SETTINGS if key in update}
        multiple = 1 if settings.get("use_dynamic_bsz", True) else int(settings["micro_batch_size_per_gpu"])
        lengths = [len(p) + len(r) for p, r in zip(inputs.prompts, inputs.responses, strict=True)]
        place = dist.get_rank(self.engine.get_data_parallel_group())
        rows = deal(lengths, self.ranks.size, multiple)[place]
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        chosen = [shortest if row == PADDING else row for row in rows]
        data = sequences(
            [inputs.prompts[row] for row in chosen], [inputs.responses[row] for row in chosen], rows
        )
        tu.assign_non_tensor(data, calculate_entropy=True, global_batch_size=len(lengths), **settings)
        return data

    # ------------------------------------------------------------ shards

    def _updates(self, gradient: dict[str, Tensor]) -> Iterator[tuple[str, ParameterUpdate]]:
        # verl's optimizer holds frozen parameters, too.
        everything = dict(self.engine.module.named_parameters())
        return parameter_updates(self.engine.optimizer, everything, gradient)

    def _padding_rows(self) -> list[Tensor]:
        """[D] each, from the rank that has it."""
        rows = []
        for module in padded_embeddings(self.engine.module):
            weight: Any = module.weight
            own, place = local(weight.detach()), int(module.padding_idx or 0)
            if isinstance(weight, DTensor):
                _, offsets = compute_local_shape_and_global_offset(
                    weight.shape, weight.device_mesh, weight.placements
                )
                place -= offsets[0]
            found = self.ranks.gather(own[place].clone().cpu() if 0 <= place < len(own) else None)
            rows.append(next(row for row in found if row is not None))
        return rows

    def _shards(self, direction: dict[str, Tensor]) -> Shards:
        parts: list[tuple[Tensor, Tensor]] = [
            (self.parameters[name], part) for name, part in direction.items()
        ]
        return Shards(self.engine.module, parts, self.ranks)


def evaluation_values(model_output: Any, data: Any) -> Tensor:
    """[2, b, T]: log-probs and entropies of the response tokens."""
    return torch.stack([no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy")])


def mask_of(data: Any) -> Tensor:
    """bool[b, T]."""
    lengths = data["responses"].offsets().diff()
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


def flat(found: dict[int, Tensor], empty: tuple[int, ...]) -> Tensor:
    """All rows behind one another, in their order: [..., N], then flattened."""
    parts = [torch.empty(empty, dtype=torch.float64), *(found[row] for row in sorted(found))]
    return torch.cat(parts, dim=-1).flatten()


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def product(left: Tensor, right: Tensor | float) -> float:
    """This rank's part of an inner product: summed over all ranks, every element counts once."""
    copies = dist.get_world_size()
    if isinstance(left, DTensor):
        mesh = left.device_mesh
        copies = dist.get_world_size() // mesh.size()
        for dim, placement in enumerate(left.placements):
            copies *= mesh.size(dim) if isinstance(placement, Replicate) else 1
    values = local(left).double() * (local(right) if isinstance(right, Tensor) else right)
    return float(values.sum()) / copies
