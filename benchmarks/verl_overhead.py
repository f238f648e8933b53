"""The influence trace inside verl's FSDP2 engine on two ranks: time of the update with and without it, and bytes moved.

    python -m benchmarks.verl_overhead [--quick]

Two gloo processes train the same engine on the same batch of 16 groups, in turns with the default trace, with one of
the groups measured as well, and without a trace. `overhead_update` and `overhead_update_measured` are with over
without. `bytes_share` is what attribution sends over what FSDP sends in a traced update, with groups dealt to ranks
as our trainer deals them (whole); `bytes_share_split` the same with every group split over both ranks; its passes
gather the weights again, as any pass does. `overhead_update_blame` is that of a step whose gradient is decomposed
(every fifth by default), without the trace.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Timing, emit, parse_arguments, seconds
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame import BLAME, BlameConfig
from gradtrace.instruments.influence import INFLUENCE_TRACE, InfluenceTraceConfig

GROUPS, GROUP_SIZE = 16, 4
MICRO_BATCH = 8
# Bytes that a rank sends per byte of its input, in a ring of W ranks.
COLLECTIVES = {
    "all_gather_single": lambda ranks: ranks - 1,
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter_single": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1,
}


def batch(response_tokens: int) -> RolloutBatch:
    """Random responses of one length; log-probs do not matter for the time, so they are made up."""
    generator = torch.Generator().manual_seed(0)
    rows = GROUPS * GROUP_SIZE
    rewards = torch.rand(rows, generator=generator)
    shape = (rows, response_tokens)
    group = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    mean = torch.stack([rewards[group == g].mean() for g in range(GROUPS)])[group]
    log_probs = torch.full(shape, -3.0)
    return RolloutBatch(
        prompts=[torch.randint(3, 18, (32,), generator=generator).tolist() for _ in range(GROUPS)],
        group=group,
        responses=torch.randint(3, 18, shape, generator=generator),
        response_mask=torch.ones(shape, dtype=torch.bool),
        finished=torch.ones(rows, dtype=torch.bool),
        sampler_log_probs=log_probs,
        old_log_probs=log_probs,
        rewards=rewards,
        advantages=(rewards - mean)[:, None].expand(shape).clone(),
    )


class Traffic:
    """Bytes that this rank sends in collectives, by who asked."""

    def __init__(self) -> None:
        self.bytes: dict[str, float] = defaultdict(float)
        self.owner = "fsdp"
        for name, factor in COLLECTIVES.items():
            setattr(dist, name, self._counted(getattr(dist, name), factor(dist.get_world_size())))
        gather = dist.all_gather_object

        def counted_objects(found: list[Any], value: Any, *args: Any, **options: Any) -> None:
            self.bytes[self.owner] += len(pickle.dumps(value)) * (len(found) - 1)
            gather(found, value, *args, **options)

        setattr(dist, "all_gather_object", counted_objects)  # noqa: B010  (a name that mypy lets us give anew)

    def _counted(self, collective: Any, factor: float) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            # The input comes last, after the output where there is one.
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            self.bytes[self.owner] += factor * sum(t.numel() * t.element_size() for t in tensors[-1:])
            return collective(*args, **options)

        return counted

    def count_scoring_of(self, steps: Any) -> None:
        """What is sent before an optimizer step by these instruments is attribution's from now on."""
        score = steps.before_step

        def counted_score() -> None:
            self.owner = "attribution"
            score()
            self.owner = "fsdp"

        steps.before_step = counted_score


