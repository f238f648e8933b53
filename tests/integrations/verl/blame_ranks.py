"""Blame on verl's engine, as ranks compute it: run by engine_worker.py, checked by blame_checks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame import BLAME, BlameConfig
from tests.integrations.verl import cases, harness
from tests.integrations.verl.cases import Case

BLAMED = {
    "blame_packed": Case(),
    "blame_turns": Case(
        {"packed": False, "checkpointing": True},
        {"packed": False},
        {"loss_agg_mode": "seq-mean-token-mean"},
        turns=True,
    ),
    "blame_corrected": Case({"optim": {"clip_grad": 0.05, "weight_decay": 0.1}}, {"dynamic": True, "corrected": True}),
    "blame_flash": Case(cases.HALF_PRECISION),
    "blame_lora": Case({"lora_rank": 4, "param_offload": True, "optimizer_offload": True}),
}
SETTINGS = BlameConfig(enable=True, sketch_dim=1000, write_every=1, on_error="raise")
"""Sketches of this size are the gradients themselves."""


def names(world: int) -> list[str]:
    return list(BLAMED) if world == 2 else ["blame_packed"]


def batch_of(folder: Path, name: str) -> RolloutBatch:
    batch: RolloutBatch = torch.load(folder / "batch.pt", weights_only=False)
    return harness.in_turns(batch) if BLAMED[name].turns else batch


def run(name: str, folder: Path) -> None:
    """Two mini-batches and a later epoch, with blame and without; what they made of weights and moments."""
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss
    from gradtrace.integrations.verl.tables import StepMessage

    case, rank, world = BLAMED[name], dist.get_rank(), dist.get_world_size()
    parts_dir = folder / f"{name}.{world}"
    parts_dir.mkdir(exist_ok=True)
    batch, made = batch_of(folder, name), {}
    message = StepMessage(1, torch.tensor(cases.PLAN), {BLAME: True})
    for blamed in (True, False):
        torch.manual_seed(0)  # adapters begin at random
        engine = harness.make_engine(str(folder / "model"), **case.engine)
        count = harness.PassCount(engine)
        actor = harness.actor_config(**case.actor)
        loss = GradtraceLoss(actor, instruments={BLAME: SETTINGS} if blamed else {}, folder=str(parts_dir))
        for number in (0, 1, 0):
            rows = [row for row in cases.ranks_of(world)[rank] if cases.PLAN[row] == number]
            data = harness.tensordict(batch, rows, message if blamed else None, sequences=8, **case.layout)
            with engine.train_mode():
                engine.train_batch(data, loss)
        made[blamed] = state_of(engine)
        if blamed:
            counted = {"passes": count.passes}
    torch.save(made, parts_dir / f"rank{rank}.pt")
    torch.save(counted, parts_dir / f"counted{rank}.pt")


def measure_mismatch(folder: Path) -> None:
    """The share that a sampler who disagrees makes of the first mini-batch's gradient, before it is trained on."""
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss
    from gradtrace.integrations.verl.tables import StepMessage

    rank, world = dist.get_rank(), dist.get_world_size()
    parts_dir = folder / f"mismatch.{world}"
    parts_dir.mkdir(exist_ok=True)
    batch = batch_of(folder, "blame_packed")
    rows = [row for row in cases.ranks_of(world)[rank] if cases.PLAN[row] == 0]
    made = {}
    for measured in (True, False):
        engine = harness.make_engine(str(folder / "model"))
        asked = {"mismatch": 1} if measured else {}
        loss = GradtraceLoss(harness.actor_config(), instruments=asked, folder=str(parts_dir))
        message = StepMessage(1, torch.where(torch.tensor(cases.PLAN) == 0, 0, -1), {"mismatch": True})
        data = harness.tensordict(batch, rows, message if measured else None, sequences=8, sampled=True)
        with engine.train_mode():
            engine.train_batch(data, loss)
        made[measured] = state_of(engine)
    torch.save(made, parts_dir / f"rank{rank}.pt")


def state_of(engine: Any) -> dict[str, Any]:
    from tests.integrations.verl.engine_worker import full

    state = engine.optimizer.state_dict()["state"]
    return {
        "parameters": {k: full(v.detach()).clone() for k, v in engine.module.named_parameters()},
        "moments": {k: full(v["exp_avg_sq"]).clone() for k, v in state.items() if v},
        "random": {"generator": torch.get_rng_state()},
    }
