"""Scores of a small model against those of the CPU in float64: on a device, and sharded by FSDP2 over two processes."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.policy.policy import KeepDouble

GROUPS, EACH, PROMPT, LENGTH, VOCABULARY = 4, 4, 6, 12, 97
TOLERANCE = {"float32": 0.9999, "bf16": 0.98}
"""Rank correlations below these are a fault of the device, its driver or our code, and no matter of rounding."""


@dataclass(frozen=True)
class Agreement:
    """How well scores of one kind agree with the CPU's in float64."""

    score: str
    precision: str
    correlation: float
    """Spearman's, over all tokens."""
    error: float
    """‖difference‖ / ‖scores‖."""

    @property
    def is_good(self) -> bool:
        return self.correlation >= TOLERANCE[self.precision]


def kinds() -> dict[str, InfluenceConfig]:
    common: dict[str, Any] = {"target": "log_prob"}
    inverse: dict[str, Any] = {"hessian_mode": "inverse", "reg_scale": 1.0}
    return {
        "influence (default)": InfluenceConfig(),
        "optimizer, loss term": InfluenceConfig(**common),
        "optimizer factored, loss term": InfluenceConfig(**common, preconditioner_form="factored"),
        "optimizer, position": InfluenceConfig(**common, credit="position"),
        "identity, position": InfluenceConfig(**common, credit="position", hessian_mode="identity"),
        "inverse, loss term": InfluenceConfig(**common, **inverse),
    }


class SmallCase:
    """A random model with an optimizer that has made a few steps, and a batch of responses to trace."""

    def __init__(self) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.2,
            )
            self.model = Qwen2ForCausalLM(config).double().eval()
        rows = GROUPS * EACH
        self.ids = torch.randint(VOCABULARY, (rows, PROMPT + LENGTH), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows,), generator=generator)
        places = torch.arange(PROMPT + LENGTH)
        self.tokens = (places >= PROMPT) & (places < PROMPT + lengths[:, None])
        self.accepted = torch.arange(rows) % 2 == 0
        self.advantages = torch.where(self.accepted, 1.0, -1.0)
        self.group = torch.arange(GROUPS).repeat_interleave(EACH)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(3):
            self.model(input_ids=self.ids).logits.logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.state = optimizer.state_dict()

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(self.model).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.load_state_dict(copy.deepcopy(self.state))
        return model, optimizer

    def terms(self, model: nn.Module, responses: list[int], half: bool = False) -> Tensor:
        """A · log-prob of the tokens of these responses."""
        rows, weight = torch.tensor(responses), next(model.parameters())
        device, dtype = weight.device, weight.dtype
        ids, mask = self.ids[rows].to(device), self.tokens[rows].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(input_ids=ids, use_cache=False).logits
        found = logits[:, :-1].to(dtype).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return found[mask[:, 1:]] * self.advantages[rows].to(device, dtype).repeat_interleave(mask.sum(1))

    def scores(
        self, config: InfluenceConfig, device: torch.device, dtype: torch.dtype = torch.float32, half: bool = False
    ) -> Tensor:
        """Scores of all response tokens, one after the other, on the CPU. `half`: passes under bf16 autocast."""
        model, optimizer = self.on(device, dtype)
        if config.is_parts:
            return self.parts(model, optimizer, half)
        found = traced(self, model, optimizer, config, list(range(len(self.ids))), half)
        return torch.cat(list(found.values()))

    def parts(self, model: nn.Module, optimizer: torch.optim.Optimizer, half: bool) -> Tensor:
        """The default scores. Differences of passes are taken in full precision, whatever training computes in."""
        every, counts = list(range(len(self.ids))), self.tokens.sum(1).tolist()
        (-self.terms(model, every, half).sum()).backward()
        with KeepDouble() if next(model.parameters()).dtype == torch.float64 else contextlib.nullcontext():
            found = InfluenceTracer(model, optimizer).parts(lambda: (-self.terms(model, every)).split(counts))
        return torch.cat(found.tokens)


def traced(
    case: SmallCase,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: InfluenceConfig,
    own: list[int],
    half: bool = False,
) -> dict[int, Tensor]:
    """Scores of the responses `own`, those of this rank. Before the optimizer's first step the geometry is the batch's
    own gradient."""

    def terms(responses: list[int]) -> Tensor:
        # A rank that has none keeps the others company.
        return case.terms(model, responses or own[:1], half)[: None if responses else 0]

    group = dist.group.WORLD if dist.is_initialized() else None
    size = dist.get_world_size() if group else 1
    with InfluenceTracer(model, config=config, process_group=group, optimizer=optimizer) as tracer:
        with tracer.capture(
            response=torch.tensor(own),
            tokens=case.tokens[own],
            accepted=case.accepted,
            group=case.group,
            scale=1 / size,
            target_scale=1 / (size * case.advantages),
        ):
            (terms(own).sum() * size).backward()  # FSDP takes the mean over ranks, and a step follows the sum
        trace = tracer.score(
            terms=terms if config.wants_loss_term else None,
            method="finite_difference" if group else None,
            coming=None if optimizer.state else True,
        )
    return {r: scores.double().cpu() for r, scores in enumerate(trace.token_scores) if len(scores)}


def traced_at_first(case: SmallCase, model: nn.Module, own: list[int]) -> dict[int, Tensor]:
    config = InfluenceConfig(target="log_prob")
    return traced(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3), config, own)


def agreements(device: torch.device) -> list[Agreement]:
    """Every kind of score in float32 and with bf16 passes on `device`, against float64 on the CPU."""
    from gradtrace.instruments.verify.measure import spearman

    case, found = SmallCase(), []
    for name, config in kinds().items():
        exact = case.scores(config, torch.device("cpu"), torch.float64)
        for precision in TOLERANCE:
            ours = case.scores(config, device, half=precision == "bf16")
            error = float((ours - exact).norm() / exact.norm())
            found.append(Agreement(name, precision, spearman(ours, exact), error))
    return found


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
        found = traced_at_first(case, model, [r for r in range(len(case.ids)) if case.group[r] % 2 == rank])
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def shards_agree(device_type: str) -> float:
    """Spearman's correlation of the scores of two ranks with those of one process."""
    from gradtrace.instruments.verify.measure import spearman

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
    one = traced_at_first(case, case.model.float(), list(range(len(case.ids))))
    two = ranks[0] | ranks[1]
    return spearman(torch.cat([two[r] for r in one]), torch.cat([one[r] for r in one]))
