"""TracIn scores on the ranks that hold the weights.

The validation gradient is what verl's own backward pass leaves in `.grad`: FSDP2 shards, which stay where they are.
Scores are ghost products in another backward pass, of the training responses' own losses: every layer gathers its part
of the validation gradient inside its hook and drops it again. No weight moves, so none has to be put back; it works
in bf16, with recomputation, offload, packed and dynamic batches, and for adapters.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from gradtrace.attribution import AttributionError, GhostProduct
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin.columns import layer_group
from gradtrace.instruments.tracin.selector import VALUE_HEADS, countable
from gradtrace.integrations.verl.rank.layout import response_layout
from gradtrace.integrations.verl.rank.process_group import Meeting
from gradtrace.integrations.verl.refusals import check_hooks

PLACE = "gradtrace_place"
WEIGHTS = "gradtrace_weights"
Gradient = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of some responses, and the weight of every token's log-prob in a loss Σ w_t ℓ_t. All ranks have
    equally many; what fills up has no row and no weight."""

    rows: Tensor
    """long[b]: their rows in the batch; −1 to fill up."""
    prompts: list[list[int]]
    responses: list[Tensor]
    """long[T_r] each."""
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
    val_loss: float
    val_norm: float
    val_norms: dict[str, float]
    """By layer group."""
    train_norm: float = 0.0
    direction_norm: float = 0.0
    cosine: float = 0.0


def score_on_worker(process: Any, request: RankRequest) -> RankAnswer:
    """Runs in a process of verl's worker group, which may hold several workers; one of them trains the actor."""
    workers = process.worker_dict.values()
    engine = next(worker.actor for worker in workers if getattr(worker, "actor", None) is not None).engine
    scorer = getattr(engine, "tracin_scorer", None)
    if scorer is None:
        scorer = engine.tracin_scorer = RankScorer(engine)
    return scorer.answer(request)


