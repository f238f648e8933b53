"""Run by test_engine.py, one process that becomes the ranks: every case on a fresh engine; what was measured goes to
FOLDER/CASE.rank.pt."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from gradtrace.instruments.influence import INFLUENCE_TRACE, InfluenceTraceConfig
from tests.integrations.verl import blame_ranks, cases, harness, tracin_ranks


def full(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def weight_gradient_error(engine: Any, weights: dict[int, float]) -> dict[str, float]:
    """Identity 1: Σ over responses and ranks of Σ_t u_t v_tᵀ against the gradient that FSDP made, per layer."""
    gradients = dict(engine.module.named_parameters())
    errors = {}
    observer = engine.steps.observers.observers[INFLUENCE_TRACE]
    lengths = observer.tracer.factors._captured.counts
    for block, stored in observer.tracer.factors._store.targets.items():
        total = torch.zeros(block.d_out, block.d_in)
        for response, mean in stored.items():
            row = int(observer.capture.current.rows[response])
            total -= mean * lengths[response] * weights[row]  # the step goes downhill on the loss
        dist.all_reduce(total)
        expected = full(gradients[block.parameter_name].grad)
        total /= dist.get_world_size()
        errors[block.name] = float((total - expected).norm() / expected.norm().clamp(min=1e-8))
    return errors


def kept_log_probs(steps: Any) -> list[bool]:
    """Whether training's passes were kept, and whether extra passes at the same weights give the same bits."""
    host = steps.host
    rows = host.own(steps.update)
    with host.aside():
        found, own = (take(rows, lambda one: one.log_probs) for take in (host.kept_values, host.values))
    return [bool(host._kept), torch.equal(found, own)]


