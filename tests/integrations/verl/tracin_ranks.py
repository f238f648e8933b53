"""TracIn scores on verl's engine, as ranks compute them: run by engine_worker.py, checked by tracin_checks.py."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Table, TrainingRun
from gradtrace.instruments.record import Record
from gradtrace.instruments.tracin import RECORD, TRACIN, TracinConfig
from gradtrace.instruments.tracin.columns import TracinStep
from gradtrace.instruments.tracin.reporter import TracinReporter
from gradtrace.instruments.tracin.validation import ValidationSet
from gradtrace.tasks.base import Prompt
from tests.integrations.verl import harness

LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3},
    "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24},
    "padded": {
        "packed": False,
        "checkpointing": True,
        "param_offload": True,
        "optimizer_offload": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
    },
    "bf16": {
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 40,
    },
    "lora": {"lora_rank": 4, "use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
}
AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}


class Run(TrainingRun):
    """What the reporter asks: `answer` makes the scores."""

    seed = 0
    tokenizer = None
    task = None

    def __init__(self, answer: Callable[[Any], Table], weigh: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.answer = answer
        self.weigh = weigh
        self.cannot = {"more_rollouts": "there are none"}
        self.estimator = advantage("grpo")
        self.report = print

    def token_weights(self, mask: torch.Tensor) -> torch.Tensor:
        return self.weigh(mask)

    def held_out(self, count: int, key: str, files: Any = (), unreported: bool = False) -> list[Prompt]:
        return [Prompt([1], {})] * count

    def ask(self, name: str, question: Any) -> Table:
        assert name == TRACIN
        return self.answer(question)


def planned(run: Run, settings: TracinConfig, batch: RolloutBatch, validation: RolloutBatch, step: int) -> TracinStep:
    """What the reporter makes of a step against a validation set that was sampled long ago."""
    reporter = TracinReporter(Record(RECORD, settings), run)
    reporter.source.current = ValidationSet(validation, torch.arange(len(validation.prompts)), step)
    reporter.plan(batch, step, None)
    assert reporter._step is not None
    return reporter._step


def second_moments(name: str, shape: torch.Size) -> torch.Tensor:
    """The same for a parameter wherever it is."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(shape, generator=generator) * 1e-4


def settings(step: int) -> TracinConfig:
    """The first step is scored against parts of the validation set, the second at once."""
    return TracinConfig(enable=True, diagnose_every=1 if step == 1 else 0, selection="drop_lowest")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's part of everything that training changes."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return own_part(tensor).detach().clone()

    found = {name: own(parameter) for name, parameter in engine.module.named_parameters()}
    for index, state in enumerate(engine.optimizer.state.values()):
        found |= {f"{index}.{key}": own(value) for key, value in state.items()}
    return found


def prepare(folder: Path) -> None:
    """A model with tied embeddings, a training and a validation batch."""
    harness.model_folder(folder / "tied_model", tie_word_embeddings=True)
    torch.save(harness.rollout(), folder / "tracin_train.pt")
    torch.save(harness.rollout(groups=5, n=3, seed=7), folder / "tracin_val.pt")


def layouts(world: int) -> list[str]:
    return list(LAYOUTS) if world == 2 else ["packed"]


def run(folder: Path) -> None:
    """FOLDER/tracin.WORLD.pt: layout → step → what was found; step 2 with moments in the optimizer."""
    world = dist.get_world_size()
    found: dict[str, Any] = {name: run_layout(folder, dict(LAYOUTS[name])) for name in layouts(world)}
    found["normalised"] = normalised(folder)
    if dist.get_rank() == 0:
        torch.save(found, folder / f"tracin.{world}.pt")


def normalised(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The gradient of a mini-batch: as it is, and when it is said to have twice as many responses, as one that a
    selection has filled up."""
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss

    rank, world = dist.get_rank(), dist.get_world_size()
    batch = torch.load(folder / "tracin_train.pt", weights_only=False)
    batch = batch.replace(old_log_probs=batch.sampler_log_probs)
    engine = harness.make_engine(str(folder / "tied_model"))
    found = []
    for sequences, selecting in ((8, False), (16, True)):
        data = harness.tensordict(batch, list(range(8))[rank::world], None, sequences)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            actor = harness.actor_config(loss_agg_mode="seq-mean-token-mean")
            engine.forward_backward_batch(data, GradtraceLoss(actor, selecting=selecting))
            found.append(
                {name: own_part(p.grad).clone() for name, p in engine.module.named_parameters() if p.grad is not None}
            )
    return found


def asked(steps: Any, question: Any) -> Table:
    """The joined answers of all ranks."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, steps.answer(TRACIN, question))
    return Table.joined(answers)


def run_layout(folder: Path, options: dict[str, Any]) -> dict[int, dict[str, Any]]:
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss, batch_weights

    batch, validation = (torch.load(folder / f"tracin_{name}.pt", weights_only=False) for name in ("train", "val"))
    engine = harness.make_engine(str(folder / "tied_model"), **options)
    found = {}
    for step, mode in zip((1, 2), AGGREGATIONS, strict=True):
        if step == 2:
            with engine.train_mode():
                pretend_history(engine)
        actor = harness.actor_config(
            loss_agg_mode=mode,
            use_dynamic_bsz=options["use_dynamic_bsz"],
            ppo_micro_batch_size_per_gpu=options.get("micro_batch_size_per_gpu", 1),
        )
        knobs, weigh = settings(step), partial(batch_weights, actor=actor)
        steps = engine.steps_of(GradtraceLoss(actor, instruments={TRACIN: knobs}))

        before = state_of(engine)
        result = planned(Run(partial(asked, steps), weigh), knobs, batch, validation, step)
        after = state_of(engine)
        measures = result.measures
        found[step] = {
            "scores": result.scores,
            "low": result.low,
            "kept": result.selected.kept,
            "val_loss": measures.val_loss,
            "extremes": [measures.val_loss_min, measures.val_loss_max, measures.weighed],
            "val_norms": measures.val_norms,
            "train_norm": measures.train_norm,
            "cosine": measures.cosine,
            "changed": [
                name for name, value in before.items() if name not in after or not torch.equal(after[name], value)
            ],
            "gradients": [name for name, p in engine.module.named_parameters() if p.grad is not None],
            "product": measures.cosine * (measures.train_norm or 0.0) * measures.val_norm,
        }
    return found


def pretend_history(engine: Any) -> None:
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = second_moments(name, parameter.shape)
        part = whole
        if isinstance(parameter, DTensor):
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        engine.optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": part,
        }