def rank_main(folder: Path, response_tokens: int, rounds: int) -> None:
    """One rank; rank 0 leaves its measurements in `folder`."""
    import verl  # noqa: F401  (registers platform and engine)
    from verl.utils.distributed import initialize_global_process_group_ray

    from gradtrace.instruments.influence.plan import StepPlan, status_by_advantage
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss
    from gradtrace.integrations.verl.tables import StepMessage
    from tests.integrations.verl import harness

    torch.set_num_threads(1)
    initialize_global_process_group_ray()
    rank = dist.get_rank()
    engine = harness.make_engine(str(folder / "model"))
    rollout = batch(response_tokens)
    traffic = Traffic()
    step = 0
    made: dict[GradtraceLoss, Any] = {}

    def update(rows: list[int], loss: GradtraceLoss) -> None:
        nonlocal step
        step += 1
        engine.steps = made.get(loss)  # a run has one loss; making its instruments is no part of an update
        groups = torch.arange(1 if loss is measured else 0)
        plan = StepPlan.of(rollout, step, status_by_advantage(rollout), own=groups, measured=groups)
        plans = {INFLUENCE_TRACE: plan, BLAME: True}
        plans = {name: plan for name, plan in plans.items() if name in loss.instruments}
        message = StepMessage(step, torch.zeros(len(rollout), dtype=torch.long), plans) if plans else None
        data = harness.tensordict(rollout, rows, message, sequences=len(rollout), micro_batch=MICRO_BATCH)
        with engine.train_mode():
            engine.train_batch(data, loss)

    def loss_of(**instruments: Any) -> GradtraceLoss:
        return GradtraceLoss(harness.actor_config(), instruments=instruments, folder=str(folder))

    plain = loss_of()
    traced = loss_of(influence_trace=InfluenceTraceConfig(enable=True))
    measured = loss_of(influence_trace=InfluenceTraceConfig(enable=True))
    blamed = loss_of(blame=BlameConfig(enable=True))
    half = len(rollout) // 2
    whole = list(range(rank * half, (rank + 1) * half))
    split = list(range(rank, len(rollout), 2))
    for loss in (plain, blamed):
        update(whole, loss)
        made[loss] = engine.steps
    shares = {}
    for name, rows, loss in (("whole", whole, traced), ("split", split, traced), ("measured", whole, measured)):
        if loss not in made:
            update(rows, loss)  # makes its instruments
            made[loss] = engine.steps
            traffic.count_scoring_of(engine.steps)
        traffic.bytes.clear()
        update(rows, loss)
        shares[name] = dict(traffic.bytes)
    times: dict[str, list[float]] = {"with": [], "measured": [], "blame": [], "without": []}
    turns = [("with", traced), ("measured", measured), ("blame", blamed), ("without", plain)]
    for _ in range(rounds):
        for name, loss in turns:
            dist.barrier()
            times[name].append(seconds(functools.partial(update, whole, loss)))
        turns.reverse()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"times": times, "bytes": shares}))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", nargs=3, help=argparse.SUPPRESS)

    args = parse_arguments(__doc__, arguments, extra)
    from tests.integrations.verl import harness

    if args.ranks:
        folder, response_tokens, rounds = Path(args.ranks[0]), *map(int, args.ranks[1:])
        harness.as_ranks(2, functools.partial(rank_main, folder, response_tokens, rounds))
        return
    # Four layers of SmolLM2-135M's shape. Narrower layers pay more: at 256 wide the overhead is about 1.10.
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9}
    response_tokens, rounds = (16, 2) if args.quick else (64, 6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {**sizes, "num_key_value_heads": 3, "initializer_range": 0.02, "tie_word_embeddings": False}
        harness.model_folder(folder / "model", **options)
        command = [sys.executable, "-m", "benchmarks.verl_overhead", "--ranks", name, str(response_tokens), str(rounds)]
        subprocess.run(command, env=harness.environment(), check=True, stdout=subprocess.DEVNULL)
        found = json.loads((folder / "found.json").read_text())
    without = found["times"].pop("without")
    timing, measured, blame = (Timing(found["times"][name], without) for name in ("with", "measured", "blame"))
    shares = {key: value.get("attribution", 0) / value["fsdp"] for key, value in found["bytes"].items()}
    ratios = {
        "overhead_update": timing,
        "overhead_update_measured": measured,
        "overhead_update_blame": blame,
        "bytes_share": shares["whole"],
        "bytes_share_split": shares["split"],
    }
    detail = {
        "with_s": round(timing.theirs_median, 4),
        "without_s": round(timing.ours_median, 4),
        "times_s": {key: [round(v, 4) for v in values] for key, values in found["times"].items()},
        "bytes": found["bytes"],
        "responses": GROUPS * GROUP_SIZE,
        "response_tokens": response_tokens,
        "model": sizes,
        "ranks": 2,
    }
    emit("verl_overhead", ratios, detail)


if __name__ == "__main__":
    main(sys.argv[1:])
