"""A rank of verl as a host of instruments: weights, gradients and moments lie in shards, and passes are verl's own.

What a model in one process does in forward mode is done by central differences here: all ranks move their shards along
the direction together and run forward passes. A backward pass leaves gradients as shards, too. Beside FSDP's own
traffic only scalars travel, and the sequences of `Host.shared`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution import directional_derivative
from gradtrace.attribution.collectives import Ranks, forget_gathered, local
from gradtrace.attribution.geometry import ClippedGradients
from gradtrace.attribution.tangent import CAREFUL
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Around, Backward, Gradient, NextGradient, OptimizerStep, Pass, Rows, StepSize
from gradtrace.instruments.whole_model import WholeModel
from gradtrace.integrations.verl.assign import PADDING
from gradtrace.integrations.verl.cannot import engine_cannot
from gradtrace.integrations.verl.rank.full_precision import full_precision
from gradtrace.integrations.verl.rank.losses import GradtraceLoss, micro_batch_weights
from gradtrace.integrations.verl.rank.sequences import (
    OWN,
    PASS_SETTINGS,
    SharedSequences,
    by_row,
    dealt_sequences,
    dense,
    layout_of,
    masks_of,
    plain,
    rows_of,
    token_values,
)
from gradtrace.integrations.verl.tables import CORRECTION, SAMPLED
from gradtrace.policy.padding_row import padded_embeddings, padding_row_stays
from gradtrace.policy.policy import has_dropout
from gradtrace.rollout.sampler import evaluation_mode

FIELDS = {
    "advantages": "advantages",
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
    "sampler_log_probs": SAMPLED,
    "loss_weights": CORRECTION,
}
"""Columns of a `RolloutBatch` → verl's fields."""


@dataclass(frozen=True, eq=False)
class Given:
    """`Rows.native`: sequences of this rank, as verl's trainer hands them to it."""

    data: Any
    trained: bool
    """The loss of the coming step is of them; else their tokens have no weight in it."""


