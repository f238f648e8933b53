"""Scores of a model that FSDP2 has sharded over two processes, against one process."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.commands.device.equality import SmallCase


def worker(rank: int, port: int, device_type: str, folder: str) -> None:
    """One of two processes: shards the model with the other, scores its own groups, and saves them in `folder`."""
    from torch.distributed.fsdp import fully_shard

    backend = "nccl" if device_type == "cuda" else "gloo"
    device = torch.device(device_type, rank if device_type == "cuda" else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        case = SmallCase()
        model = case.model.to(device, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        found = traced(case, model, device, [r for r in range(len(case.ids)) if case.group[r] % 2 == rank])
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def traced(case: SmallCase, model: nn.Module, device: torch.device, own: list[int]) -> dict[int, Tensor]:
    """Scores of the groups that are dealt to this rank, by response; at the first step, so that the batch's own
    gradient is the geometry."""

    def terms(responses: list[int]) -> Tensor:
        # A rank that has none keeps the others company.
        found = case.terms(model, device, responses or own[:1])
        return found[: None if responses else 0]

    group = dist.group.WORLD if dist.is_initialized() else None
    size = dist.get_world_size() if group else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = InfluenceConfig(projection_dim_factor=0, loss_term_prompts=0)
    with InfluenceTracer(model, config, process_group=group, optimizer=optimizer) as tracer:
        with tracer.capture(
            response=torch.tensor(own),
            tokens=case.tokens[own],
            accepted=case.accepted,
            group=case.group,
            scale=1 / size,
            target_scale=1 / (size * case.advantages),
        ):
            (terms(own).sum() * size).backward()  # FSDP takes the mean over ranks, and a step follows the sum
        trace = tracer.score(terms=terms, method="finite_difference" if group else "jvp", coming=True)
    return {r: scores.double().cpu() for r, scores in enumerate(trace.token_scores) if len(scores)}


def shards_agree(device_type: str) -> float:
    """Spearman's correlation of the scores of two ranks with those of one process."""
    from gradtrace.instruments.verify.agreement import spearman

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        # Both are copies of one process that has imported this file, which takes seconds; it has touched no device.
        multiprocessing.set_forkserver_preload([__name__])
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        mp.start_processes(worker, args=(port, device_type, folder), nprocs=2, start_method=method)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in (0, 1)]
    case = SmallCase()
    one = traced(case, case.model.float(), torch.device("cpu"), list(range(len(case.ids))))
    two = ranks[0] | ranks[1]
    return spearman(torch.cat([two[r] for r in one]), torch.cat([one[r] for r in one]))
