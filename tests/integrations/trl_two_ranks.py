"""Runs of a GRPOTrainer that are the same on one process and on two: launched with torchrun, it makes all of them.

Completions come from a table instead of the model, so that one process and two train on the same batch; three groups of
four completions, of which the second lies on both processes.
"""

from __future__ import annotations

import gc
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from trl import GRPOTrainer

from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinConfig
from gradtrace.integrations.trl import attach, host
from tests.integrations.trl_runs import grpo_trainer, weights

VALIDATION = {"eval_dataset": Dataset.from_dict({"prompt": ["5+5=", "2*2+1=", "3+3="]})}
EXACT = InfluenceConfig(measure="all")
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"influence": EXACT, "mismatch_every": 1}),
    "not_measured": ({}, {"influence": InfluenceConfig(measure=0), "mismatch_every": 1}),
    "curvature": (
        {"loss_type": "grpo", "beta": 0.1},
        {"influence": InfluenceConfig.older(credit="both", projection_dim_factor=0)},
    ),
    # Which completions meet which optimizer step is drawn on each process: scores are equal where the weights stay.
    "several_steps": (
        {"steps_per_generation": 4, "max_steps": 4, "rows": 24, "num_generations": 8, "learning_rate": 0.0},
        {"influence": InfluenceConfig(hessian_mode="identity", credit="both", target="output_function")},
    ),
    "selection": (
        {"more": VALIDATION},
        {"influence": EXACT, "selection": TracinConfig(selection="drop_lowest", diagnose_every=1)},
    ),
    "soft": ({"more": VALIDATION}, {"selection": TracinConfig(selection="soft", preconditioner="adam")}),
}
"""Name → (options of GRPOConfig and the number of rows of a rollout, settings of the trace)."""


class FromTheTable(GRPOTrainer):
    """The same answers to a prompt on however many processes, with log-probs that are not the trainer's."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **more: Any) -> Any:
        digits = self._tokenizer("0123456789", add_special_tokens=False)["input_ids"]
        found, log_probs = [], []
        for place, prompt in enumerate(prompt_ids, self.accelerator.process_index * len(prompt_ids)):
            number = place % self.num_generations
            draw = random.Random(zlib.crc32(f"{prompt}/{number}/{self.state.global_step}".encode()))
            answer = [draw.choice(digits) for _ in range(draw.randint(1, 5))]
            found.append([*answer, self._tokenizer.eos_token_id] if draw.random() < 0.7 else answer)
            log_probs.append([-2.3 + draw.gauss(0.0, 0.1) for _ in found[-1]])
        return found, log_probs


def trainer_of(folder: Path, processes: int, **options: Any) -> Any:
    """In float64 up to TRL's head, which is float32: with Adam's usual ε a weight whose gradient is nearly 0 would blow
    up its rounding."""
    slices, rows = options.get("steps_per_generation", 2), options.pop("rows", 12)
    options["per_device_train_batch_size"] = rows // (processes * slices)
    return grpo_trainer(folder, FromTheTable, **{"dtype": torch.float64, "adam_epsilon": 1e-3} | options)


def run(name: str, folder: Path, processes: int, **more: Any) -> Any:
    options, settings = {**RUNS[name][0], **more}, RUNS[name][1]
    trainer = trainer_of(folder / name, processes, **options)
    attach(trainer, folder / name / "run", on_error="raise", blame_every=1, **settings)
    trainer.train()
    return trainer


def with_and_without(folder: Path) -> dict[str, Any]:
    """What training leaves behind, traced and not; with objectives that take passes of their own."""
    found: dict[str, Any] = {}
    for traced in (False, True):
        trainer = grpo_trainer(folder / str(traced), per_device_train_batch_size=2)  # TRL samples
        if traced:
            own_passes = InfluenceConfig.older(output_function="log_prob", credit="both")
            attach(trainer, folder / "bits", influence=own_passes, on_error="raise", blame_every=1)
        trainer.train()
        norms = [log.get("grad_norm") for log in trainer.state.log_history]
        found[str(traced)] = (weights(trainer), torch.get_rng_state(), norms)
    return found


def resumed(folder: Path) -> None:
    """Two steps of the default run, the second after a checkpoint."""
    # transformers 5.10 loads an optimizer's state to "cpu:0" on several CPU processes, which torch does not know.
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, where: storage if where.startswith("cpu") else None
    )
    for last, checkpoint in ((1, None), (2, "checkpoint-1")):
        trainer = trainer_of(folder / "resumed", 2, max_steps=last, save_strategy="steps", save_steps=1)
        attach(trainer, folder / "resumed" / "run", on_error="raise", blame_every=1, **RUNS["default"][1])
        trainer.train(resume_from_checkpoint=checkpoint and f"{trainer.args.output_dir}/{checkpoint}")


def sharding_trainer(folder: Path, **options: Any) -> Any:
    """With FSDP2. accelerate 1.15 shards on GPUs alone: its state is told that this is one."""
    trainer = trainer_of(folder, 2, **options)
    state = AcceleratorState()
    state.distributed_type, trainer.is_fsdp_enabled = DistributedType.FSDP, True
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
    )
    return trainer


def sharded(folder: Path) -> dict[str, Any]:
    """The default run with FSDP2, traced and not, in float32, for which differences of passes choose their step."""
    found: dict[str, Any] = {}
    for traced in (False, True):
        trainer = sharding_trainer(folder / "sharded", dtype=torch.float32)
        if traced:
            attach(trainer, folder / "sharded" / "run", on_error="raise", **RUNS["not_measured"][1])
        trainer.train()
        parameters = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
        found[str(traced)] = {name: value.detach().clone() for name, value in parameters.items()}
    said = []
    for settings in ({"selection": TracinConfig()}, {"influence": InfluenceConfig()}):
        trainer = sharding_trainer(folder / "refused", more=VALIDATION, bf16="influence" in settings)
        try:
            attach(trainer, folder / "refused" / "run", **settings)  # type: ignore[arg-type]
            trainer.train()
        except GradtraceError as error:
            said.append(str(error))
    return {"weights": found, "refusals": said}


def failing(folder: Path, rank: int) -> int:
    """Rollouts that are not traced where the first pass fails on one rank alone."""
    plain, calls = host.left_padded, []

    def broken(inputs: Any) -> Any:
        calls.append(inputs)
        if rank == 1 and len(calls) == 1:
            raise RuntimeError("nothing to see on this rank")
        return plain(inputs)

    host.left_padded = broken  # type: ignore[assignment]
    trainer = trainer_of(folder / "failing", 2)
    found = attach(trainer, folder / "failing" / "run")
    trainer.train()
    host.left_padded = plain
    return found.errors


def refusals(folder: Path) -> list[str]:
    """What is said on this rank to a folder that holds a run, and to checks by real steps."""
    said = []
    for run_dir, settings in ((folder / "default" / "run", {}), (folder / "new", {"verify_every": 1})):
        trainer = trainer_of(folder / "refused", 2)
        try:
            attach(trainer, run_dir, **settings)
            trainer.train()
        except GradtraceError as error:
            said.append(str(error))
    return said


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what packages made: Trainers collect garbage often, and would look through it every time
    for name in RUNS:
        trainer = run(name, folder, processes=2)
    rank = trainer.accelerator.process_index
    results = {
        "bits": with_and_without(folder),
        "refusals": refusals(folder),
        "errors": failing(folder, rank),
        "kind": type(trainer.model_wrapped).__name__,
    }
    resumed(folder)
    results["sharded"] = sharded(folder)
    torch.save(results, folder / f"rank_{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