def run_case(name: str, folder: Path) -> Any:
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss
    from gradtrace.integrations.verl.tables import StepMessage
    from gradtrace.trace.columns import GroupStatus

    case = cases.CASES[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = torch.load(folder / "batch.pt", weights_only=False)
    batch = harness.in_turns(batch) if case.turns else batch
    plan = torch.tensor(cases.PLAN)
    selected = plan == 0 if case.first_only else torch.ones(len(batch), dtype=torch.bool)
    weights = harness.correction(batch) if case.layout.get("corrected") else None
    step_plan = cases.plan_of(name, batch.replace(loss_weights=weights))
    step_plan.status[batch.group[~selected]] = int(GroupStatus.OVER_PROMPT_CAP)
    message = StepMessage(1, plan, {INFLUENCE_TRACE: step_plan})
    engine = harness.make_engine(str(folder / "model"), **case.engine)
    parts_dir = folder / f"{name}.{world}"
    parts_dir.mkdir(exist_ok=True)
    loss = GradtraceLoss(
        harness.actor_config(**case.actor),
        instruments={INFLUENCE_TRACE: InfluenceTraceConfig(**cases.knobs_of(name))},
        folder=str(parts_dir),
    )
    errors: dict[str, float] = {}
    kept: list[bool] = []
    count = harness.PassCount(engine)
    metrics: list[Any] = []
    for number in range(2):
        rows = [row for row in cases.ranks_of(world)[rank] if cases.PLAN[row] == number]
        data = harness.tensordict(batch, rows, message, sequences=cases.PLAN.count(number), **case.layout)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            outputs = engine.forward_backward_batch(data, loss)
            if number == 0 and case.check_gradients:
                tokens = int(batch.response_lengths[plan == 0].sum())
                weights = dict.fromkeys(range(len(batch)), world / tokens)
                errors = weight_gradient_error(engine, weights)
            if name in cases.PARTS and number == 0:
                kept = kept_log_probs(engine.steps)
            metrics.append(engine.optimizer_step())
        del outputs
    parameters = {key: full(value.detach()).clone() for key, value in engine.module.named_parameters()}
    made = {"errors": errors, "grad_norms": metrics, "parameters": parameters}
    made["kept"] = kept
    made |= {"passes": count.passes, "micro_batches": count.micro_batches}
    torch.save(made, parts_dir / f"rank{rank}.pt")
    return engine


def give_state(engine: Any, moments: dict[str, dict[str, torch.Tensor]]) -> None:
    """The optimizer as it would be after some steps."""
    for name, parameter in engine.module.named_parameters():
        if name not in moments:
            continue  # of an adapter
        state = {"step": torch.tensor(5.0)}
        for key, value in moments[name].items():
            state[key] = distribute_tensor(value.clone(), parameter.device_mesh, parameter.placements)
        engine.optimizer.state[parameter] = state


def run_probe(name: str, folder: Path) -> None:
    """One optimizer step with the probe and one without; what they made of weights and moments."""
    from gradtrace.instruments.entropy_probe import ENTROPY_PROBE, EntropyProbeConfig
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss
    from gradtrace.integrations.verl.tables import StepMessage

    case = cases.PROBES[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    batch, evaluation, moments = (
        torch.load(folder / file, weights_only=False) for file in ("batch.pt", "evaluation.pt", "moments.pt")
    )
    parts_dir = folder / f"{name}.{world}"
    parts_dir.mkdir(exist_ok=True)
    first = torch.where(torch.tensor(cases.PLAN) == 0, 0, -1)
    message = StepMessage(1, first, {ENTROPY_PROBE: evaluation})
    rows = [row for row in cases.ranks_of(world)[rank] if cases.PLAN[row] == 0]
    made = {}
    for probed in (True, False):
        torch.manual_seed(0)  # adapters begin at random
        engine = harness.make_engine(str(folder / "model"), optim=cases.PROBED_OPTIM, **case.engine)
        give_state(engine, moments)
        found = {ENTROPY_PROBE: EntropyProbeConfig(every=1)} if probed else {}
        loss = GradtraceLoss(harness.actor_config(**case.actor), instruments=found, folder=str(parts_dir))
        data = harness.tensordict(batch, rows, message if probed else None, sequences=8, **case.layout)
        for _ in range(2):  # the second is another epoch, which is not probed
            with engine.train_mode():
                engine.train_batch(data, loss)
        state = engine.optimizer.state_dict()["state"]
        made[probed] = {
            "parameters": {k: full(v.detach()).clone() for k, v in engine.module.named_parameters()},
            "moments": {k: full(v["exp_avg_sq"]).clone() for k, v in state.items() if v},
            "random": torch.get_rng_state(),
        }
    torch.save(made, parts_dir / f"rank{rank}.pt")


def save_or_open(folder: Path) -> None:
    """Two ranks train a step and save; one rank opens that."""
    rank, world = dist.get_rank(), dist.get_world_size()
    actor = folder / "checkpoints" / "global_step_1" / "actor"
    engine = harness.make_engine(str(folder / "model"))
    if world == 2:
        batch = torch.load(folder / "batch.pt", weights_only=False)
        data = harness.tensordict(batch, cases.ranks_of(2)[rank][:4], None, sequences=8)
        from gradtrace.integrations.verl.rank.losses import GradtraceLoss

        with engine.train_mode():
            engine.train_batch(data, GradtraceLoss(harness.actor_config()))
            engine.lr_scheduler_step()
        engine.save_checkpoint(str(actor), global_step=1)
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
        engine.load_checkpoint(str(actor))  # as verl does it, on the same number of workers
    else:
        engine.load_checkpoint(str(actor))
    state = engine.optimizer.state_dict()["state"]
    found = {
        "parameters": {k: full(v.detach()).clone() for k, v in engine.module.named_parameters()},
        "moments": {k: full(v["exp_avg"]).clone() for k, v in state.items()},
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
    }
    torch.save(found, folder / f"checkpoint.{world}.{rank}.pt")


def hung_rank(engine: Any) -> str:
    """What rank 0 says when rank 1 does not come to score."""
    from gradtrace.errors import GradtraceError
    from gradtrace.integrations.verl.rank.process_group import VARIABLE

    os.environ[VARIABLE] = "2"
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    try:
        engine.steps.meet("step 1, mini-batch 0")
    except GradtraceError as error:
        return str(error)
    return ""


def refusals(folder: Path) -> dict[str, str]:
    """What the engine says to settings that would go wrong."""
    from gradtrace.errors import GradtraceError
    from gradtrace.instruments import influence
    from gradtrace.instruments.steps import check_needs
    from gradtrace.integrations.verl.cannot import engine_cannot

    found = {}
    try:
        harness.make_engine(str(folder / "model"), ulysses_sequence_parallel_size=dist.get_world_size())
    except GradtraceError as error:
        found["ulysses"] = str(error)
    coarse = harness.make_engine(str(folder / "model"), model_dtype="bf16")
    try:
        check_needs(influence.INSTRUMENT, InfluenceTraceConfig(), engine_cannot(coarse), "gradtrace.influence_trace")
    except GradtraceError as error:
        found["coarse"] = str(error)
    return found


def work(names: list[str], folder: Path) -> None:
    """What one rank does."""
    from verl.utils.distributed import initialize_global_process_group_ray

    torch.set_num_threads(1)
    initialize_global_process_group_ray()
    for name in names:
        if name in cases.PROBES:
            run_probe(name, folder)
        elif name in blame_ranks.BLAMED:
            blame_ranks.run(name, folder)
        else:
            last_engine = run_case(name, folder)
    blame_ranks.measure_mismatch(folder)
    tracin_ranks.run(folder)
    save_or_open(folder)
    if dist.get_world_size() > 1:
        said = refusals(folder) | {"hung": hung_rank(last_engine)}
        if dist.get_rank() == 0:
            torch.save(said, folder / "refusals.pt")


if __name__ == "__main__":
    import verl  # noqa: F401  (registers the platform and the engine)

    for world, names in json.loads(sys.argv[2]).items():
        harness.as_ranks(int(world), functools.partial(work, names, Path(sys.argv[1])))