@dataclass(eq=False)
class RankScorer:
    engine: Any
    _open: ExitStack = field(default_factory=ExitStack)
    _ghost: GhostProduct | None = None

    def __post_init__(self) -> None:
        check_selection(self.engine)
        try:
            counted = countable(self.engine.module, "linear", VALUE_HEADS)
        except AttributionError as error:
            raise GradtraceError(f"gradtrace.tracin: {error}") from error
        self.counted: dict[str, torch.nn.Parameter] = counted
        self.ranks: int = self.engine.get_data_parallel_size()
        self.meeting = Meeting()

    def answer(self, request: RankRequest) -> RankAnswer:
        self.meeting.wait(f"step {request.step}, TracIn scores")
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            try:
                return self._answer(request)
            finally:
                self.engine.optimizer_zero_grad()

    def _answer(self, request: RankRequest) -> RankAnswer:
        total: Gradient = {}
        scores, loss, training = [], 0.0, {}
        for share in request.validation:
            loss += self._pass(share, request.temperature)
            part = self._take_gradient()
            total = {name: total[name] + value if name in total else value for name, value in part.items()}
            direction = self._preconditioned(part, request.preconditioner)
            scores.append(self._ghost_pass(request.train, direction, request.temperature))
            training = self._take_gradient()
        real = request.train.rows >= 0
        squares = self._products(total, total)
        norms: dict[str, float] = {}
        for name, square in squares.items():
            group = layer_group(name)
            norms[group] = (norms.get(group, 0.0) ** 2 + square) ** 0.5
        val_norm = sum(squares.values()) ** 0.5
        found = RankAnswer(
            request.train.rows[real], torch.stack(scores)[:, real], self._sum(loss), val_norm, norms
        )
        if not request.measure:
            return found
        train_norm = sum(self._products(training, training).values()) ** 0.5
        product = sum(self._products(training, total).values())
        direction = self._preconditioned(total, request.preconditioner)
        return RankAnswer(
            found.rows,
            found.scores,
            found.val_loss,
            val_norm,
            norms,
            train_norm,
            sum(self._products(direction, direction).values()) ** 0.5,
            product / max(train_norm * val_norm, 1e-300),
        )

    # ------------------------------------------------------------ passes

    def _pass(self, share: Share, temperature: float) -> float:
        """Forward and backward of Σ w_t ℓ_t over the share of every rank; its value on this one."""
        self._value = 0.0
        self.engine.forward_backward_batch(self._data(share, temperature), self._objective)
        return self._value

    def _objective(
        self, model_output: Any, data: Any, dp_group: Any = None, **ignored: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """A loss function for verl. The backward pass of this micro-batch comes right after it."""
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        weights = data[WEIGHTS].to_padded_tensor(0.0)
        value = (log_probs * weights.to(log_probs)).sum()
        self._value += float(value.detach())
        if self._ghost is not None:
            self._open.close()
            packed = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
            bucket = self.engine.pad_to_length_bucket if self.engine.pad_to_length else 0
            places = data[PLACE].reshape(-1).cpu()
            response, tokens = response_layout(data, places, packed, bucket)
            self._open.enter_context(self._ghost.capture(response=response, tokens=tokens))
        return value, {}

    def _ghost_pass(self, share: Share, direction: Gradient, temperature: float) -> Tensor:
        """float64[b]: ⟨direction, ∇loss⟩ of every response of this rank. Leaves the gradient of all in `.grad`."""
        self._ghost = GhostProduct(self.engine.module, direction)
        try:
            self._pass(share, temperature)
            self._open.close()
            return self._ghost.scores(len(share.rows)).cpu()
        finally:
            self._open.close()
            self._ghost.close()
            self._ghost = None

    def _data(self, share: Share, temperature: float) -> Any:
        """As verl's trainer hands a mini-batch to a rank."""
        settings = self.engine.engine_config
        prompts = [torch.tensor(prompt) for prompt in share.prompts]
        inputs = [torch.cat(parts) for parts in zip(prompts, share.responses, strict=True)]
        masks = nested([torch.ones(len(response), dtype=torch.long) for response in share.responses])
        data = tu.get_tensordict(
            {
                "prompts": nested(prompts),
                "responses": nested(share.responses),
                "input_ids": nested(inputs),
                "position_ids": nested([torch.arange(len(ids)) for ids in inputs]),
                "response_mask": masks,
                "loss_mask": masks,
                WEIGHTS: nested(share.weights),
                PLACE: torch.arange(len(share.rows)),
            }
        )
        tu.assign_non_tensor(
            data,
            temperature=temperature,
            global_batch_size=len(share.rows) * self.ranks,
            use_remove_padding=settings.use_remove_padding,
            use_dynamic_bsz=settings.use_dynamic_bsz,
            max_token_len_per_gpu=settings.max_token_len_per_gpu,
            micro_batch_size_per_gpu=settings.micro_batch_size_per_gpu,
            use_fused_kernels=False,
            calculate_entropy=False,
        )
        return data

    # ------------------------------------------------------------ gradients, as shards

    def _take_gradient(self) -> Gradient:
        """Of the sum over ranks (FSDP leaves their mean), of the parameters that count; `.grad` is empty afterwards."""
        gradient = {
            name: parameter.grad.detach() * self.ranks
            for name, parameter in self.counted.items()
            if parameter.grad is not None
        }
        self.engine.optimizer_zero_grad()
        if not gradient:
            raise GradtraceError(
                "gradtrace.tracin: the backward pass left no gradient in any of the "
                f"{len(self.counted)} parameters that count, such as {next(iter(self.counted))}"
            )
        return gradient

    def _preconditioned(self, gradient: Gradient, preconditioner: str) -> Gradient:
        """Divided by Adam's √v̂ + ε, from the optimizer's state before this step; shard by shard."""
        if preconditioner == "none":
            return gradient
        optimizer = self.engine.optimizer
        states = {name: optimizer.state.get(self.counted[name]) for name in gradient}
        known = {name: state for name, state in states.items() if state}
        if not known:  # before the first update there is nothing to go by
            return gradient
        if any("exp_avg_sq" not in state for state in known.values()):
            raise GradtraceError(
                f"gradtrace.tracin.preconditioner=adam needs Adam's moments, the optimizer is "
                f"{type(optimizer).__name__}: use preconditioner=none"
            )
        beta, epsilon = optimizer.defaults["betas"][1], optimizer.defaults["eps"]
        scaled = {}
        for name, state in known.items():  # the others have never had a gradient, and no update moves them
            second = state["exp_avg_sq"] / (1 - beta ** float(state["step"]))
            scaled[name] = gradient[name] / (second.sqrt() + epsilon)
        return scaled

    def _products(self, first: Gradient, second: Gradient) -> dict[str, float]:
        """⟨first, second⟩ of each parameter, over the shards of all ranks."""
        names = [name for name in first if name in second]
        local = [
            (own_part(first[name]).double() * own_part(second[name]).double()).sum() / copies(first[name])
            for name in names
        ]
        values = torch.stack(local)
        if self.ranks > 1:
            values = values.to(self._device)
            dist.all_reduce(values, group=self.engine.get_data_parallel_group())
        return dict(zip(names, values.tolist(), strict=True))

    def _sum(self, value: float) -> float:
        """Over ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        if self.ranks > 1:
            dist.all_reduce(total, group=self.engine.get_data_parallel_group())
        return float(total)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.engine.device_mesh.device_type)


def count_real_responses(engine: Any, data: Any) -> None:
    """What a mean over responses divides by: those of all ranks that have a loss, without what fills up."""
    count = torch.tensor(sum(bool(mask.any()) for mask in data["loss_mask"].unbind()))
    count = count.to(torch.device(engine.device_mesh.device_type))
    dist.all_reduce(count, group=engine.get_data_parallel_group())
    tu.assign_non_tensor(data, global_batch_size=max(1, int(count)))


def nested(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: Tensor) -> int:
    """How many ranks hold the same part: all of them, or those of other shards' replicas."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    sizes = [
        tensor.device_mesh.size(dim)
        for dim, placement in enumerate(tensor.placements)
        if not isinstance(placement, Shard)
    ]
    return int(torch.tensor(sizes).prod()) if sizes else 1


def check_selection(engine: Any) -> None:
    """What would give wrong scores is refused."""
    check_hooks(engine, "tracin")
    problems = {
        "use_fused_kernels=true hides the output layer from the hooks; use false": (
            engine.engine_config.use_fused_kernels
        ),
        "a model that sees images is not supported": hasattr(engine.model_config.hf_config, "vision_config"),
    }
    for problem, found in problems.items():
        if found:
            raise GradtraceError(f"gradtrace.tracin: {problem}.")