class RankHost(WholeModel):
    """A `contract.Host` over verl's engine; every method is called by all ranks together."""

    is_exact = False
    step_size: StepSize | None = None

    def __init__(self, engine: Any, loss: GradtraceLoss) -> None:
        super().__init__(engine.module, Ranks(engine.get_data_parallel_group()))
        self.engine = engine
        self.loss = loss
        self.optimizer = engine.optimizer
        self.loss_traits = loss.training_pass
        self.temperature = loss.temperature
        self.grad_clip = float(engine.optimizer_config.clip_grad)
        self.cannot: Mapping[str, str] = engine_cannot(engine)
        self.report: Callable[[str], None] = partial(print, "gradtrace:", flush=True)
        self._data: Any = None
        self._update: OptimizerStep | None = None
        self._kept: list[tuple[dict[str, Tensor], Any]] = []
        """What training's passes of the coming step have computed: the model's output, and the micro-batch."""

    def train_on(self, data: Any, update: OptimizerStep | None) -> None:
        """The passes of this optimizer step, over verl's `data` of its mini-batch, come next; None: no update is under
        way."""
        self._data, self._update, self._kept = data, update, []

    # ------------------------------------------------------------ rows

    def own(self, update: OptimizerStep) -> Rows:
        rows = [row for row in rows_of(self._data).tolist() if row != PADDING]
        return self._rows(sorted(rows), Given(self._data, trained=True))

    def shared(self, update: OptimizerStep, ids: Tensor) -> Rows:
        native, own = SharedSequences(self.engine, self._data, ids.tolist(), self.ranks), self.own(update)
        masks = [native.sequences[row]["response_mask"].bool() for row in ids.tolist()]
        held = dict(zip(own.ids.tolist(), own.weights.tolist(), strict=True))
        weight = {row: value for part in self.ranks.gather(held) for row, value in part.items()}
        weights = torch.tensor([weight[row] for row in ids.tolist()], dtype=torch.float64)
        return Rows(ids, padded(masks), weights, lambda name: None, native, True)

    def dealt(self, batch: RolloutBatch, apart: bool = False, entropies: bool = False, **columns: Tensor) -> Rows:
        settings = self._pass_settings()
        multiple = 1 if settings.get("use_dynamic_bsz", True) else int(settings["micro_batch_size_per_gpu"])
        data = dealt_sequences(batch, self.ranks.size, self.ranks.place, multiple, columns)
        tu.assign_non_tensor(data, calculate_entropy=entropies, global_batch_size=len(batch), **settings)
        rows = sorted(row for row in rows_of(data).tolist() if row != PADDING)
        return self._rows(rows, Given(data, trained=False))

    def _pass_settings(self) -> dict[str, Any]:
        """How passes over a batch of our own are run: as those of the update, where one is under way."""
        if self._data is not None:
            return {key: plain(self._data, key) for key in PASS_SETTINGS if key in self._data}
        settings = self.engine.engine_config
        named = (name for name in PASS_SETTINGS if name not in ("temperature", "use_fused_kernels", "pad_mode"))
        return {"temperature": self.temperature, "use_fused_kernels": False} | {
            name: getattr(settings, name) for name in named
        }

    def _rows(self, rows: list[int], given: Given) -> Rows:
        place = {row: index for index, row in enumerate(rows_of(given.data).tolist())}
        masks = masks_of(given.data)

        def column(name: str) -> Tensor | None:
            field = field_of(given.data, name)
            if field is None:
                return None
            width = max((len(masks[row]) for row in rows), default=0)
            parts = given.data[field].unbind()
            values = [torch.nn.functional.pad(parts[place[row]], (0, width - len(masks[row]))) for row in rows]
            return torch.stack(values) if values else torch.zeros(0, width)

        weights = torch.zeros(len(rows), dtype=torch.float64)
        if given.trained:
            self._count_tokens(given.data)
            of_data = micro_batch_weights(given.data, self.loss.actor).double() / self.ranks.size
            weights = of_data[[place[row] for row in rows]]
        return Rows(torch.tensor(rows, dtype=torch.long), padded([masks[r] for r in rows]), weights, column, given)

    def _count_tokens(self, data: Any) -> None:
        """What verl counts inside of its first pass over a mini-batch, which may be still to come."""
        if "batch_num_tokens" not in data:
            tokens = sum(self.ranks.gather(int(sum(mask.sum() for mask in data["loss_mask"].unbind()))))
            tu.assign_non_tensor(data, batch_num_tokens=tokens, dp_size=self.ranks.size)

    # ------------------------------------------------------------ passes

    def values(self, rows: Rows, of: Callable[[Pass], Tensor], as_kept: bool = False) -> Tensor:
        if isinstance(rows.native, SharedSequences):
            return rows.native.run(rows.ids.tolist(), lambda output, data: of(self._pass(output, data, rows)))
        given: Given = rows.native
        found = token_values(self.engine, given.data, lambda output, data: of(self._pass(output, data, rows)))
        nothing = next(iter(found.values()))[..., :0]
        return torch.cat([nothing, *(found[row] for row in rows.ids.tolist())], dim=-1)

    @contextmanager
    def keep(self, backward: Backward) -> Iterator[None]:
        if self.engine._autocast_dtype != torch.float32 or has_dropout(self.model):
            yield
            return
        self.loss.see = self._keep
        try:
            yield
        finally:
            self.loss.see = None

    def _keep(self, model_output: Any, data: Any) -> None:
        known = {name: model_output.get(name, None) for name in ("log_probs", "entropy")}
        self._kept.append(({name: values.detach() for name, values in known.items() if values is not None}, data))

    @torch.no_grad()
    def kept_values(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Tensor:
        kept = {row for _, data in self._kept for row in rows_of(data).tolist()}
        if not self._kept or not kept >= set(rows.ids.tolist()):
            return self.values(rows, of)
        found: dict[int, Tensor] = {}
        for output, data in self._kept:
            found.update(by_row(of(self._pass(output, data, rows)), data))
        nothing = next(iter(found.values()))[..., :0]
        return torch.cat([nothing, *(found[row] for row in rows.ids.tolist())], dim=-1)

    def noted_probabilities(self, rows: Rows, places: Sequence[int]) -> AbstractContextManager[None]:
        """verl's engine returns log-probs, and no logits."""
        return nullcontext()

    def gradient(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Gradient:
        size = self.ranks.size  # FSDP takes the mean over ranks
        with self._backward_passes(rows, lambda one: size * of(one)):
            return {name: p.grad for name, p in self.engine.module.named_parameters() if p.grad is not None}

    def listen(self, rows: Rows, of: Callable[[Pass], Tensor], around: Around, apart: bool = True) -> None:
        with self._backward_passes(rows, of, lambda micro: around(self.backward(micro, rows))):
            pass

    @contextmanager
    def _backward_passes(
        self,
        rows: Rows,
        of: Callable[[Pass], Tensor],
        around: Callable[[Any], AbstractContextManager[Any]] | None = None,
    ) -> Iterator[None]:
        """Inside, `.grad` holds what backward passes of `of` leave there; afterwards what it held before."""

        def objective(model_output: Any, data: Any, **ignored: Any) -> tuple[Tensor, dict[str, Any]]:
            return of(self._pass(model_output, data, rows)).sum(), {}

        parameters = list(self.engine.module.parameters())
        kept = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            native = rows.native
            data = native.data(rows.ids.tolist()) if isinstance(native, SharedSequences) else native.data
            with self._recomputing(), self.engine.around_micro_batches(around):
                self.engine.plain_passes(data, objective, forward_only=False)
            yield
        finally:
            for p, gradient in zip(parameters, kept, strict=True):
                p.grad = gradient

    def backward(self, micro_batch: Any, rows: Rows | None = None) -> Backward:
        """Describe a pass over this micro-batch to observers: one of training, or of `listen` over `rows`."""
        ids = rows_of(micro_batch) if rows is None else only(rows_of(micro_batch), rows.ids)
        update = self._update or OptimizerStep(0, 0, 0, 0, ids)
        response, tokens = layout_of(self.engine, micro_batch, ids)
        weights = torch.zeros(len(ids))
        if rows is None:
            weights = micro_batch_weights(micro_batch, self.loss.actor)
        return Backward(update, update.number, ids, weights, response, tokens)

    def _pass(self, model_output: Any, data: Any, rows: Rows) -> Pass:
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        ids = rows_of(data)
        if isinstance(rows.native, Given):
            ids = only(ids, rows.ids)
        mask = dense(data, "response_mask", log_probs).bool() & (ids >= 0).to(log_probs.device)[:, None]
        entropies = model_output.get("entropy", None)
        if entropies is not None:
            entropies = torch.where(mask, no_padding_2_padding(entropies, data), 0.0)
        log_probs = torch.where(mask, log_probs, 0.0)
        weight = dict(zip(rows.ids.tolist(), rows.weights.tolist(), strict=True))
        weights = torch.tensor([weight.get(row, 0.0) for row in ids.tolist()], dtype=torch.float64)

        def column(name: str) -> Tensor | None:
            field = field_of(data, name)
            return None if field is None else dense(data, field, log_probs)

        return Pass(
            rows=ids,
            mask=mask,
            weights=weights.to(log_probs.device),
            log_probs=log_probs,
            entropies=entropies,
            column=column,
            policy_terms=lambda given, old: self.loss.policy_terms(given, old, entropies, data),
            terms=lambda: self.loss.token_losses(log_probs, entropies, data),
        )

    # ------------------------------------------------------------ derivatives

    def derivative(
        self, run: Callable[[], Tensor], direction: Mapping[str, Tensor], step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        scale = step if rate is None else CAREFUL * step
        return directional_derivative(
            self.model, run, direction, "finite_difference", ranks=self.ranks, rate=rate, step_scale=scale
        )

    def next_gradient(self) -> NextGradient | None:
        gradient = ClippedGradients(self.model, self.grad_clip)
        return NextGradient(gradient, gradient.factor)

    def is_finite(self) -> bool:
        """Whether the gradient of all ranks is: verl makes no step otherwise."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return math.isfinite(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def padding_held(self) -> AbstractContextManager[None]:
        return padding_row_stays(self.model, self._padding_rows())

    def _padding_rows(self) -> list[Tensor]:
        """[D] of each padded embedding, from the rank that has it."""
        rows = []
        for module in padded_embeddings(self.model):
            weight: Any = module.weight
            own, place = local(weight.detach()), int(module.padding_idx or 0)
            if isinstance(weight, DTensor):
                _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
                place -= offsets[0]
            found = self.ranks.gather(own[place].clone().cpu() if 0 <= place < len(own) else None)
            rows.append(next(row for row in found if row is not None))
        return rows

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Training does not notice what happens in here: modes, random numbers and gathered weights are put back."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), evaluation_mode(self.model):
            forget_gathered(self.model)
            try:
                with full_precision(self.engine):
                    yield
            finally:
                forget_gathered(self.model)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """transformers recomputes activations in training mode only, and a backward pass needs the memory."""
        if self.model.training or not getattr(self.model, "is_gradient_checkpointing", False):
            yield
            return
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()


def only(ids: Tensor, wanted: Tensor) -> Tensor:
    """The ids, with −1 for those that are not wanted."""
    return torch.where(torch.isin(ids, wanted), ids, PADDING)


def padded(masks: list[Tensor]) -> Tensor:
    """bool[r, T] from masks of different lengths."""
    return torch.nn.utils.rnn.pad_sequence(masks, batch_first=True) if masks else torch.zeros(0, 0, dtype=torch.bool)


def field_of(data: Any, name: str) -> str | None:
    """verl's field, or ours, with this column; None if there is none."""
    return next((field for field in (f"{OWN}{name}", FIELDS.get(name, name)) if field in data), None)
